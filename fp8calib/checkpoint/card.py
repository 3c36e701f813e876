"""The model card: README.md of a calibrated checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from fp8calib import __version__
from fp8calib.checkpoint.card_accuracy import accuracy_section
from fp8calib.checkpoint.config import read_config
from fp8calib.checkpoint.paths import safe_file
from fp8calib.checkpoint.runtimes import rules_for
from fp8calib.checkpoint.scheme import METHOD, quantization_config
from fp8calib.checkpoint.serving import serve_command, serving_notes
from fp8calib.errors import CheckpointError
from fp8calib.scales import ScaleSet

_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_TAGS = ["fp8", "kv-cache", "fp8calib", "vllm"]
_SECTIONS = ("Calibration", "Accuracy")  # those that are written here
_MAX_CARD_BYTES = 1_000_000
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(
    source: Path,
    name: str,
    scales: ScaleSet,
    sidecar: dict[str, Any],
    kv_cache_dtype: str = "auto",
) -> str:
    """The text of README.md.

    Args:
        source: the folder of the original model, whose own card's licence is carried over.
        name: what the new checkpoint is called.
        scales: the scales it holds.
        sidecar: the content of fp8calib.json; every key that the card mentions may be missing.
        kv_cache_dtype: what vLLM must be told for the scales to be used.
    """
    own, _ = _parts(source)
    return _card(_declared(own, sidecar), source, name, scales, sidecar, kv_cache_dtype)


def amended_card(
    folder: Path, scales: ScaleSet, sidecar: dict[str, Any], kv_cache_dtype: str = "auto"
) -> str:
    """The card of a checkpoint that `model_card` wrote one for, brought up to date. What it
    declares in front, a name OWNER/NAME, and sections of other headings than ours stay."""
    own, body = _parts(folder)
    matter = own or _declared({}, sidecar)
    title = re.search(r"^# (.*)$", body, re.MULTILINE)
    name = title[1].strip() if title else ""
    if not _HUB_ID.fullmatch(name):
        name = folder.resolve().name
    sections = re.split(r"^(?=## )", body, flags=re.MULTILINE)[1:]
    others = [each for each in sections if each.partition("\n")[0][3:].strip() not in _SECTIONS]
    card = _card(matter, folder, name, scales, sidecar, kv_cache_dtype)
    return "\n".join([card, "".join(others)]) if others else card


def _card(
    matter: dict[str, Any],
    source: Path,
    name: str,
    scales: ScaleSet,
    sidecar: dict[str, Any],
    kv_cache_dtype: str,
) -> str:
    original = _base_model("", matter) or _original(source, sidecar)
    skip = [str(word) for word in sidecar.get("skip_layers") or []]
    kinds = "queries, keys and values" if scales.has_query else "keys and values"
    per = "one per layer" if scales.strategy == "tensor" else "one per attention head"
    notes = "\n".join(
        f"- {note}" for note in serving_notes(scales.strategy, scales.has_query, skip)
    )
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(scales, sidecar))
    front = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)
    accuracy = accuracy_section(sidecar.get("accuracy"))
    return f"""---
{front}---

# {name}

{original} with calibrated scales for an FP8 (e4m3) KV cache.
There is a scale for {kinds}, {per}. {_weights(sidecar)}

```sh
{serve_command(name, skip, kv_cache_dtype)}
```

{notes}
{_sglang(source, name, scales)}

## Calibration

| | |
|---|---|
{facts}
{accuracy}
`fp8calib.json` holds the full record: every layer's maxima, the versions, the data's fingerprint.
"""


def _sglang(source: Path, name: str, scales: ScaleSet) -> str:
    """How SGLang serves it, or why it would not use the scales."""
    rules = rules_for("sglang")
    config = read_config(source)
    method = (quantization_config(config) or {}).get("quant_method", METHOD)
    version = rules.read_from.partition(":")[0]
    if objections := list(rules.objections(config, scales.strategy)):
        return f"- {version}: {objections[0]}."
    command = rules.command(name, fp8_flag=method not in rules.auto)
    return f"\nWith {version}:\n\n```sh\n{command}\n```"


def _parts(folder: Path) -> tuple[dict[str, Any], str]:
    """The YAML between the dashes at the top of a model's README.md, empty where there is none or
    none that can be read, and the text below."""
    try:
        with safe_file(folder, "README.md").open("rb") as card:
            text = card.read(_MAX_CARD_BYTES).decode("utf-8", "replace")
    except (CheckpointError, OSError):
        return {}, ""
    before, *rest = text.split("---\n", 2)
    if before or len(rest) < 2:
        return {}, text
    try:
        matter = yaml.safe_load(rest[0])
    except (ValueError, RecursionError, yaml.YAMLError):
        matter = None
    return (matter if isinstance(matter, dict) else {}), rest[1]


def _declared(own: dict[str, Any], sidecar: dict[str, Any]) -> dict[str, Any]:
    """What a new card says in front; `own` is what the original's says."""
    base = _base_model(str(sidecar.get("model") or ""), own)
    matter = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    matter |= {key: own[key] for key in _CARRIED if _plain(own.get(key))}
    return matter | {"library_name": "transformers", "tags": _TAGS}


def _base_model(model: str, own: dict[str, Any]) -> str | None:
    """A Hub id, the only thing that the Hub takes as `base_model`: the model itself when it was
    named by one, else what its card names; never a path of the machine that calibrated."""
    if _HUB_ID.fullmatch(model) and not Path(model).exists():
        return model
    named = own.get("base_model")
    return named if isinstance(named, str) and _HUB_ID.fullmatch(named) else None


def _original(source: Path, sidecar: dict[str, Any]) -> str:
    """The original's name without its path: as calibration was told it, else the source's."""
    told = str(sidecar.get("model") or "").rstrip("/").rpartition("/")[2]
    return told.removeprefix("demo:") or source.resolve().name


def _weights(sidecar: dict[str, Any]) -> str:
    recipe = sidecar.get("recipe")
    if isinstance(recipe, dict) and recipe.get("llmcompressor"):
        return "The weights were quantized by llm-compressor with the recipe in `fp8calib.json`."
    return "The weights are those of the original model, unchanged."


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, str) for item in value)
    return isinstance(value, str) and bool(value)


def _facts(scales: ScaleSet, sidecar: dict[str, Any]) -> list[tuple[str, str]]:
    data = sidecar.get("dataset")
    data = data if isinstance(data, dict) else {}
    facts = [
        ("strategy", scales.strategy),
        ("layers", str(len(scales.layers))),
        ("observer", sidecar.get("observer")),
        ("margin", sidecar.get("margin")),
        ("data", data.get("name")),
        ("samples", data.get("samples")),
        ("tokens", data.get("tokens")),
        ("data fingerprint", data.get("fingerprint")),
        ("skip layers", " ".join(map(str, sidecar.get("skip_layers") or []))),
        ("made with", f"fp8calib {__version__}"),
    ]
    return [(key, str(value).replace("|", "\\|")) for key, value in facts if value]
