"""Makes the cache of an engine: how much memory its pages take, and what fits into them."""

from __future__ import annotations

import os
import sys

import torch

from fp8calib.errors import UserError
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore, cache_groups, plan_blocks
from fp8calib.runtime.loader import LoadedModel
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.step_inputs import Chunk
from fp8calib.sizes import size_text

_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 128
_CPU_CACHE_BYTES = 4 << 30  # as much as is used of it is taken: pages are touched when written
_SAMPLING_COPIES = 6  # of the logits in float32, at the sampler's worst


def make_store(
    loaded: LoadedModel, kv_format: KVFormat, config: EngineConfig, max_model_len: int
) -> tuple[KVStore, int]:
    """The pages of an engine, and the most tokens of a sequence that they allow.

    Raises:
        UserError: nothing fits, fewer tokens than the `max_model_len` that was asked for, or more
            than the device has memory for.
    """
    device = loaded.model.device
    on_gpu = device.type == "cuda"
    block_size = config.block_size or (_GPU_BLOCK_SIZE if on_gpu else _CPU_BLOCK_SIZE)
    memory = config.kv_cache_memory_bytes or _free_for_cache(
        loaded, kv_format, config, max_model_len
    )
    tokens, num_blocks = plan_blocks(
        cache_groups(loaded.layers),
        kv_format,
        block_size,
        memory,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_num_seqs * max_model_len,
    )
    if tokens == 0 or tokens < min(max_model_len, config.max_model_len or 0):
        raise UserError(
            f"{size_text(memory)} of KV cache hold {tokens} tokens, fewer than "
            f"max_model_len {max_model_len}; use a larger --kv-cache-memory or a smaller "
            "--max-model-len"
        )
    try:
        store = KVStore(loaded.layers, kv_format, num_blocks, block_size, device)
    except RuntimeError as problem:  # OutOfMemoryError on a GPU is one
        if "allocate" not in str(problem):
            raise
        raise UserError(
            f"{size_text(memory)} of KV cache cannot be had on {device}; use a smaller "
            "--kv-cache-memory, --max-model-len or --max-num-seqs"
        ) from None
    return store, min(tokens, max_model_len)


def describe_store(store: KVStore, config: EngineConfig) -> str:
    """One line: pages, the tokens that fit, and what bfloat16 pages of the same memory hold."""
    sizes = store.block_bytes()
    total = sum(count * size for count, size in zip(store.num_blocks, sizes, strict=True))
    tokens = max(store.num_blocks) * store.block_size
    bf16, _ = plan_blocks(
        store.groups,
        KVFormat(torch.bfloat16),
        store.block_size,
        total,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        sys.maxsize,
    )
    return (
        f"{sum(store.num_blocks):,} pages of {store.block_size} tokens in {size_text(total)}; "
        f"{tokens:,} tokens fit, {tokens / max(bf16, 1):.2f} times as many as in bfloat16"
    )


def _free_for_cache(
    loaded: LoadedModel, kv_format: KVFormat, config: EngineConfig, max_model_len: int
) -> int:
    """Bytes that pages may take, when the user does not say. On a GPU, what is free and within
    `gpu_memory_utilization` of the whole, less what the largest step takes, which is run to see."""
    device = loaded.model.device
    if device.type != "cuda":
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(_CPU_CACHE_BYTES, physical // 4)
    tokens = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    step = _step_bytes(loaded, kv_format, tokens, max_model_len)
    # Captured steps have memory of their own, and no more rows than sequences.
    step += step * min(config.max_num_seqs, tokens) // tokens
    vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
    sampling = _SAMPLING_COPIES * 4 * config.max_num_seqs * vocab_size
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    wanted = free - total * (1 - config.gpu_memory_utilization)
    return max(0, int(wanted) - step - sampling)


def _step_bytes(
    loaded: LoadedModel, kv_format: KVFormat, num_tokens: int, max_model_len: int
) -> int:
    """The most memory that a prefill step of so many tokens takes besides weights and pages."""
    lengths = [max_model_len] * (num_tokens // max_model_len)
    lengths += [rest] if (rest := num_tokens % max_model_len) else []
    chunks, first = [], 0
    groups = len(cache_groups(loaded.layers))
    for length in lengths:
        table = range(first, first + -(-length // _GPU_BLOCK_SIZE))
        chunks.append(Chunk([0] * length, 0, [table] * groups, 1))
        first = table.stop
    device = loaded.model.device
    store = KVStore(loaded.layers, kv_format, [first] * groups, _GPU_BLOCK_SIZE, device)
    runner = ModelRunner(loaded.model, store)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.forward(chunks)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
