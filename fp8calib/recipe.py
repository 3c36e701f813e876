"""Recipes: what to calibrate with, and what a calibrated checkpoint must keep to.

A recipe is a YAML file of up to three sections: `calibration`, `gates` and `llmcompressor`, the
last a native llm-compressor recipe that quantizes weights before the KV cache is calibrated.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from fp8calib.errors import RecipeError
from fp8calib.layers import split_skip_layers

MAX_RECIPE_BYTES = 1_000_000
_MAX_VALUES = 100_000


def parse_observer(text: str) -> tuple[str, float | None]:
    """An observer's name and, for ``percentile:P``, its P; see calibration/observers.py.

    Raises:
        ValueError: it is neither absmax, nor mse, nor percentile:P with 50 <= P <= 100.
    """
    if text in ("absmax", "mse"):
        return text, None
    match = re.fullmatch(r"percentile:(\d+(?:\.\d+)?)", text)
    if match is None:
        raise ValueError("use absmax, percentile:P or mse")
    if not 50 <= float(match[1]) <= 100:
        raise ValueError("the percentile must be from 50 to 100")
    return "percentile", float(match[1])


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("must not be true or false")
        return value


class Calibration(_Section):
    """How scales are made. `dataset` None means the default of the model (see data.py);
    `batch_size` None means a default by device."""

    strategy: Literal["tensor", "attn_head"] = "tensor"
    observer: str = "absmax"
    margin: Annotated[float, Field(ge=1.0, le=16.0)] = 1.0
    query: bool = True
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    dataset: str | None = None
    split: str | None = None
    text_column: str | None = None
    messages_column: str | None = None
    samples: Annotated[int, Field(ge=1)] = 512
    max_seq_len: Annotated[int, Field(ge=1)] = 2048
    seed: Annotated[int, Field(ge=0)] = 42
    batch_size: Annotated[int, Field(ge=1)] | None = None

    @field_validator("observer")
    @classmethod
    def _known(cls, value: str) -> str:
        parse_observer(value)
        return value

    @field_validator("kv_cache_dtype_skip_layers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> tuple[str, ...]:
        return tuple(split_skip_layers(value if isinstance(value, list | tuple) else [value]))


class Gates(_Section):
    """Limits on what FP8 may cost, judged by `verify` as far as it measures them; None leaves a
    number ungated.

    max_ppl_increase: relative to native's perplexity; max_kl: mean KL(native || fp8), nats;
    min_top1: share of tokens with native's top prediction; min_needle: of the needles that native
    finds, the share found; max_task_drop: how much worse a task's metric may be, in its own unit;
    max_repeat_increase: how much larger the share of repeated 4-grams in generated text may be.
    """

    max_ppl_increase: Annotated[float, Field(gt=0)] | None = 0.02
    max_kl: Annotated[float, Field(gt=0)] | None = 0.05
    min_top1: Annotated[float, Field(gt=0, le=1)] | None = 0.90
    min_needle: Annotated[float, Field(gt=0, le=1)] | None = 0.90
    max_task_drop: Annotated[float, Field(gt=0)] | None = 0.02
    max_repeat_increase: Annotated[float, Field(gt=0, le=1)] | None = 0.20


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
        raise ValueError(f"{where} must be a mapping, got {value!r:.80}")
    return value


class Recipe(_Section):
    calibration: Calibration = Calibration()
    gates: Gates = Gates()
    llmcompressor: dict[str, Any] | None = None

    @field_validator("llmcompressor")
    @classmethod
    def _native(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if "kv_cache_scheme" in yaml.safe_dump(value):
            raise ValueError("leave kv_cache_scheme out: fp8calib calibrates the KV cache")
        # llm-compressor passes over a stage whose name it does not know, and fails on an empty one.
        for stage, modifiers in (value or {}).items():
            if not stage.endswith("_stage"):
                raise ValueError(f"stage {stage!r} must end in _stage, or it would be ignored")
            for group, content in _mapping(modifiers, stage).items():
                if group.endswith("_modifiers"):
                    for name, options in _mapping(content, group).items():
                        if options is None:
                            raise ValueError(f"{name} has no options; write `{name}: {{}}`")
                        _mapping(options, name)
        return value

    def with_options(self, **options: Any) -> Recipe:
        """This recipe with those of `options` that are not None in the calibration section."""
        return self._with("calibration", options)

    def with_gates(self, **options: Any) -> Recipe:
        """This recipe with those of `options` that are not None in the gates section."""
        return self._with("gates", options)

    def _with(self, section: str, options: dict[str, Any]) -> Recipe:
        content = self.model_dump(exclude_unset=True)  # what nobody has set stays so
        own = {name: value for name, value in options.items() if value is not None}
        content[section] = content.get(section, {}) | own
        try:
            return Recipe.model_validate(content)
        except ValidationError as problem:
            flags = [_explain(error, _flag(error)) for error in problem.errors()]
            raise RecipeError("; ".join(flags)) from None

    def to_yaml(self) -> str:
        content = self.model_dump(mode="json", exclude_none=True)
        return yaml.safe_dump(content, sort_keys=False)


def load_recipe(name: str) -> Recipe:
    """Open a recipe by file name, or one of those that come with fp8calib by its name.

    Raises:
        RecipeError: no such recipe, not YAML, an unknown key (the nearest known one is named) or a
            value that does not fit.
    """
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        return _builtin_recipe(name)
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: larger than {MAX_RECIPE_BYTES} bytes, so not a recipe")
        return parse_recipe(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise RecipeError(f"{path}: cannot be read as a recipe: {reason}") from None


def _builtin_recipe(name: str) -> Recipe:
    folder = files("fp8calib") / "recipes"
    known = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir())
    if name not in known:
        raise RecipeError(
            f"there is no recipe {name!r}: give a .yaml file or one of {', '.join(known)}"
        )
    return parse_recipe((folder / f"{name}.yaml").read_text(encoding="utf-8"), name)


def parse_recipe(text: str, where: str) -> Recipe:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise RecipeError(f"{where}: not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{where}: a recipe is a mapping with a `calibration` section")
    _check_extent(content, where)
    # An empty section means its defaults.
    return parse_content({key: value for key, value in content.items() if value is not None}, where)


def _check_extent(content: dict[str, Any], where: str) -> None:
    """Refuse what aliases make large, or endless, of a small file."""
    left: list[Any] = [content]
    count = 1
    while left:
        value = left.pop()
        inside = list(value.values()) if isinstance(value, dict) else value
        if isinstance(inside, list):
            count += len(inside)
            if count > _MAX_VALUES:
                raise RecipeError(
                    f"{where}: more than {_MAX_VALUES:,} values, counting what aliases repeat"
                )
            left += inside


def parse_content(content: Any, where: str) -> Recipe:
    """A recipe from its YAML or JSON content; raises RecipeError."""
    try:
        return Recipe.model_validate(content)
    except ValidationError as problem:
        messages = [_explain(error, ".".join(map(str, error["loc"]))) for error in problem.errors()]
        raise RecipeError(f"{where}: " + "; ".join(messages)) from None


def _flag(error: Any) -> str:
    """The command line's name of an option of a section."""
    name = str(error["loc"][1])
    return name if error["type"] == "extra_forbidden" else "--" + name.replace("_", "-")


def _explain(error: Any, key: str) -> str:
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg'].removeprefix('Value error, ')}, got {error['input']!r:.80}"
    section = {"calibration": Calibration, "gates": Gates}.get(str(error["loc"][0]))
    model: Any = Recipe if section is None or len(error["loc"]) == 1 else section
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {key} ({hint})"
