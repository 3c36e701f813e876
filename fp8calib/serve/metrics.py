"""/metrics: what the engine counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.runtime.metrics import EngineStats, Histogram

_GAUGES = {
    "running": ("num_requests_running", "Requests that take part in steps."),
    "waiting": ("num_requests_waiting", "Requests that wait for room."),
    "pages_used": ("kv_cache_pages_used", "Pages of the KV cache that requests hold."),
    "pages_total": ("kv_cache_pages", "Pages of the KV cache."),
    "tokens_per_second": (
        "generation_tokens_per_second",
        "Generated tokens by seconds spent in steps, since the start.",
    ),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "generated_tokens": ("generation_tokens", "Tokens of answers."),
    "seconds": ("engine_seconds", "Seconds spent in steps of the engine."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "preemptions": ("preemptions", "Requests that gave up their pages to start over later."),
}
_HISTOGRAMS = {
    "time_to_first_token": (
        "time_to_first_token_seconds",
        "From a request's arrival to its first token.",
    ),
    "inter_token_latency": ("inter_token_latency_seconds", "Between two tokens of a request."),
    "request_latency": ("request_latency_seconds", "From a request's arrival to its end."),
}


def registry_of(llm: AsyncLLM) -> CollectorRegistry:
    """A registry whose values are read from the engine each time it is scraped."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(llm))
    return registry


class _EngineCollector(Collector):
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        stats: EngineStats = self._llm.stats
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"fp8calib_{name}", text, getattr(stats, field))
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(f"fp8calib_{name}", text, getattr(stats, field))
        finished = CounterMetricFamily(
            "fp8calib_requests_finished", "Requests by how they ended.", labels=["finish_reason"]
        )
        for reason, count in stats.finished.copy().items():
            finished.add_metric([reason], count)
        yield finished
        for field, (name, text) in _HISTOGRAMS.items():
            yield _histogram(f"fp8calib_{name}", text, getattr(stats, field))


def _histogram(name: str, text: str, observed: Histogram) -> HistogramMetricFamily:
    bounds = [*map(str, observed.bounds), "+Inf"]
    family = HistogramMetricFamily(name, text)
    counts = list(accumulate(observed.counts))
    family.add_metric([], buckets=list(zip(bounds, counts, strict=True)), sum_value=observed.sum)
    return family
