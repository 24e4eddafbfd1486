"""Add up the payloads of one engine, and publish every series with prometheus_client: in a registry, or as text.

Only the engine's increments are added here: numbers of the exporter itself go to the engine first, and come
back with the next payload. After a restart the engine sends its totals, so that no counter falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvobs.export.engine_watch import EngineWatch
from kvobs.probe.black_box import SCHEDULER
from kvobs.probe.increments import Increments
from kvobs.schema import __version__, signals
from kvobs.schema.signals import (
    OTHER_VALUE,
    SERIES_AT_MOST,
    SIGNALS,
    Kind,
    Series,
    Signal,
    hook_label,
    labelnames,
    place,
)
from kvobs.schema.spans import CONNECTOR, Record, observed_in
from kvobs.telemetry.payload.wire import EngineInfo

FRESH_S = 0.2
"""Scrapes of one form within this time of each other get the same text. Bounds the CPU cost of frequent scrapes."""

_BOUNDS = {
    signal: [*map(floatToGoString, signal.buckets), "+Inf"] for signal in SIGNALS if signal.kind is Kind.HISTOGRAM
}

_OPEN = {signal.name: signal for signal in SIGNALS if signal.is_open and signal.kind is Kind.COUNTER}
_Key = tuple[Series, int]  # a series of the slot table, and the connector's position (-1: none)


class Mark(NamedTuple):
    """An exemplar: a duration in seconds, whose span has this trace and span id."""

    value: float
    time_s: float
    trace_id: str
    span_id: str


class Point(NamedTuple):
    """One series.

    ``labels`` are the values of all labels (see ``signals.labelnames``). ``value`` is a total, a gauge's value, or a
    histogram's sum, in Prometheus's units. ``buckets`` has a histogram's counts, one for each bucket and one for the
    overflow, and ``marks`` its exemplars by bucket.
    """

    labels: tuple[str, ...]
    value: float
    buckets: Sequence[int] = ()
    marks: Mapping[int, Mark] = {}


class Totals:
    """The totals of one engine; threads may read them while payloads are added.

    ``watch`` sees the calls that it is in, and its end.
    """

    def __init__(self, engine: EngineInfo, watch: EngineWatch | None = None) -> None:
        self._engine = engine
        self._watch = watch
        self._labels = (engine.model, str(engine.index))
        self._names = [connector.name for connector in engine.connectors]
        self._lock = Lock()
        self._counts: dict[_Key, list[int]] = {}
        self._slots: dict[int, tuple[list[int], int]] = {}  # slot -> the series' totals, and the index in them
        self._gauges: dict[_Key, int] = {}
        self._opened: dict[Signal, dict[tuple[int, tuple[str, ...]], int]] = {}
        self._marks: dict[_Key, dict[int, Mark]] = {}
        self._exporter_gauges: dict[Signal, Point] = {}

    def add(self, taken: Increments) -> None:
        """Add the increments of a payload.

        Raises:
            ValueError: a number is of no series of this engine; then none is added.
        """
        added = {slot: self._locate(slot, is_gauge=False) for slot in taken.counts if slot not in self._slots}
        gauges = {self._locate(slot, is_gauge=True): value for slot, value in taken.gauges.items()}
        rows = [self._row(*row) for row in taken.opened]
        with self._lock:
            for slot, (series, offset, child) in added.items():
                self._slots[slot] = self._counts.setdefault((series, child), [0] * series.width), offset
            for slot, n in taken.counts.items():
                totals, offset = self._slots[slot]
                totals[offset] += n
            for (series, _, child), value in gauges.items():
                self._gauges[series, child] = value
            for row in rows:
                self._add_open(*row)

    def _locate(self, slot: int, *, is_gauge: bool) -> tuple[Series, int, int]:
        if not 0 <= slot < place(len(self._names), 0):
            raise ValueError(f"slot {slot} is of no connector of {', '.join(self._names)}")
        series, offset, child = signals.locate(slot)
        if (series.signal.kind is Kind.GAUGE) is not is_gauge:
            raise ValueError(f"slot {slot} is {'no' if is_gauge else 'a'} gauge")
        return series, offset, child

    def _row(self, name: str, child: int, *rest: Any) -> tuple[Signal, int, tuple[str, ...], int]:
        *values, n = rest
        signal = _OPEN.get(name)
        if signal is None or len(values) != len(signal.labels) or not 0 <= child < len(self._names) or n < 0:
            raise ValueError(f"no series has the row {[name, child, *rest]}")
        return signal, child, tuple(values), n

    def _add_open(self, signal: Signal, child: int, values: tuple[str, ...], n: int) -> None:
        """Add to a series whose label values come from the engine; their number is limited."""
        known = self._opened.setdefault(signal, {})
        if (child, values) not in known and sum(key[0] == child for key in known) >= SERIES_AT_MOST:
            values = (OTHER_VALUE,) * len(values)
        known[child, values] = known.get((child, values), 0) + n

    def mark(self, record: Record, time_s: float) -> None:
        """Put an exemplar on the bucket of a span's duration."""
        series, name = observed_in(record), str(record.attributes.get(CONNECTOR))
        if series is None or name not in self._names:
            return
        mark = Mark(record.observed_ns * series.signal.unit, time_s, record.trace_id, record.span_id)
        with self._lock:
            marks = self._marks.setdefault((series, self._names.index(name)), {})
            marks[series.signal.bucket(record.observed_ns)] = mark

    def set_exporter_gauge(self, signal: Signal, value: float) -> None:
        """Set a gauge of the exporter."""
        with self._lock:
            self._exporter_gauges[signal] = Point(self._labels, value)

    def series(self) -> Iterator[tuple[Signal, list[Point]]]:
        """Yield each metric with its series, in the order of the table; without series where it was not used yet."""
        halted_ns, now_ns = self._watch.halted_ns if self._watch else 0, perf_counter_ns()
        with self._lock:
            points: dict[Signal, list[Point]] = {signal: [] for signal in SIGNALS}
            for (series, child), totals in self._counts.items():
                points[series.signal].append(self._point(series, child, totals))
            for (series, child), value in self._gauges.items():
                # An age goes on growing while the engine hangs and sends nothing; not while it is stopped.
                is_age = value and series.signal is signals.OLDEST_IN_FLIGHT
                number = now_ns - max(value, halted_ns) if is_age else value
                points[series.signal].append(Point(self._values(child, series.values), number * series.signal.unit))
            for signal, opened in self._opened.items():
                for (child, values), n in opened.items():
                    points[signal].append(Point(self._values(child, values), n * signal.unit))
            for signal, point in self._exporter_gauges.items():
                points[signal].append(point)
        self._introduce(points)
        if self._watch is not None:
            points[signals.CALL_IN_PROGRESS] = self._calls(self._watch)
            ended, previous = self._watch.end, self._watch.previous
            if (end := ended or previous) is not None:
                values = (end.connector, hook_label(end.hook) if end.hook else "", end.reason)
                points[signals.ENGINE_ENDED] = [Point((*self._labels, *values), 1 if ended else 2)]
        yield from points.items()

    def _calls(self, watch: EngineWatch) -> list[Point]:
        now_ns, ages = perf_counter_ns(), dict[tuple[str, ...], float]()
        for call in watch.calls():  # the oldest first
            rank = SCHEDULER if call.rank is None else str(call.rank)
            values = (*self._labels, call.connector, hook_label(call.hook), rank)
            ages.setdefault(values, (now_ns - call.since_ns) * signals.CALL_IN_PROGRESS.unit)
        return [Point(values, age) for values, age in ages.items()]

    def _point(self, series: Series, child: int, totals: list[int]) -> Point:
        labels, unit = self._values(child, series.values), series.signal.unit
        if series.signal.kind is not Kind.HISTOGRAM:
            return Point(labels, totals[0] * unit)
        return Point(labels, totals[-1] * unit, totals[:-1], dict(self._marks.get((series, child), {})))

    def _values(self, child: int, values: tuple[str, ...]) -> tuple[str, ...]:
        return (*self._labels, self._names[child], *values) if child >= 0 else (*self._labels, *values)

    def _introduce(self, points: dict[Signal, list[Point]]) -> None:
        """Add the info metrics: versions, start and configuration."""
        engine = self._engine
        points[signals.BUILD_INFO] = [
            Point((*self._labels, __version__, engine.vllm_version, str(engine.is_native).lower()), 1)
        ]
        points[signals.START_TIME] = [Point(self._labels, engine.began_ns * signals.START_TIME.unit)]
        policies = engine.load_policy, engine.failure_policy
        points[signals.CONNECTOR_INFO] = [
            Point(self._values(i, (str(i), connector.class_name, connector.role, *policies)), 1)
            for i, connector in enumerate(engine.connectors)
        ]
        points[signals.LINK_SPEED] = [
            Point((*self._labels, connector.name), connector.link_gbps * 1e9 / 8)
            for connector in engine.connectors
            if connector.link_gbps is not None
        ]


class TotalsCollector(Collector):
    """Hands the totals of ``engines``, which may become more later, to a registry of prometheus_client."""

    def __init__(self, engines: Collection[Totals], metrics: Sequence[Signal] = SIGNALS) -> None:
        self._engines = engines
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Yield each metric without series: the registry refuses their names to others."""
        return (_family(signal, ()) for signal in self._metrics)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with the series of all engines."""
        engines = [dict(totals.series()) for totals in self._engines]
        return (_family(signal, chain.from_iterable(points[signal] for points in engines)) for signal in self._metrics)


class Exposition:
    """The text of /metrics."""

    def __init__(
        self, totals: Totals, refresh: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._refresh = refresh
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(TotalsCollector([totals]))
        self._last = -FRESH_S, "", b""  # when, the content type, and the text

    def text(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that a client accepts, and the text."""
        try:
            encode, content_type = choose_encoder(accept)
        except Exception:  # prometheus_client's own, of a version that is none
            encode, content_type = choose_encoder("")
        made, last_type, text = self._last
        now = self._clock()
        if content_type != last_type or now - made >= FRESH_S:
            self._refresh()
            text = encode(self._registry)
            self._last = now, content_type, text
        return content_type, text

    def forget(self) -> None:
        """Discard the text: the next scrape makes it again."""
        self._last = -FRESH_S, "", b""


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
