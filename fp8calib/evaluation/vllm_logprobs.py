"""Run by vLLM's own Python, which need not have fp8calib: the logprobs of prompts.

Usage: python vllm_logprobs.py REQUEST.json ANSWER.npz VLLM_FLAGS...

The request: ``rows`` (token ids by document) and ``top`` (how many of the most likely tokens). The
answer, over all predicted tokens, row after row: ``ids`` and ``logprobs``, both [tokens, 1 + top],
first the token that does follow, then the most likely ones in order; ``version``, vLLM's; and
``device``, such as cpu or cuda.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_TOKENS = 2048  # whose logprobs are Python numbers at a time


def main(request_file: str, answer_file: str, flags: list[str]) -> None:
    import numpy as np
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    request = json.loads(Path(request_file).read_text())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # On a CPU vLLM would otherwise want most of the memory for a cache that holds a few prompts.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm"))
    llm = vllm.LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(flags)))
    rows, top = request["rows"], min(request["top"], llm.model_config.get_vocab_size())
    params = vllm.SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
    )
    ids, logprobs = [], []
    for batch in _batches(rows):
        prompts = [{"prompt_token_ids": row} for row in batch]
        for row, output in zip(batch, llm.generate(prompts, params), strict=True):
            found = output.prompt_logprobs
            shape = (len(row) - 1, top + 1)
            ids.append(np.array(found.token_ids, dtype=np.int32).reshape(shape))
            logprobs.append(np.array(found.logprobs, dtype=np.float32).reshape(shape))
    np.savez(
        answer_file,
        ids=np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        version=np.array(vllm.__version__),
        device=np.array(current_platform.device_type),
    )


def _batches(rows: list[list[int]]) -> list[list[list[int]]]:
    batches: list[list[list[int]]] = []
    used = _TOKENS
    for row in rows:
        if used + len(row) > _TOKENS:
            batches.append([])
            used = 0
        batches[-1].append(row)
        used += len(row)
    return batches


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules could be taken for others of the same names
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
