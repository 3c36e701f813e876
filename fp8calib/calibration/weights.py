"""Quantizing weights first: a recipe's `llmcompressor` section, through llm-compressor itself.

The result is a checkpoint like any other, and the KV cache is calibrated on *that* model: its
scales are those of the values that will be served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from llmcompressor import oneshot
from llmcompressor.core import create_session
from torch.utils.data import DataLoader

from fp8calib.calibration.oneshot import as_it_was
from fp8calib.checkpoint.folder import copy_file
from fp8calib.checkpoint.writer import companions
from fp8calib.errors import RecipeError
from fp8calib.model_loading import load_model, load_tokenizer


def quantize_weights(
    source: Path,
    folder: Path,
    recipe: dict[str, Any],
    rows: Sequence[Sequence[int]],
    *,
    device: str,
    dtype: str,
    trust_remote_code: bool,
) -> None:
    """Apply a native llm-compressor `recipe` to the model in `source`, calibrated on `rows` (token
    ids, one text each), and save the compressed checkpoint in `folder`.

    Raises:
        RecipeError: llm-compressor does not accept the recipe.
    """
    model = load_model(source, device, dtype, trust_remote_code)
    batches: Any = [{"input_ids": torch.tensor([list(row)])} for row in rows]
    with as_it_was(model), create_session():
        try:
            oneshot(
                model=model,
                processor=load_tokenizer(source, trust_remote_code),
                dataset=DataLoader(batches, batch_size=None, shuffle=False),
                recipe=yaml.safe_dump(recipe),
                trust_remote_code_model=trust_remote_code,
                output_dir=str(folder),
            )
        except (ValueError, KeyError, TypeError) as problem:
            first = " ".join(str(problem).split())[:300]
            raise RecipeError(f"llmcompressor section: not accepted: {first}") from problem
    # What it saves beside the weights is rewritten by transformers; the source's files are right.
    for file in [*companions(source), Path("README.md")]:
        if (source / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).unlink(missing_ok=True)
            copy_file(source / file, folder / file)
