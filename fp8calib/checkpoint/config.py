"""config.json, read and checked: what the rest of the code counts on is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.json_file import read_json
from fp8calib.checkpoint.paths import safe_file
from fp8calib.errors import CheckpointError

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_WORDS = ("model_type",)
_COUNTS = {
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_attention_heads", "n_head",
    "n_heads", "num_query_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv",
    "hidden_size", "n_embd", "d_model", "head_dim", "attention_head_dim", "kv_channels",
    "global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_window_layers",
}  # fmt: skip
_MAX_COUNT = 10_000_000
_MAX_LAYERS = 10_000
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def read_config(path: Path | str) -> dict[str, Any]:
    """The content of a checkpoint's config.json.

    Raises:
        CheckpointError: there is none, or it says something that no model can be.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: expected a checkpoint with a config.json")
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: it is no Hugging Face checkpoint")
    config = read_json(safe_file(path, "config.json"))
    for problem in _problems(config):
        raise CheckpointError(f"{path / 'config.json'}: {problem}")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a composite config.json (the whole of any other)."""
    while inner := next(
        (config[k] for k in _TEXT_CONFIGS if isinstance(config.get(k), dict)), None
    ):
        config = inner
    return config


def layer_count(text: dict[str, Any]) -> int | None:
    """How many layers a language model's config claims; None when it does not say."""
    value = next((text[key] for key in _LAYERS if text.get(key) is not None), None)
    return value if isinstance(value, int) else None


def architecture(config: dict[str, Any]) -> str:
    """The class that config.json names, else the model type; for messages and tables."""
    names = config.get("architectures") or [config.get("model_type") or "?"]
    return str(names[0])


def _problems(config: dict[str, Any]) -> Iterator[str]:
    names = config.get("architectures")
    if names is not None and not _list_of_text(names):
        yield f"architectures is {names!r:.60}, expected a list of names"
    for part in {id(part): part for part in (config, text_config(config))}.values():
        for key in _WORDS:
            if not isinstance(part.get(key), str | None):
                yield f"{key} is {part[key]!r:.60}, expected a name"
        for key in sorted(_COUNTS & part.keys()):
            values = part[key] if isinstance(part[key], list) else [part[key]]
            limit = _MAX_LAYERS if key in _LAYERS else _MAX_COUNT
            for value in values:
                if isinstance(value, int) and not 0 <= value <= limit:
                    yield f"{key} is {_short(value)}: no model has that"


def _list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _short(value: int) -> str:
    """A number for a message; Python refuses to print one of thousands of digits."""
    return str(value) if value.bit_length() < 100 else f"a number of {value.bit_length()} bits"
