"""Prometheus metric families: created once with vLLM's metric classes, and filled with bucketed counts.

vLLM passes prometheus_client's classes, or its own wrappers of Ray's, which support less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.samples import Exemplar

from kvobs.schema.signals import Kind, Signal

Sink = Callable[[int], None]

_CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}


class Families:
    """Metric families by name: created on first use with vLLM's metric classes, then reused."""

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
            # Of several API servers, the one with the engine's latest payload is right.
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
            with suppress(KeyError):  # vLLM has unregistered it, as it does with names that begin with "vllm:"
                REGISTRY.unregister(left_over)
        family = _registered[name] = real(name, *args, **kwargs)
        return family


# Families registered in this process, for an engine that is built a second time.
_registered: dict[str, Any] = {}


class Buckets:
    """Adds bucketed counts to a histogram.

    ``sinks`` has a callable for each slot of the series: its buckets, the overflow bucket, the sum in ns. Filling
    prometheus_client's buckets directly costs 1/65 of single observations; without buckets, as in Ray's metrics, counts
    are kept and observed one by one at ``flush``.
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
        """Put an exemplar on a duration's bucket; without buckets, or with several API servers, it is lost."""
        if self.is_direct:
            exemplar = Exemplar({"trace_id": trace_id}, ns * self._signal.unit, time.time())
            self._histogram._buckets[self._signal.bucket(ns)].set_exemplar(exemplar)

    def _keep(self, bucket: int, n: int) -> None:
        self._counts[bucket] = self._counts.get(bucket, 0) + n

    def _keep_sum(self, ns: int) -> None:
        self._sum_ns += ns

    def flush(self) -> None:
        """Observe the counts that were kept."""
        counts, self._counts = self._counts, {}
        total, self._sum_ns = self._sum_ns, 0
        for value, n in spread(counts, total, self._signal.bounds):
            for _ in range(n):
                self._histogram.observe(value * self._signal.unit)


def spread(counts: Mapping[int, int], total: int, bounds: Sequence[int]) -> list[tuple[float, int]]:
    """Return (value, count) pairs that fall into these buckets and add up to ``total``.

    All values have the same relative position between their bucket's lower and upper bound.

    Args:
        counts: bucket -> number of observations.
        total: the sum of the observations in ns.
        bounds: the buckets' upper bounds, as exponents of two.
    """
    edges = [0, *(2**k for k in bounds)]
    # The overflow bucket has no upper bound: its values get the rest of the sum.
    tops = {bucket: edges[bucket + 1] if bucket < len(bounds) else max(total, edges[-1] + 1) for bucket in counts}
    low = sum(n * edges[bucket] for bucket, n in counts.items())
    room = sum(n * tops[bucket] for bucket, n in counts.items()) - low
    share = min(1.0, max(1e-6, (total - low) / room)) if room else 1.0
    return [(edges[bucket] + share * (tops[bucket] - edges[bucket]), n) for bucket, n in counts.items()]
