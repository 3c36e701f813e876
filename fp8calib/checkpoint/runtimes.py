"""What each serving engine makes of a checkpoint's scales: the rules of runtimes.toml."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import BaseModel, ConfigDict

from fp8calib.checkpoint.config import architecture
from fp8calib.checkpoint.scheme import METHOD, MODELOPT_METHOD, quantization_config
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

    def objections(self, config: dict[str, Any], strategy: Strategy) -> Iterator[str]:
        """Why the engine would not use scales of `strategy` in a checkpoint with this config.json,
        whatever the scales are."""
        section = quantization_config(config) or {}
        method = section.get("quant_method", METHOD)
        if self.never:
            yield self.never
        if trouble := self.strategies[strategy]:
            yield trouble
        elif strategy not in self.methods.get(str(method), []):
            yield (
                f"the weights are quantized with {method!s:.40}: {self.title} loads no {strategy} "
                "scales beside those"
            )
        if method == MODELOPT_METHOD and not section.get("quant_algo") and self.modelopt_kv_only:
            yield self.modelopt_kv_only
        name = architecture(config)
        if self.architectures and name not in self.architectures:
            way = "no way to give it scales is known"
            if name in self.param_path:
                way = "`fp8calib convert --to sglang` makes the JSON for --quantization-param-path"
            yield f"{self.title}'s {name} finds no scales in a checkpoint and runs at 1.0; {way}"

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
