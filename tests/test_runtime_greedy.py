"""Greedy tokens on native pages equal those of transformers' `generate`.

The random models' weights are drawn wide (`initializer_range` 0.3), so that the two best logits
lie well apart: GAP is the smallest distance that a test accepts, a hundred times what the order of
float32 sums moves a logit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import by_engine, by_transformers
from tiny import write_composite

from fp8calib.runtime.loader import LoadedModel, load

# Longer and shorter than the tiny models' window of 6, and than a page.
PROMPTS = [list(range(5, 42)), [20, 21, 3], list(range(60, 70))]
NUM_TOKENS = 24
GAP = 1e-3

# Gemma's tied embeddings, scaled up on the way in, make an untrained model repeat its input.
UNTIED = {"tie_word_embeddings": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "deepseek_v3": {},
    # A softcap that bends the scores, and a scaling that is not the usual one.
    "gemma2": UNTIED | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24},
    "gemma3_text": UNTIED,
    "gemma3n_text": UNTIED,
    "gemma4_text": UNTIED,
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "olmo2": {},
    "opt": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "stablelm": {},
    "starcoder2": {},
}
COMPOSITE = ["llava", "qwen2_vl"]  # their language models


def draw_sinks(model: torch.nn.Module) -> None:
    """transformers starts attention sinks at zero; make them matter."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_()


@dataclass(frozen=True)
class Case:
    loaded: LoadedModel
    expected: list[list[int]]


@pytest.fixture(scope="module", params=[*ARCHITECTURES, *COMPOSITE])
def case(
    request: pytest.FixtureRequest,
    tiny: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    """A random model whose answers vary and have no near ties, and these answers."""
    kind = request.param
    for seed in range(8):
        if kind in COMPOSITE:
            folder = write_composite(tmp_path_factory.mktemp(kind), kind, seed=seed)
        else:
            edit = {"edit": draw_sinks} if kind == "gpt_oss" else {}
            folder = tiny(kind, seed=seed, **ARCHITECTURES[kind], **edit)
        loaded = load(str(folder))
        expected, gaps = by_transformers(loaded, PROMPTS, NUM_TOKENS)
        different = {token for answer in expected for token in answer}
        if float(torch.cat(gaps).min()) > GAP and len(different) > 8:
            return Case(loaded, expected)
    pytest.fail(f"no random {kind} has answers that prove anything")


def test_float32_tokens_equal_generate(case: Case) -> None:
    assert by_engine(case.loaded, PROMPTS, NUM_TOKENS) == case.expected


def test_chunked_prompts_give_the_same_tokens(case: Case) -> None:
    """At most 7 tokens in a pass: pieces of one prompt beside another's answer."""
    tokens = by_engine(case.loaded, PROMPTS, NUM_TOKENS, max_num_seqs=3, max_num_batched_tokens=7)
    assert tokens == case.expected


# A bfloat16 logit of this size is a multiple of 1/32; sums in another order move it by a few.
BF16_TOLERANCE = 0.125


@pytest.mark.parametrize("kind", ["gemma2", "llama", "mistral", "qwen2"])
def test_bfloat16_tokens_differ_only_at_near_ties(kind: str, tiny: Callable[..., Path]) -> None:
    loaded = load(str(tiny(kind, dtype="bfloat16", **ARCHITECTURES[kind])))
    expected, gaps = by_transformers(loaded, PROMPTS, NUM_TOKENS)
    for ours, theirs, gap in zip(
        by_engine(loaded, PROMPTS, NUM_TOKENS), expected, gaps, strict=True
    ):
        first = next((i for i in range(NUM_TOKENS) if ours[i] != theirs[i]), None)
        assert first is None or float(gap[first]) <= BF16_TOLERANCE


def smollm2_tokens(smollm2: Path, num_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    loaded = load(str(smollm2), dtype="float32")
    prompts = [loaded.tokenizer(text)["input_ids"] for text in SMOLLM2_PROMPTS]
    ours = by_engine(loaded, prompts, num_tokens)
    return ours, by_transformers(loaded, prompts, num_tokens)[0]


SMOLLM2_PROMPTS = ["The capital of France is", "def fibonacci(n):\n"]


def test_smollm2_tokens_equal_generate(smollm2: Path) -> None:
    ours, theirs = smollm2_tokens(smollm2, 48)
    assert ours == theirs


@pytest.mark.slow
def test_smollm2_256_tokens_equal_generate(smollm2: Path) -> None:
    ours, theirs = smollm2_tokens(smollm2, 256)
    assert ours == theirs
