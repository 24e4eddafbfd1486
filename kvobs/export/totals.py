"""Publish every series of an engine with prometheus_client: in a registry, or as text. Numbers are read when asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from threading import Lock
from time import perf_counter_ns
from typing import NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvobs import faults
from kvobs.export.engine import Engine
from kvobs.export.engine_watch import EngineWatch
from kvobs.page.description import SCHEDULER, EngineInfo
from kvobs.page.rows import Key
from kvobs.schema import signals
from kvobs.schema.signals import SIGNALS, Kind, Series, Signal, hook_label, labelnames, series_words
from kvobs.schema.spans import CONNECTOR, Record, observed_in

FRESH_S = 0.2
"""Scrapes of one form within this time of each other get the same text. Bounds the CPU cost of frequent scrapes."""

_BOUNDS = {
    signal: [*map(floatToGoString, signal.buckets), "+Inf"] for signal in SIGNALS if signal.kind is Kind.HISTOGRAM
}
_VERSION = signals.slot(signals.INTERNAL_ERRORS, "version")


class TracedValue(NamedTuple):
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
    marks: Mapping[int, TracedValue] = {}


class Counted(NamedTuple):
    """What an engine has counted until some time: by slot, and by open series."""

    counts: list[int]
    rows: Mapping[Key, int]


class Totals:
    """The series of one engine; several threads may ask for them.

    ``watch`` sees the calls that it is in, and its end. ``model`` is the value of vLLM's label, by default the one that
    the engine describes itself with. What this process counts itself is added by ``count``; ``own`` is what an earlier
    process in its place has counted, by slot.
    """

    def __init__(
        self,
        engine: Engine,
        watch: EngineWatch | None = None,
        model: str | None = None,
        own: Mapping[int, int] | None = None,
    ) -> None:
        self.engine = engine
        self._watch = watch
        self._model = model
        self._lock = Lock()
        self._own = Counter(own)
        self._marks: dict[tuple[Series, int], dict[int, TracedValue]] = {}
        self._gauges: dict[Signal, float] = {}

    def count(self, slot: int, n: int) -> None:
        """Count what happens in this process, in a slot of the engine's."""
        with self._lock:
            self._own[slot] += n

    @property
    def own(self) -> Counter[int]:
        """Return what was counted in this process, by slot."""
        with self._lock:
            return Counter(self._own)

    def mark(self, record: Record, time_s: float) -> None:
        """Put an exemplar on the bucket of a span's duration."""
        series, name, info = observed_in(record), str(record.attributes.get(CONNECTOR)), self.engine.info
        if series is None or info is None or name not in info.names:
            return
        mark = TracedValue(record.observed_ns * series.signal.unit, time_s, record.trace_id, record.span_id)
        with self._lock:
            marks = self._marks.setdefault((series, info.names.index(name)), {})
            marks[series.signal.bucket(record.observed_ns)] = mark

    def set_gauge(self, signal: Signal, value: float) -> None:
        """Set a gauge of this process."""
        self._gauges[signal] = value

    def counted(self) -> Counted:
        """Return what has been counted until now, in the pages and in this process."""
        counts = self.engine.counts()
        with self._lock:
            for slot, n in (*self._own.items(), (_VERSION, self.engine.refused)):
                counts[slot] += n
        return Counted(counts, self.engine.rows())

    def series(self, counted: Counted | None = None) -> Iterator[tuple[Signal, list[Point]]]:
        """Yield each metric with its series, in the order of the table; without series where it was not used yet.

        With ``counted``, what was counted until then, without calls and ends of now.
        """
        self.engine.find()
        points: dict[Signal, list[Point]] = {signal: [] for signal in SIGNALS}
        if (info := self.engine.info) is not None:
            labels = (self._model or info.model, str(info.index))
            self._read(points, info, labels, counted or self.counted())
            self._introduce(points, info, labels)
            if self._watch is not None and counted is None:
                self._observe(points, labels, self._watch)
        yield from points.items()

    def _read(
        self, points: dict[Signal, list[Point]], info: EngineInfo, labels: tuple[str, ...], counted: Counted
    ) -> None:
        """Add what was counted."""
        counts, now_ns = counted.counts, perf_counter_ns()
        halted_ns = self._watch.halted_ns if self._watch is not None else 0
        with self._lock:
            for index, series, at in series_words(len(info.connectors)):
                signal = series.signal
                values = counts[at : at + series.width]
                if not any(values):
                    continue
                named = (
                    (*labels, info.connectors[index].name, *series.values) if index >= 0 else (*labels, *series.values)
                )
                if signal.kind is Kind.HISTOGRAM:
                    marks = dict(self._marks.get((series, index), {}))
                    points[signal].append(Point(named, values[-1] * signal.unit, values[:-1], marks))
                    continue
                number = values[0] - (signal.kind is Kind.GAUGE)
                if signal is signals.OLDEST_IN_FLIGHT and number:
                    # An age grows while the engine hangs; not while it is stopped.
                    number = max(0, now_ns - max(number, halted_ns))
                points[signal].append(Point(named, number * signal.unit))
        for (signal, index, texts), n in counted.rows.items():
            points[signal].append(Point((*labels, info.connectors[index].name, *texts), n * signal.unit))
        for signal, value in tuple(self._gauges.items()):
            points[signal].append(Point(labels, value))

    def _introduce(self, points: dict[Signal, list[Point]], info: EngineInfo, labels: tuple[str, ...]) -> None:
        """Add the info metrics: versions, start and configuration."""
        pages = self.engine.all()
        native = str(all(page.process.is_native for page in pages)).lower()
        points[signals.BUILD_INFO] = [Point((*labels, info.kvobs_version, info.vllm_version, native), 1)]
        began_ns = self.engine.head.began_ns if self.engine.head is not None else 0
        # VictoriaMetrics rounds more digits in one block and not in another: rules compare start times with each other.
        points[signals.START_TIME] = [Point(labels, round(began_ns * signals.START_TIME.unit, 3))]
        policies = info.load_policy, info.failure_policy
        points[signals.CONNECTOR_INFO] = [
            Point((*labels, connector.name, str(i), connector.class_name, connector.role, *policies), 1)
            for i, connector in enumerate(info.connectors)
        ]
        points[signals.LINK_SPEED] = [
            Point((*labels, connector.name), connector.link_gbps * 1e9 / 8)
            for connector in info.connectors
            if connector.link_gbps is not None
        ]

    def _observe(self, points: dict[Signal, list[Point]], labels: tuple[str, ...], watch: EngineWatch) -> None:
        """Add the calls in progress, and the engine's end."""
        now_ns, ages = perf_counter_ns(), dict[tuple[str, ...], float]()
        for call in watch.calls():  # the oldest first
            rank = SCHEDULER if call.rank is None else str(call.rank)
            values = (*labels, call.connector, hook_label(call.hook), rank)
            ages.setdefault(values, (now_ns - call.since_ns) * signals.CALL_IN_PROGRESS.unit)
        points[signals.CALL_IN_PROGRESS] = [Point(values, age) for values, age in ages.items()]
        ended = watch.end
        if (end := ended or watch.previous) is not None:
            values = (end.connector, hook_label(end.hook) if end.hook else "", end.reason)
            points[signals.ENGINE_ENDED] = [Point((*labels, *values), 1 if ended else 2)]


class TotalsCollector(Collector):
    """Hands the series of several engines to a registry of prometheus_client; ``engines`` returns them when asked."""

    def __init__(self, engines: Callable[[], Iterable[Totals]], metrics: Sequence[Signal] = SIGNALS) -> None:
        self._engines = engines
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Yield each metric without series: the registry refuses their names to others."""
        return (_family(signal, ()) for signal in self._metrics)

    def collect(self) -> Iterable[Metric]:
        """Return each metric with the series of all engines; without series where that fails.

        An exception would take vLLM's own metrics from its API server.
        """
        return self._read() or self.describe()

    @faults.contained("read")
    def _read(self) -> list[Metric]:
        engines = [dict(totals.series()) for totals in self._engines()]
        return [_family(signal, chain.from_iterable(points[signal] for points in engines)) for signal in self._metrics]


class Exposition:
    """The text of /metrics."""

    def __init__(
        self,
        engines: Callable[[], Iterable[Totals]],
        refresh: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._refresh = refresh
        self._clock = clock
        self._registry = CollectorRegistry()
        self._registry.register(TotalsCollector(engines))
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
