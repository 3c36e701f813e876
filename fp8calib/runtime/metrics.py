"""What an engine counts, for summaries and for a metrics endpoint."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds; vLLM's bounds, so that its dashboards fit.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_BETWEEN_TOKENS = (
    *(0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


@dataclass
class Histogram:
    """Observations sorted into buckets, as Prometheus has them.

    bounds: the inclusive upper bounds, ascending; counts: of each bucket, not cumulative, with one
    more for what is above all bounds; sum: of all observations.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass
class EngineStats:
    """Of one engine since it was made. Another thread may read it while the engine runs.

    prompt_tokens, generated_tokens: of all requests. seconds: spent in steps.
    kv_bytes, bf16_kv_bytes: the most bytes of K and V that were held at a time, and what bfloat16
        pages would have taken for the same.
    running, waiting: requests now. pages_used, pages_total: pages of all groups of layers that
        requests hold now, and that there are; pages kept only as cached prefixes are not used.
    prefix_cache_queries, prefix_cache_hits: tokens looked up in the prefix cache, and found.
    preemptions: times that a request gave up its pages to start over later.
    finished: requests by finish reason.
    time_to_first_token, inter_token_latency, request_latency: seconds, from a request's arrival to
        its first token, between tokens of a request, and from arrival to end.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    kv_bytes: int = 0
    bf16_kv_bytes: int = 0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(_BETWEEN_TOKENS))
    request_latency: Histogram = field(default_factory=lambda: Histogram(_WHOLE_REQUEST))

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def note_token(self, now: float, arrival: float, last: float | None) -> None:
        """A request that arrived at `arrival` gained a token `now`; the one before came `last`."""
        self.generated_tokens += 1
        if last is None:
            self.time_to_first_token.observe(now - arrival)
        else:
            self.inter_token_latency.observe(now - last)

    def note_end(self, finish_reason: str, seconds: float) -> None:
        """A request ended, so many seconds after its arrival."""
        self.finished[finish_reason] = self.finished.get(finish_reason, 0) + 1
        self.request_latency.observe(seconds)
