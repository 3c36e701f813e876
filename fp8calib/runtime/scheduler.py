"""Which requests take part in a step, and with how many tokens."""

from __future__ import annotations

from collections import deque

from fp8calib.runtime.block_manager import BlockManager
from fp8calib.runtime.request import Request


class Scheduler:
    """First come, first served, within a budget of tokens a step.

    Prompts and continuations are the same thing: a request has tokens that are not in the cache
    yet, one when it is generating, many at its start. Every running request takes part with as
    many as the budget allows; then waiting ones are admitted. When blocks run out, the latest
    request gives up its own and starts over later, its tokens kept (preemption by recomputation).
    """

    def __init__(
        self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival

    def add(self, request: Request) -> None:
        request.block_tables = self.block_manager.new_tables()
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of the next step and the number of tokens that each computes; blocks for
        these are in their tables. Empty only when there are no requests."""
        budget = self.max_num_batched_tokens
        step: list[tuple[Request, int]] = []
        preempted = False
        position = 0
        while position < len(self.running) and budget:
            request = self.running[position]
            count = min(request.num_new, budget)
            while not self._grow(request, count):
                preempted = True
                if self._preempt_latest() is request:
                    break
            else:
                step.append((request, count))
                budget -= count
                position += 1
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            count = min(request.num_new, budget)
            if not self._grow(request, count):
                break
            self.running.append(self.waiting.popleft())
            step.append((request, count))
            budget -= count
        return step

    def _grow(self, request: Request, count: int) -> bool:
        return self.block_manager.grow(
            request.block_tables, request.num_computed, request.num_computed + count
        )

    def _preempt_latest(self) -> Request:
        request = self.running.pop()
        self.block_manager.free(request.block_tables)
        request.num_computed = 0
        self.waiting.appendleft(request)
        return request

    def remove(self, request: Request) -> None:
        """Forget a request that is finished or given up, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.block_manager.free(request.block_tables)
