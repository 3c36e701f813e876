"""`fp8calib run --engine vllm`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from fp8calib.cli.run import print_answers
from fp8calib.console import info, print_json
from fp8calib.vllm_launch import VLLM


def run_vllm(
    vllm: VLLM,
    arguments: Sequence[str],
    texts: list[str],
    chat: bool,
    sampling: dict[str, Any],
    json: bool,
) -> None:
    """Have vLLM answer the prompts, and show what it says as `run` does."""
    flags = shlex.join([*vllm.flags, *arguments])
    info(f"{vllm.executable}: {vllm.model} {flags}".rstrip())
    request = {"prompts": texts, "chat": chat, "sampling_params": sampling}
    answer = vllm.generate(request, arguments)
    outputs = answer["outputs"]
    if json:
        completions = [
            {"prompt": text, "prompt_tokens": output["prompt_tokens"]} | one
            for text, output in zip(texts, outputs, strict=True)
            for one in output["completions"]
        ]
        print_json(
            {
                "model": vllm.model,
                "engine": "vllm",
                "flags": [*vllm.flags, *arguments],
                "sampling_params": sampling,
                "outputs": completions,
                "stats": {"seconds": answer["seconds"]},
            }
        )
        return
    print_answers(texts, [[one["text"] for one in output["completions"]] for output in outputs])
    tokens = sum(len(one["token_ids"]) for output in outputs for one in output["completions"])
    seconds = answer["seconds"]
    info(f"{tokens} generated in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s")
