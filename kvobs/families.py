"""Prometheus families: made once with the metric classes that vLLM hands over, and filled with bucketed counts.

vLLM hands over prometheus_client's classes, or its own in front of Ray's, which have less to offer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.samples import Exemplar

from kvobs.signals import Kind, Signal

Sink = Callable[[int], None]

_CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


class Families:
    """Metric families by name: made on first use with vLLM's metric classes, handed out again after that."""

    def __init__(self, metric_types: Mapping[Any, Any]) -> None:
        self._metric_types = metric_types
        self._by_name: dict[str, Any] = {}

    def types(self) -> dict[Any, Any]:
        """Return stand-ins for ``metric_types`` that register each family once."""
        return {kind: self._maker(real) for kind, real in self._metric_types.items()}

    def make(self, signal: Signal, labelnames: Sequence[str]) -> Any:
        """Return the family of one of kvobs's own metrics."""
        more: dict[str, Any] = {}
        if signal.kind is Kind.HISTOGRAM:
            more["buckets"] = signal.buckets
        elif signal.kind is Kind.GAUGE:
            # Of several API servers, the one that heard from the engine last is right.
            more["multiprocess_mode"] = "mostrecent"
        real = self._metric_types[_CLASSES[signal.kind]]
        return self._maker(real)(
            name=signal.name, documentation=signal.help, labelnames=[*labelnames, *signal.labels], **more
        )

    def _maker(self, real: Any) -> Any:
        def make(name: str, *args: Any, **kwargs: Any) -> Any:
            if name not in self._by_name:
                self._by_name[name] = self._register(real, name, args, kwargs)
            return self._by_name[name]

        return make

    @staticmethod
    def _register(real: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left_over = _registered.pop(name, None)
        if left_over is not None:
            with suppress(KeyError):  # vLLM has removed it: it does so for names that begin with "vllm:"
                REGISTRY.unregister(left_over)
        family = _registered[name] = real(name, *args, **kwargs)
        return family


# What this process has registered, for an engine that is built a second time.
_registered: dict[str, Any] = {}


class Buckets:
    """Takes counts that are bucketed already into a histogram.

    ``sinks`` has a callable for each slot of the series: its buckets, what is above the last bound, the sum in ns.
    Filling prometheus_client's own buckets costs 1/65 of observing one by one; where there are none, as in Ray's
    metrics, what has come in is observed one by one at ``flush``.
    """

    def __init__(self, histogram: Any, signal: Signal) -> None:
        self._histogram = histogram
        self._signal = signal
        self._counts: dict[int, int] = {}
        self._sum_ns = 0
        self.is_direct = hasattr(histogram, "_buckets") and hasattr(histogram, "_sum")
        self.sinks: list[Sink]
        if self.is_direct:
            unit, add_sum = signal.unit, histogram._sum.inc
            self.sinks = [*(bucket.inc for bucket in histogram._buckets), lambda ns: add_sum(ns * unit)]
        else:
            self.sinks = [*(partial(self._keep, bucket) for bucket in range(len(signal.bounds) + 1)), self._keep_sum]

    def mark(self, ns: int, trace_id: str) -> None:
        """Put an exemplar on a duration's bucket; it is lost where there are none, and with several API servers."""
        if self.is_direct:
            exemplar = Exemplar({"trace_id": trace_id}, ns * self._signal.unit, time.time())
            self._histogram._buckets[self._signal.bucket(ns)].set_exemplar(exemplar)

    def _keep(self, bucket: int, n: int) -> None:
        self._counts[bucket] = self._counts.get(bucket, 0) + n

    def _keep_sum(self, ns: int) -> None:
        self._sum_ns += ns

    def flush(self) -> None:
        """Observe what was kept."""
        counts, self._counts = self._counts, {}
        total, self._sum_ns = self._sum_ns, 0
        for value, n in spread(counts, total, self._signal.bounds):
            for _ in range(n):
                self._histogram.observe(value * self._signal.unit)


def spread(counts: Mapping[int, int], total: int, bounds: Sequence[int]) -> list[tuple[float, int]]:
    """Return (value, how often) that fall into these buckets and add up to ``total``.

    All lie at the same share of the way from their bucket's lower to its upper bound.

    Args:
        counts: bucket -> number of observations.
        total: the sum of the observations in ns.
        bounds: the buckets' upper bounds, as exponents of two.
    """
    edges = [0, *(2**k for k in bounds)]
    # What is above the last bound has no upper one: as much as the sum leaves to it.
    tops = {bucket: edges[bucket + 1] if bucket < len(bounds) else max(total, edges[-1] + 1) for bucket in counts}
    low = sum(n * edges[bucket] for bucket, n in counts.items())
    room = sum(n * tops[bucket] for bucket, n in counts.items()) - low
    share = min(1.0, max(1e-6, (total - low) / room)) if room else 1.0
    return [(edges[bucket] + share * (tops[bucket] - edges[bucket]), n) for bucket, n in counts.items()]
