"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_cases  # noqa: F401  (first: it chooses Triton's interpreter before Triton is imported)
import pytest
from tiny import write_model

from fp8calib.models import resolve_model

# A shell's background jobs ignore Ctrl-C, and so would the commands that the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the embedded model, converted once into the user's cache."""
    return resolve_model("demo:smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("qwen2", num_hidden_layers=3)` -> folder; see `tiny.write_model` for its arguments.

    The same arguments give the same folder, so tests must not change it; a call with `edit` always
    makes a new one.
    """
    made: dict[str, Path] = {}

    def make(model_type: str = "llama", **options: Any) -> Path:
        key = repr((model_type, sorted(options.items())))
        if key not in made or options.get("edit") is not None:
            made[key] = write_model(tmp_path_factory.mktemp(model_type), model_type, **options)
        return made[key]

    return make
