"""Loading what a checkpoint folder holds through transformers: model, tokenizer, device, dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from fp8calib.console import stderr
from fp8calib.errors import ModelError, UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU. Raises UserError for one not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_config(source: Path, trust_remote_code: bool = False) -> Any:
    return _load(AutoConfig, source, trust_remote_code)


def load_tokenizer(source: Path, trust_remote_code: bool = False) -> Any:
    return _load(AutoTokenizer, source, trust_remote_code)


def max_length(source: Path, trust_remote_code: bool = False) -> int | None:
    """The number of positions the model was made for, None where its config does not say."""
    text = load_config(source, trust_remote_code).get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)


def load_model(
    source: Path,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    config: Any = None,
) -> PreTrainedModel:
    """The causal language model in `source`, in eval mode, on one device; a vision-language model
    as a whole. `config` replaces the one in its config.json.

    Raises:
        ModelError: transformers cannot load it, or it needs code of its own and may not run it.
        UserError: an unknown device or dtype.
    """
    where, kind = resolve_device(device), resolve_dtype(dtype)
    if not stderr.is_terminal:
        logging.disable_progress_bar()
    placed = {"device_map": {"": where}} if where.type == "cuda" else {}
    config = load_config(source, trust_remote_code) if config is None else config
    loader: Any = AutoModelForCausalLM
    if type(config) not in loader._model_mapping and not hasattr(config, "auto_map"):
        loader = AutoModelForMultimodalLM
    model = _load(loader, source, trust_remote_code, dtype=kind, config=config, **placed)
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:
        # compressed-tensors would do it at the first forward pass of the whole model, and
        # calibration runs only up to the head
        compressor.decompress_model(model)
    return model.eval().requires_grad_(False)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many token ids the model has embeddings for."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.num_embeddings)


def _load(loader: Any, source: Path, trust_remote_code: bool, **options: Any) -> Any:
    try:
        return loader.from_pretrained(
            source, trust_remote_code=trust_remote_code, local_files_only=True, **options
        )
    except torch.OutOfMemoryError:
        raise ModelError(f"{source}: the model does not fit into the device's memory") from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as problem:
        first = " ".join(str(problem).split())[:300]
        if "trust_remote_code" in first:
            first = "it needs Python code of its own; read it, then use --trust-remote-code"
        what = loader.__name__.removeprefix("Auto")
        raise ModelError(f"{source}: cannot be loaded ({what}): {first}") from problem
