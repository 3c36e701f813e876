"""Greedy decoding twice: by transformers' `generate`, and by the engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8calib.attention import use_attention
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.engine import Engine
from fp8calib.runtime.loader import LoadedModel
from fp8calib.runtime.sampling_params import SamplingParams

# transformers itself refuses sdpa for attention that it cannot express.
_EAGER = ("gemma2", "gpt_oss")


def by_transformers(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of each prompt, and the gaps between its two largest logits [num_tokens]."""
    tokens, gaps = [], []
    implementation = "eager" if loaded.model.config.model_type in _EAGER else "sdpa"
    with use_attention(loaded.model, implementation):
        for prompt in prompts:
            answer = loaded.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
            tokens.append(answer.sequences[0, len(prompt) :].tolist())
            best = torch.cat(answer.logits).float().topk(2).values
            gaps.append(best[:, 0] - best[:, 1])
    return tokens, gaps


def by_engine(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int, **options: object
) -> list[list[int]]:
    """The tokens of each prompt, all run at once; EngineConfig takes `options`."""
    engine = Engine(loaded, EngineConfig(**options))  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    requests = [engine.add_request(params, prompt_token_ids=prompt) for prompt in prompts]
    while engine.has_unfinished_requests:
        engine.step()
    assert [pool.num_used for pool in engine.block_manager.pools] == [0] * len(engine.store.groups)
    return [request.output_token_ids for request in requests]
