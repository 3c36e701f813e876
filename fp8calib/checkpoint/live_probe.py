"""Run by the Python that has vLLM, which need not have fp8calib: load checkpoints one after the
other, as a server would, and print what came of each as one line of JSON.

Usage: python live_probe.py '[{"checkpoint": ..., "prompt": [...], "options": {...}}, ...]'
"""

import gc
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the model is in reach
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def held(model: Any) -> dict[str, Any]:
    """Per attention layer: the cache's dtype and the scales that the layer computes with."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if hasattr(module, "kv_cache_dtype") and hasattr(module, "_k_scale"):
            found[name] = {"kv_cache_dtype": str(module.kv_cache_dtype)}
            for kind in "qkv":
                scale = getattr(module, f"_{kind}_scale")
                found[name][kind] = scale.float().flatten().tolist()
    return found


def logprobs(llm: Any, prompt: list[int]) -> list[float]:
    """The log-probability of each token of the prompt after the first, given those before it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    return [
        entry[token].logprob
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]


def load(checkpoint: str, prompt: list[int], options: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        checkpoint,
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **options,
    )
    seen = {
        "kv_cache_dtype": str(llm.llm_engine.vllm_config.cache_config.cache_dtype),
        "layers": llm.apply_model(held)[0],
        "logprobs": [logprobs(llm, prompt) for _ in range(2)],
    }
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return seen


def main() -> None:
    asked = json.loads(sys.argv[1])
    import vllm

    seen = [load(**job) for job in asked]
    print("\n" + json.dumps({"version": vllm.__version__, "seen": seen}))


if __name__ == "__main__":
    main()
