"""Publish totals with prometheus_client: in a registry, or as Prometheus's text or OpenMetrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from threading import Lock

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvobs.export.totals import Point, Totals
from kvobs.schema.signals import SIGNALS, Kind, Signal, labelnames

FRESH_S = 0.2
"""Scrapes within this time of each other get the same text. Bounds the CPU cost of frequent scrapes."""

_BOUNDS = {
    signal: [*map(floatToGoString, signal.buckets), "+Inf"] for signal in SIGNALS if signal.kind is Kind.HISTOGRAM
}


class TotalsCollector(Collector):
    """Hands the totals of engines to a registry of prometheus_client.

    Args:
        engines: their totals; may grow later.
        metrics: those that are published.
    """

    def __init__(self, engines: Collection[Totals], metrics: Sequence[Signal] = SIGNALS) -> None:
        self._engines = engines
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Yield each metric without series: the registry refuses their names to others."""
        return (_family(signal, ()) for signal in self._metrics)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with the series of all engines."""
        series = [dict(totals.series()) for totals in self._engines]
        return (_family(signal, chain.from_iterable(one[signal] for one in series)) for signal in self._metrics)


class Exposition:
    """The text of /metrics."""

    def __init__(
        self, totals: Totals, refresh: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._refresh = refresh
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(TotalsCollector([totals]))
        self._lock = Lock()
        self._texts: dict[str, tuple[float, bytes]] = {}  # content type -> when, and the text

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that a client accepts, and the text."""
        encode, content_type = choose_encoder(accept)
        with self._lock:
            made, text = self._texts.get(content_type, (-FRESH_S, b""))
            now = self._clock()
            if now - made >= FRESH_S or not text:
                self._refresh()
                text = encode(self._registry)
                if content_type not in self._texts and len(self._texts) >= len(("text", "openmetrics")):
                    self._texts.clear()  # a client may ask for ever new versions
                self._texts[content_type] = now, text
        return content_type, text

    def forget(self) -> None:
        """Discard the text: the next scrape makes it again."""
        with self._lock:
            self._texts.clear()


def _family(signal: Signal, points: Iterable[Point]) -> Metric:
    names = labelnames(signal)
    if signal.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(signal.name, signal.help, labels=names)
        for point in points:
            histogram.add_metric(point.labels, _buckets(signal, point), point.value)
        return histogram
    family_class = CounterMetricFamily if signal.kind is Kind.COUNTER else GaugeMetricFamily
    family = family_class(signal.name, signal.help, labels=names)
    for point in points:
        family.add_metric(point.labels, point.value)
    return family


def _buckets(signal: Signal, point: Point) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return cumulative buckets, with their exemplars."""
    buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    count = 0
    for i, (bound, n) in enumerate(zip(_BOUNDS[signal], point.buckets, strict=True)):
        count += n
        mark = point.marks.get(i)
        if mark is None:
            buckets.append((bound, float(count)))
        else:
            buckets.append((bound, float(count), Exemplar({"trace_id": mark.trace_id}, mark.value, mark.time_s)))
    return buckets
