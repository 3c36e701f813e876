"""The engine: requests in, one step after the other, tokens out."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from fp8calib.errors import ModelError, UserError
from fp8calib.runtime.block_manager import BlockManager
from fp8calib.runtime.cache_setup import describe_store, make_store
from fp8calib.runtime.compiled_layers import compile_layers
from fp8calib.runtime.config import EngineConfig
from fp8calib.runtime.cuda_graphs import DecodeGraphs
from fp8calib.runtime.detokenizer import Detokenizer, StopStrings, TextDecoder
from fp8calib.runtime.executor import StepExecutor, StepInFlight
from fp8calib.runtime.kv_cache_dtype import KVChoice, choose_kv_format
from fp8calib.runtime.kv_format import KVFormat
from fp8calib.runtime.loader import LoadedModel
from fp8calib.runtime.metrics import EngineStats
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.packed_weights import pack_weights
from fp8calib.runtime.prefix_hash import fingerprint
from fp8calib.runtime.request import Request, RequestGroup
from fp8calib.runtime.sampler import NAN, Sampler
from fp8calib.runtime.sampling_params import SamplingParams
from fp8calib.runtime.scheduler import Scheduler
from fp8calib.runtime.support import length_dependent_rope
from fp8calib.runtime.tokenize import tokenize
from fp8calib.scales import ScaleSet, problems, require


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
        if config.compile_layers:
            compile_layers(loaded.model, loaded.layers)
        elif config.pack_weights:
            pack_weights(loaded.model)
        self.store, fitting = make_store(loaded, self.kv.kv_format, config, self.max_model_len)
        if fitting < self.max_model_len:
            self.max_model_len = fitting
            self.warnings.append(f"sequences are limited to {fitting} tokens by the cache's memory")
        self.block_manager = BlockManager(
            self.store.groups, self.store.num_blocks, self.store.block_size
        )
        self.scheduler = Scheduler(
            self.block_manager,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            fingerprint(self.kv.kv_format) if config.enable_prefix_caching else None,
        )
        runner = ModelRunner(loaded.model, self.store, self._make_graphs(), config.max_num_seqs)
        self._vocab_size = loaded.model.config.get_text_config(decoder=True).vocab_size
        sampler = Sampler(config.max_num_seqs, self._vocab_size, self.store.device)
        self.executor = StepExecutor(runner, sampler)
        on_gpu = self.store.device.type == "cuda"
        self.asynchronous = on_gpu if config.async_scheduling is None else config.async_scheduling
        self.stats = EngineStats(pages_total=sum(self.store.num_blocks))
        self._block_bytes = self.store.block_bytes()
        self._bf16_block_bytes = self.store.block_bytes(KVFormat(torch.bfloat16))
        self._in_flight: StepInFlight | None = None
        self._taken_early: list[Request] = []  # they gained a token between two steps
        self._decoder = TextDecoder(loaded.tokenizer)
        self._ids = itertools.count()

    def _wanted_length(self) -> int:
        wanted, most = self.config.max_model_len, self.loaded.max_model_len
        if wanted is not None and wanted > most:
            raise UserError(f"max_model_len {wanted}: this model can do {most} tokens at most")
        return wanted or most

    def _make_graphs(self) -> DecodeGraphs | None:
        device = self.store.device
        if device.type != "cuda" or self.config.enforce_eager:
            return None
        if kind := length_dependent_rope(self.loaded.model.config):
            self.warnings.append(
                f"this model runs without CUDA graphs, which is slower: its RoPE ({kind}) looks at "
                "the positions of each step"
            )
            return None
        if any(cache.backend == "torch" for cache in self.store.layers.values()):
            self.warnings.append("pages of float32, or FP8 beside native, run without CUDA graphs")
            return None
        width = -(-self.max_model_len // self.store.block_size)
        most = min(self.config.max_cudagraph_capture_size, self.config.max_num_seqs)
        return DecodeGraphs(device, [width] * len(self.store.groups), most)

    def describe_cache(self) -> str:
        """One line for the start-up: pages, tokens that fit, how many more than in bfloat16."""
        return describe_store(self.store, self.config)

    def add_group(
        self,
        params: SamplingParams,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
    ) -> RequestGroup:
        """Queue the `params.n` completions of a prompt: a text, which is tokenized as it is, or
        token ids (with the text they stand for, if there is one).

        Raises:
            UserError: a prompt that is empty, no Unicode, or leaves no room for an answer, a token
                id that the model does not know, or more log probabilities than max_logprobs.
        """
        ids = self.tokenize(prompt or "") if prompt_token_ids is None else list(prompt_token_ids)
        self.check_prompt(ids)
        self._check_params(params)
        if request_id is None:
            request_id = str(next(self._ids))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        now = time.perf_counter()
        requests = [
            Request(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=ids,
                params=params,
                seed=(seed + index) % 2**63,
                max_tokens=min(
                    self.max_model_len if params.max_tokens is None else params.max_tokens,
                    self.max_model_len - len(ids),
                ),
                eos_token_ids=self.loaded.eos_token_ids,
                detokenizer=Detokenizer(self._decoder, ids),
                stop_strings=StopStrings(tuple(params.stop)),
                index=index,
                arrival_time=now,
            )
            for index in range(params.n)
        ]
        for request in requests:
            self.scheduler.add(request)
        self.stats.prompt_tokens += len(ids)
        self._note_state()
        return RequestGroup(request_id, requests)

    def add_request(
        self,
        params: SamplingParams,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> Request:
        """`add_group` for a single completion."""
        (request,) = self.add_group(params, prompt, prompt_token_ids).requests
        return request

    def tokenize(self, prompt: str) -> list[int]:
        return tokenize(self.loaded.tokenizer, prompt)

    def _check_params(self, params: SamplingParams) -> None:
        most = self.config.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name) or 0
            if wanted > most:
                raise UserError(f"{name} is {wanted}, and at most {most} are given (max_logprobs)")
        self._check_tokens("stop_token_ids has", params.stop_token_ids)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise UserError for a prompt that cannot run."""
        if not ids:
            raise UserError("a prompt is empty: it needs at least one token")
        if len(ids) >= self.max_model_len:
            raise UserError(
                f"a prompt has {len(ids)} tokens; with an answer, {self.max_model_len} fit"
            )
        self._check_tokens("a prompt has", ids)

    def _check_tokens(self, where: str, ids: Sequence[int]) -> None:
        wrong = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{where} token id {wrong}; this model knows 0 to {self._vocab_size - 1}"
            )

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def abort(self, request: Request) -> None:
        """Give up a request and free its blocks; one that is finished stays as it is."""
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self._remove(request)

    def step(self) -> list[Request]:
        """One forward pass; returns the requests that gained a token (or failed) since the last.

        With asynchronous scheduling the pass is only started, and the tokens are those of the pass
        before: a request that these end has taken part once too often, and what comes of that is
        dropped.

        Raises:
            ModelError: the device's memory is not enough. The requests remain unfinished.
        """
        started = time.perf_counter()
        done, self._in_flight = self._in_flight, self._start_step()
        if not self.asynchronous:
            done, self._in_flight = self._in_flight, None
        advanced, self._taken_early = self._taken_early, []
        if done is not None:
            advanced += self._take_tokens(done)
        self._note_state()
        self.stats.seconds += time.perf_counter() - started
        return advanced

    def _start_step(self) -> StepInFlight | None:
        step = self.scheduler.schedule()
        self.stats.preemptions += len(step.preempted)
        for request in step.admitted:
            if not request.output_token_ids:
                request.num_cached_tokens = request.num_computed
            if self.config.enable_prefix_caching and not request.wants_prompt_logprobs:
                self.stats.prefix_cache_queries += len(request.token_ids)
                self.stats.prefix_cache_hits += request.num_computed
        if not step.requests:
            return None
        self._note_memory()
        try:
            return self.executor.start(step)
        except BaseException as problem:
            # Blocks of this step can be found already, and may never have been written.
            self.block_manager.forget_cached()
            if isinstance(problem, torch.OutOfMemoryError):
                self._take_early()  # the device may have forgotten them when it tries again
                raise ModelError(
                    "a step needs more memory than the device has left; use a smaller "
                    "gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"
                ) from None
            raise

    def _take_early(self) -> None:
        """Wait for the step in flight; `step` tells of its tokens."""
        if self._in_flight is not None:
            done, self._in_flight = self._in_flight, None
            self._taken_early += self._take_tokens(done)

    def _take_tokens(self, done: StepInFlight) -> list[Request]:
        advanced = []
        results = done.wait()
        now = time.perf_counter()
        for request, token, logprobs in results:
            if request.finish_reason is not None:
                continue
            if token == NAN:
                request.error, request.finish_reason = _nan_error(), "abort"
            else:
                if logprobs is not None:
                    request.logprobs.append(logprobs)
                    request.cumulative_logprob += logprobs[0][1]
                request.append(token)
                self.stats.note_token(now, request.arrival_time, request.last_token_time)
                request.last_token_time = now
            advanced.append(request)
            if request.finish_reason is not None:
                self._remove(request)
        return advanced

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        assert request.finish_reason is not None
        self.stats.note_end(request.finish_reason, time.perf_counter() - request.arrival_time)
        self._note_state()

    def reload_scales(self, scales: ScaleSet) -> None:
        """Store and read FP8 pages by other scales from now on, in place, so that captured graphs
        see them. Cached prefixes are dropped; running requests are computed again from their start.

        Raises:
            UserError: the cache holds no e4m3 pages.
            ScaleError: scales that do not fit the model.
        """
        problems_found = problems(scales, self.loaded.layers)
        require(problems_found, "the new scales")
        self._take_early()
        self.store.reload_scales(scales)
        self.kv = replace(self.kv, kv_format=self.store.kv_format)
        self.scheduler.forget_prefixes(fingerprint(self.store.kv_format))

    def _note_state(self) -> None:
        stats = self.stats
        stats.running, stats.waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        stats.pages_used = sum(pool.num_used for pool in self.block_manager.pools)

    def _note_memory(self) -> None:
        used = [pool.num_used for pool in self.block_manager.pools]
        own = sum(n * size for n, size in zip(used, self._block_bytes, strict=True))
        if own > self.stats.kv_bytes:
            self.stats.kv_bytes = own
            self.stats.bf16_kv_bytes = sum(
                n * size for n, size in zip(used, self._bf16_block_bytes, strict=True)
            )


def _nan_error() -> ModelError:
    return ModelError(
        "the model's logits are NaN: its values overflow. Try --dtype float32 or bfloat16; "
        "if --kv-cache-dtype bfloat16 helps, the cache's scales are wrong"
    )
