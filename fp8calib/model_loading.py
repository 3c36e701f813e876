"""Loading what a checkpoint folder holds through transformers: model, tokenizer, device, dtype."""

from __future__ import annotations

import ctypes
import tempfile
from contextlib import suppress
from copy import deepcopy
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

from fp8calib import dequantized
from fp8calib.console import stderr
from fp8calib.devices import check_device, check_device_map, check_dtype
from fp8calib.errors import ModelError, UserError

_M_MMAP_THRESHOLD = -3  # malloc.h


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one, else the CPU. Raises UserError for one not there."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str) -> torch.dtype | str:
    """`auto` stays that word. Raises UserError for an unknown one."""
    check_dtype(name)
    return name if name == "auto" else getattr(torch, name)


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
    device_map: str | None = None,
) -> PreTrainedModel:
    """The causal language model in `source`, in eval mode, on one device; a vision-language model
    as a whole. `config` replaces the one in its config.json.

    `device_map` is for models that do not fit: ``auto`` spreads the layers over all GPUs and then
    the CPU's memory (accelerate); ``stream`` keeps the embeddings on `device` and reads each layer
    from disk when its turn comes.

    Raises:
        ModelError: transformers cannot load it, or it needs code of its own and may not run it.
        UserError: an unknown device, device map or dtype.
    """
    where, kind = resolve_device(device), resolve_dtype(dtype)
    check_device_map(device_map)
    if not stderr.is_terminal:
        logging.disable_progress_bar()
    placed: dict[str, Any] = {"device_map": {"": where}} if where.type == "cuda" else {}
    config = load_config(source, trust_remote_code) if config is None else config
    loader: Any = AutoModelForCausalLM
    if type(config) not in loader._model_mapping and not hasattr(config, "auto_map"):
        loader = AutoModelForMultimodalLM
    folder = tempfile.TemporaryDirectory(prefix="fp8calib-offload-") if device_map else None
    if folder is not None:
        placed = {"device_map": "auto", "offload_folder": folder.name}
        if device_map == "stream":
            if getattr(config, "quantization_config", None):
                raise UserError("--device-map stream reads unquantized weights only: use auto")
            placed["device_map"] = _streamed(loader, config, where)
            _hand_back_freed_memory()
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in dequantized.METHODS:
        model = _load_dequantized(source, loader, config, kind, placed)
    else:
        options = {"dtype": kind, "config": config, "output_loading_info": True, **placed}
        model, found = _load(loader, source, trust_remote_code, **options)
        _check_complete(source, found)
    vars(model)["offload_folder"] = folder  # lives as long as the model
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is not None:
        # compressed-tensors would do it at the first forward pass of the whole model, and
        # calibration runs only up to the head
        compressor.decompress_model(model)
    return model.eval().requires_grad_(False)


def _load_dequantized(
    source: Path, loader: Any, config: Any, dtype: torch.dtype | str, placed: dict[str, Any]
) -> PreTrainedModel:
    config = deepcopy(config)
    section = config.quantization_config
    del config.quantization_config
    kind = (config.dtype or torch.bfloat16) if isinstance(dtype, str) else dtype
    if type(config) not in loader._model_mapping:
        raise ModelError(f"{source}: {type(config).__name__} cannot be loaded dequantized")
    weights = dequantized.state_dict(source, section, kind)
    model_class = loader._model_mapping[type(config)]
    model, found = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=kind, output_loading_info=True, **placed
    )
    _check_complete(source, found)
    return model


def _check_complete(source: Path, found: dict[str, Any]) -> None:
    """Refuse weights that transformers did not find and made up: it only prints a table."""
    missing = sorted(
        name
        for name in found["missing_keys"]
        if not name.endswith(("q_scale", "k_scale", "v_scale"))
    )
    if missing:
        raise ModelError(
            f"{source}: {len(missing)} tensors that config.json asks for are not in the weights, "
            f"{missing[0]} for one; the download may be incomplete"
        )


def _streamed(loader: Any, config: Any, device: torch.device) -> dict[str, Any]:
    """An accelerate device map: the decoder's layers, and what is no part of it, on disk."""
    with torch.device("meta"):
        model = loader.from_config(config)
    decoder = model.get_decoder()
    embeddings = model.get_input_embeddings().weight
    placed: dict[str, Any] = {}

    def place(module: torch.nn.Module, name: str, inside: bool) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if any(part is decoder for part in child.modules()):
                place(child, path, child is decoder)
                continue
            held = inside and not isinstance(child, torch.nn.ModuleList)
            tied = any(parameter is embeddings for parameter in child.parameters())
            placed[path] = str(device) if held or tied else "disk"

    place(model, "", decoder is model)
    return placed


def _hand_back_freed_memory() -> None:
    """Have glibc return freed blocks of a megabyte and more at once; it would keep those of earlier
    layers for re-use, three times what one layer takes."""
    with suppress(AttributeError, OSError):  # another C library has no such setting
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


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
    except Exception as problem:  # other people's code over a file that may hold anything
        first = " ".join(str(problem).split())[:300]
        if "trust_remote_code" in first:
            first = "it needs Python code of its own; read it, then use --trust-remote-code"
        what = loader.__name__.removeprefix("Auto")
        raise ModelError(f"{source}: cannot be loaded ({what}): {first}") from problem
