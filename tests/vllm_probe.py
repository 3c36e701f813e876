"""Run by vLLM's own Python, which need not have fp8calib: load a checkpoint with default settings
and print, as the last line and in JSON, what vLLM made of it. No test by itself; see test_vllm.py.

Usage: python vllm_probe.py CHECKPOINT [--kv-cache-dtype D] [--kv-cache-dtype-skip-layers N ...]
"""

import argparse
import json
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the model is in reach
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

from vllm import LLM, SamplingParams

PROMPT = "The capital of France is"


def attention_layers(model):
    """Per attention layer: the cache's dtype and the scales it computes with."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "kv_cache_dtype") and hasattr(module, "_k_scale"):
            found[name] = {"kv_cache_dtype": module.kv_cache_dtype}
            for kind in "qkv":
                scale = getattr(module, f"_{kind}_scale")
                found[name][f"{kind}_scale"] = scale.float().flatten().tolist()
                found[name][f"{kind}_scale_float"] = getattr(module, f"_{kind}_scale_float")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-dtype-skip-layers", nargs="+", default=[])
    arguments = vars(parser.parse_args())
    llm = LLM(
        arguments.pop("checkpoint"),
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        **arguments,
    )
    layers = llm.apply_model(attention_layers)[0]
    output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
    dtype = llm.llm_engine.vllm_config.cache_config.cache_dtype
    print(json.dumps({"kv_cache_dtype": dtype, "layers": layers, "text": output.text}))


if __name__ == "__main__":
    main()
