"""The engine: requests in, one step after the other, tokens out."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from fp8calib.errors import UserError
from fp8calib.runtime.block_manager import BlockManager
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.detokenizer import Detokenizer, StopStrings
from fp8calib.runtime.kv_cache_dtype import KVChoice, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.kv_store import KVStore, cache_groups, plan_blocks
from fp8calib.runtime.loader import LoadedModel
from fp8calib.runtime.model_runner import Chunk, ModelRunner
from fp8calib.runtime.request import Request
from fp8calib.runtime.sampler import Sampler
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.scheduler import Scheduler

_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 128
_CPU_CACHE_BYTES = 4 << 30  # as much as is used of it is taken: pages are touched when written


@dataclass
class EngineStats:
    """Since the engine was made: tokens of prompts and of answers, seconds spent in steps, and the
    most bytes of K and V that were held at a time, here and what bf16 pages would have taken."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    kv_bytes: int = 0
    bf16_kv_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """A model, its paged cache and the requests that run on it.

    Several engines may share a LoadedModel, one after the other or at the same time.

    Raises:
        UserError: options that contradict each other or the model, or a cache that does not fit.
        ScaleError: scales that are missing or unusable.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig | None = None) -> None:
        self.loaded = loaded
        self.config = config = config or EngineConfig()
        self.kv: KVChoice = choose_kv_format(
            loaded,
            config.kv_cache_dtype,
            config.kv_cache_dtype_skip_layers,
            config.attention,
            config.missing_scales,
        )
        self.warnings = list(self.kv.warnings)
        self.max_model_len = self._wanted_length()
        self.store = self._make_store()
        self.block_manager = BlockManager(
            self.store.groups, self.store.num_blocks, self.store.block_size
        )
        self.scheduler = Scheduler(
            self.block_manager, config.max_num_seqs, config.max_num_batched_tokens
        )
        self.runner = ModelRunner(loaded.model, self.store)
        self.sampler = Sampler()
        self.stats = EngineStats()
        self._vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        self._ids = count()

    def _wanted_length(self) -> int:
        wanted, most = self.config.max_model_len, self.loaded.max_model_len
        if wanted is not None and wanted > most:
            raise UserError(f"max_model_len {wanted}: this model can do {most} tokens at most")
        return wanted or most

    def _make_store(self) -> KVStore:
        config, device = self.config, self.loaded.model.device
        gpu = device.type == "cuda"
        block_size = config.block_size or (_GPU_BLOCK_SIZE if gpu else _CPU_BLOCK_SIZE)
        memory = config.kv_cache_memory_bytes or _free_for_cache(
            device, config.gpu_memory_utilization
        )
        groups = cache_groups(self.loaded.layers)
        tokens, num_blocks = plan_blocks(
            groups,
            self.kv.kv_format,
            block_size,
            memory,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_num_seqs * self.max_model_len,
        )
        if tokens < self.max_model_len:
            if tokens == 0 or config.max_model_len is not None:
                raise UserError(
                    f"{memory / 1e6:,.0f} MB of KV cache hold {tokens} tokens, fewer than "
                    f"max_model_len {self.max_model_len}; give more memory or a smaller length"
                )
            self.max_model_len = tokens
            self.warnings.append(f"sequences are limited to {tokens} tokens by the cache's memory")
        return KVStore(self.loaded.layers, self.kv.kv_format, num_blocks, block_size, device)

    def add_request(
        self,
        params: SamplingParams,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> Request:
        """Queue a prompt: a text, which is tokenized as it is, or token ids (with the text they
        stand for, if there is one).

        Raises:
            UserError: an empty prompt, one that leaves no room for an answer, or a token id that
                the model does not know.
        """
        if prompt_token_ids is not None:
            ids = list(prompt_token_ids)
        else:
            ids = self.loaded.tokenizer(prompt or "", verbose=False)["input_ids"]
        self._check_prompt(ids)
        request = Request(
            request_id=str(next(self._ids)),
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            max_tokens=min(
                self.max_model_len if params.max_tokens is None else params.max_tokens,
                self.max_model_len - len(ids),
            ),
            eos_token_ids=self.loaded.eos_token_ids,
            detokenizer=Detokenizer(self.loaded.tokenizer, ids),
            stop_strings=StopStrings(tuple(params.stop)),
        )
        self.scheduler.add(request)
        self.stats.prompt_tokens += len(ids)
        return request

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise UserError("a prompt is empty: it needs at least one token")
        if len(ids) >= self.max_model_len:
            raise UserError(
                f"a prompt has {len(ids)} tokens; with an answer, {self.max_model_len} fit"
            )
        wrong = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"a prompt has token id {wrong}; this model knows 0 to {self._vocab_size - 1}"
            )

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def abort(self, request: Request) -> None:
        """Give up a request and free its blocks; one that is finished stays as it is."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.scheduler.remove(request)

    def step(self) -> list[Request]:
        """One forward pass; returns the requests that gained a token."""
        started = time.perf_counter()
        step = self.scheduler.schedule()
        if not step:
            return []
        self._note_memory()
        chunks = [
            Chunk(
                request.token_ids[request.num_computed : request.num_computed + tokens],
                request.num_computed,
                request.block_tables,
                num_logits=int(tokens == request.num_new),
            )
            for request, tokens in step
        ]
        logits = self.runner.forward(chunks)
        advanced = [request for request, tokens in step if tokens == request.num_new]
        for request, tokens in step:
            request.num_computed += tokens
        if advanced:
            self._take_tokens(logits, advanced)
        self.stats.seconds += time.perf_counter() - started
        return advanced

    def _take_tokens(self, logits: torch.Tensor, requests: list[Request]) -> None:
        tokens = self.sampler.sample(
            logits,
            [request.params for request in requests],
            [request.seed for request in requests],
            [len(request.token_ids) for request in requests],
        )
        self.stats.generated_tokens += len(tokens)
        for request, token in zip(requests, tokens, strict=True):
            request.append(token)
            if request.finish_reason is not None:
                self.scheduler.remove(request)

    def _note_memory(self) -> None:
        used = [pool.num_used for pool in self.block_manager.pools]
        own = sum(n * size for n, size in zip(used, self.store.block_bytes(), strict=True))
        if own > self.stats.kv_bytes:
            bf16 = self.store.block_bytes(KVFormat(torch.bfloat16))
            self.stats.kv_bytes = own
            self.stats.bf16_kv_bytes = sum(n * size for n, size in zip(used, bf16, strict=True))


def _free_for_cache(device: torch.device, gpu_memory_utilization: float) -> int:
    """Bytes that pages may take when the user does not say."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - gpu_memory_utilization)))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_CACHE_BYTES, physical // 4)
