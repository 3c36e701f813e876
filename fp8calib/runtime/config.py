"""Everything that can be chosen about an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8calib.errors import UserError
from fp8calib.runtime.cache_words import Arithmetic, check_words


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, named as in vLLM where vLLM has them.

    kv_cache_dtype, kv_cache_dtype_skip_layers, attention, missing_scales: see
        `kv_cache_dtype.choose_kv_format`.
    dtype: of weights and activations: auto (the checkpoint's), bfloat16, float16, float32.
    device: auto, cpu, cuda or cuda:N.
    trust_remote_code: run code that comes with the checkpoint.
    max_model_len: tokens of a sequence, prompt and answer; None is what the model was made for.
    max_num_seqs: sequences that run at a time.
    max_num_batched_tokens: new tokens in one step; longer prompts take several.
    block_size: tokens of a page, a power of two from 16 on; None is 16 on a CPU and 128 on a GPU.
    kv_cache_memory_bytes: memory of all pages; None is a share of what is free.
    gpu_memory_utilization: that share on a GPU, weights included.
    enable_prefix_caching: keep the pages of prompts and answers for others that begin alike.
    async_scheduling: start a step before the tokens of the one before are on the host; None is on
        a GPU.
    enforce_eager: no CUDA graphs. max_cudagraph_capture_size: sequences of the largest decode step
        that is captured as one.
    compile_layers: compile each decoder layer with torch.compile, projections of the same input
        merged.
    pack_weights: on a CPU, keep bfloat16 weights in the order in which they are multiplied. It
        changes the model in place, as compile_layers does, which goes before it.
    max_logprobs: the most log probabilities that a request may ask for at each token.

    Raises:
        UserError: an unknown word, or a number that is out of its range.
    """

    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: Sequence[str | int] | None = None
    attention: Arithmetic = "accurate"
    missing_scales: str = "refuse"
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    max_cudagraph_capture_size: int = 256
    compile_layers: bool = False
    pack_weights: bool = True
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        check_words(self.kv_cache_dtype, self.attention, self.missing_scales)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "kv_cache_memory_bytes",
            "max_cudagraph_capture_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each sequence adds a token a step"
            )
        size = self.block_size
        if size is not None and (size < 16 or size & (size - 1)):
            raise UserError(f"block_size must be a power of two and at least 16, got {size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
