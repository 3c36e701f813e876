"""Run by vLLM's own Python, which need not have fp8calib: generate with vLLM's offline API.

Usage: python vllm_offline.py REQUEST.json ANSWER.json VLLM_FLAGS...

The request: ``prompts`` (texts), ``chat`` (whether they are put into the chat template) and
``sampling_params`` (keywords of vLLM's SamplingParams). The answer: ``outputs``, one a prompt, with
``prompt_tokens`` and ``completions``, each with index, text, token_ids, finish_reason, stop_reason.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(request_file: str, answer_file: str, flags: list[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request = json.loads(Path(request_file).read_text())
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    params = SamplingParams(**request["sampling_params"])
    started = time.perf_counter()
    if request["chat"]:
        chats = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
        outputs = llm.chat(chats, params)
    else:
        outputs = llm.generate(request["prompts"], params)
    seconds = time.perf_counter() - started
    answer = {"outputs": [_plain(output) for output in outputs], "seconds": seconds}
    Path(answer_file).write_text(json.dumps(answer))


def _plain(output) -> dict:  # type: ignore[no-untyped-def]
    names = ("index", "text", "finish_reason", "stop_reason")
    completions = [
        {name: getattr(one, name) for name in names} | {"token_ids": list(one.token_ids)}
        for one in output.outputs
    ]
    return {"prompt_tokens": len(output.prompt_token_ids), "completions": completions}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
