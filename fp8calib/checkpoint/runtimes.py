"""What each serving engine makes of a checkpoint's scales: the rules of runtimes.toml."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8calib.checkpoint.scheme import METHOD, quantization_config
from fp8calib.errors import UserError
from fp8calib.scales import Strategy

DEFAULT = "vllm"


class Rules(BaseModel):
    """One engine's; runtimes.toml says what the keys mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    read_from: str
    serve: str
    dtype: str
    tp: str
    skip: str
    auto: list[str]
    unlisted: str
    missing: str
    ignored: str
    modelopt_kv_only: str
    never: str = ""
    architectures: list[str] = []
    param_path: list[str] = []
    notes: list[str] = []
    with_query: list[str] = []
    strategies: dict[Strategy, str]
    methods: dict[str, list[Strategy]]
    forms: dict[str, str]

    def auto_is_fp8(self, config: dict[str, Any], declared: Strategy | None) -> bool:
        """Whether the engine's default cache dtype becomes FP8 by what config.json declares."""
        method = (quantization_config(config) or {}).get("quant_method", METHOD)
        return declared is not None and method in self.auto and not self.strategies[declared]

    def command(
        self, checkpoint: str, *, fp8_flag: bool, skip_layers: Sequence[str] = (), tp: int = 1
    ) -> str:
        """The command that serves `checkpoint`; `fp8_flag`: the cache's dtype must be named."""
        words = [self.serve.format(checkpoint=shlex.quote(checkpoint))]
        if fp8_flag:
            words.append(self.dtype)
        if skip_layers and self.skip:
            words.append(self.skip.format(layers=" ".join(skip_layers)))
        if tp > 1 and self.tp:
            words.append(self.tp.format(tp=tp))
        return " ".join(words)


@cache
def rules() -> dict[str, Rules]:
    text = (files("fp8calib.checkpoint") / "runtimes.toml").read_text(encoding="utf-8")
    return {name: Rules.model_validate(content) for name, content in tomllib.loads(text).items()}


def rules_for(runtime: str) -> Rules:
    """The rules of an engine by its name; raises UserError for one that is not known."""
    known = rules()
    if runtime not in known:
        raise UserError(f"unknown runtime {runtime!r:.40}: there are {', '.join(known)}")
    return known[runtime]
