"""Which requests take part in a step, and with how many tokens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fp8calib.runtime.block_manager import BlockManager
from fp8calib.runtime.prefix_hash import extend_hashes
from fp8calib.runtime.request import Request


@dataclass
class ScheduledStep:
    """requests: those that take part, with the number of tokens that each computes; blocks for
    these are in their tables. admitted: those of them that were waiting before. preempted: those
    that gave up their blocks."""

    requests: list[tuple[Request, int]] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served, within a budget of tokens a step.

    Prompts and continuations are the same thing: a request has tokens that are not in the cache
    yet, one when it is generating, many at its start. Every running request takes part with as
    many as the budget allows; then waiting ones are admitted, with what the prefix cache has of
    them. When blocks run out, the latest request gives up its own and starts over later, its tokens
    kept (preemption by recomputation).

    Each running request has a slot, a number below max_num_seqs.

    prefix_root: start of the hashes of blocks (`prefix_hash.fingerprint`), None for no caching.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_root: bytes | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_root = prefix_root
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        request.block_tables = self.block_manager.new_tables()
        self.waiting.append(request)

    def schedule(self) -> ScheduledStep:
        """The next step. Empty only when there are no requests, or all wait for tokens that are
        being computed."""
        step = ScheduledStep()
        budget = self.max_num_batched_tokens
        position = 0
        while position < len(self.running) and budget:
            request = self.running[position]
            count = min(request.num_new, budget)
            while count and not self._grow(request, count):
                step.preempted.append(self._preempt_latest())
                if step.preempted[-1] is request:
                    break
            else:
                position += 1
                budget -= self._take_part(step, request, count)
        while self.waiting and budget and not step.preempted and self._free_slots:
            request = self.waiting[0]
            self._find_prefix(request)
            count = min(request.num_new, budget)
            if not self._grow(request, count):
                self._give_up_blocks(request)
                break
            self.running.append(self.waiting.popleft())
            request.slot = self._free_slots.pop()
            step.admitted.append(request)
            budget -= self._take_part(step, request, count)
        return step

    def _take_part(self, step: ScheduledStep, request: Request, count: int) -> int:
        if count:
            step.requests.append((request, count))
            self._cache_full_blocks(request, request.num_computed + count)
        return count

    def _grow(self, request: Request, count: int) -> bool:
        return self.block_manager.grow(
            request.block_tables, request.num_computed, request.num_computed + count
        )

    def _find_prefix(self, request: Request) -> None:
        """Take over the cached blocks of a request's tokens; one token at least is computed."""
        if self.prefix_root is None or request.wants_prompt_logprobs:
            return
        size = self.block_manager.block_size
        extend_hashes(request.block_hashes, request.token_ids, size, self.prefix_root)
        hashes = request.block_hashes[: (len(request.token_ids) - 1) // size]
        request.num_computed = self.block_manager.share_prefix(request.block_tables, hashes)
        request.num_cached_blocks = request.num_computed // size

    def _cache_full_blocks(self, request: Request, num_computed: int) -> None:
        """Let others use blocks that this step fills: it stores before it attends, so even requests
        of the same step can."""
        size = self.block_manager.block_size
        if self.prefix_root is None or num_computed // size <= request.num_cached_blocks:
            return
        extend_hashes(request.block_hashes, request.token_ids, size, self.prefix_root)
        known = request.block_hashes[: num_computed // size]
        if len(known) > request.num_cached_blocks:
            self.block_manager.cache(request.block_tables, known, request.num_cached_blocks)
            request.num_cached_blocks = len(known)

    def _preempt_latest(self) -> Request:
        request = self.running.pop()
        self._give_up_blocks(request)
        self._give_up_slot(request)
        self.waiting.appendleft(request)
        return request

    def _give_up_blocks(self, request: Request) -> None:
        self.block_manager.free(request.block_tables)
        request.num_computed = request.num_cached_blocks = 0

    def _give_up_slot(self, request: Request) -> None:
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None

    def remove(self, request: Request) -> None:
        """Forget a request that is finished or given up, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self._give_up_slot(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.block_manager.free(request.block_tables)

    def forget_prefixes(self, prefix_root: bytes) -> None:
        """The cache's contents are out of date: running requests start over, in their order."""
        while self.running:
            self._preempt_latest()
        for request in self.waiting:
            request.block_hashes.clear()
        self.block_manager.forget_cached()
        if self.prefix_root is not None:
            self.prefix_root = prefix_root
