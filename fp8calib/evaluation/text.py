"""The held-out text that variants are compared on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.data import TokenData, load_data
from fp8calib.data_sources import DEFAULT_DATASET, PYDOC
from fp8calib.errors import DataError
from fp8calib.model_loading import load_tokenizer, max_length
from fp8calib.models import DEMO_PREFIX

if TYPE_CHECKING:
    from fp8calib.evaluation.end_to_end import VerifyConfig

FEW_DOCUMENTS = 32


def default_text(model: str, sidecar: dict[str, Any]) -> tuple[str, str]:
    """Dataset and split to use when none is given: the half of the default calibration data that
    calibration does not see.

    `model` is what the user wrote; `sidecar` is what the checkpoint records of its calibration.
    """
    original = str(sidecar.get("model") or model)
    if original.startswith(DEMO_PREFIX) or _calibrated_on(sidecar)[0] == PYDOC:
        return PYDOC, "heldout"
    return DEFAULT_DATASET, "test_sft"


def load_text(
    model: str, folder: Path, sidecar: dict[str, Any], config: VerifyConfig
) -> tuple[TokenData, list[str]]:
    """Documents of at least two tokens (one to predict), and what to say about them.

    Raises:
        DataError: no such text, or no document of two tokens.
    """
    warnings = []
    dataset, split = config.dataset, config.split
    if dataset is None:
        dataset, default_split = default_text(model, sidecar)
        split = split or default_split
    if (dataset, split) == _calibrated_on(sidecar):
        warnings.append(
            "this is the text that the scales were calibrated on: other text would show more loss"
        )
    longest = max_length(folder, config.trust_remote_code) or config.max_seq_len
    data = load_data(
        load_tokenizer(folder, config.trust_remote_code),
        dataset,
        split=split,
        samples=config.samples,
        max_seq_len=min(config.max_seq_len, longest),
        seed=config.seed,
        text_column=config.text_column,
        messages_column=config.messages_column,
    )
    if config.max_seq_len > longest:
        warnings.append(f"texts are cut to {longest} tokens: the model has no more positions")
    rows = [row for row in data.rows if len(row) > 1]
    if not rows:
        raise DataError(f"{dataset}: no text has two tokens, so there is nothing to predict")
    if len(rows) < len(data.rows):
        count = len(data.rows) - len(rows)
        warnings.append(f"{count} texts of a single token are left out: they predict nothing")
    if len(rows) < FEW_DOCUMENTS:
        warnings.append(
            f"intervals from {len(rows)} documents are rough: use at least {FEW_DOCUMENTS}"
        )
    return replace(data, rows=rows), warnings


def long_text(tokenizer: Any, data: TokenData, config: VerifyConfig, tokens: int) -> list[int]:
    """The documents one after the other, with more of the dataset where they are fewer than
    `tokens`; still fewer where it has no more."""
    while data.num_tokens < tokens:
        mean = max(1, data.num_tokens // len(data.rows))
        data = load_data(
            tokenizer,
            data.source,
            split=data.split,
            samples=tokens // mean + 1,
            max_seq_len=max(config.max_seq_len, tokens),
            seed=config.seed,
            text_column=config.text_column,
            messages_column=config.messages_column,
        )
        if len(data.rows) < data.requested:  # there are no more
            break
    return [token for row in data.rows for token in row]


def _calibrated_on(sidecar: dict[str, Any]) -> tuple[Any, Any]:
    data = sidecar.get("dataset")
    return (data.get("name"), data.get("split")) if isinstance(data, dict) else (None, None)
