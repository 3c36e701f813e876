"""Which tensor names mean a KV-cache scale, in the current form and in the forms of older tools."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from fp8calib.scales import KINDS, Kind

CURRENT, KV_SCALE, OUTPUT_SCALE, PROJECTION, RUNTIME = (
    "current",
    "kv_scale",
    "output_scale",
    "projection",
    "runtime",
)
_LAST = re.compile(
    r"(?P<module>.+?)\.(?:"
    r"(?P<both>kv_scale)"
    r"|(?P<out>[qkv])_proj\.output_scale"
    r"|(?:[qkv]|qkv|qkqkv)_proj\.(?P<proj>[qkv])_scale"
    r"|attn\.(?P<runtime>[qkv])_scale"
    r"|(?P<kind>[qkv])_scale)"
)


@dataclass(frozen=True)
class ScaleName:
    """A scale tensor's name taken apart: its attention module, what it scales, and its form."""

    module: str
    kinds: tuple[Kind, ...]
    form: str


def scale_name(module: str, kind: Kind, form: str = CURRENT) -> str:
    """The name under which a scale is written: ``model.layers.0.self_attn.k_scale``, and in
    ModelOpt's form (`PROJECTION`) ``model.layers.0.self_attn.k_proj.k_scale``."""
    return f"{module}.{kind}_proj.{kind}_scale" if form == PROJECTION else f"{module}.{kind}_scale"


def parse(name: str, modules: Collection[str] = ()) -> ScaleName | None:
    """What `name` means, None when it is no KV-cache scale. `modules` are the model's attention
    modules: GPT-2's is itself called ``attn``, so its names look like runtime names."""
    if not name.endswith("_scale"):
        return None
    module, _, leaf = name.rpartition(".")
    if module in modules and leaf[0] in KINDS and leaf[1:] == "_scale":
        return ScaleName(module, (leaf[0],), CURRENT)
    match = _LAST.fullmatch(name)
    if match is None:
        return None
    if match["both"]:
        return ScaleName(match["module"], ("k", "v"), KV_SCALE)
    for group, form in (("out", OUTPUT_SCALE), ("proj", PROJECTION), ("runtime", RUNTIME)):
        if match[group]:
            return ScaleName(match["module"], (match[group],), form)  # type: ignore[arg-type]
    return ScaleName(match["module"], (match["kind"],), CURRENT)  # type: ignore[arg-type]


def is_kv_zero_point(name: str) -> bool:
    return name.endswith(tuple(f".{kind}_zero_point" for kind in KINDS))
