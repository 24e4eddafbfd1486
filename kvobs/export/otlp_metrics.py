"""Send the metrics by OTLP, with OpenTelemetry's exporter: every minute, or as set by OTEL_METRIC_EXPORT_INTERVAL.

Histograms have the explicit buckets of the table of metrics. Endpoint, protocol, headers, timeout, compression and
temporality come from the standard OTEL_EXPORTER_OTLP_* variables.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from threading import Event, Thread
from typing import Any

from opentelemetry.sdk.metrics import Counter, Exemplar, Histogram
from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvobs import faults
from kvobs.export.totals import Point, TracedValue
from kvobs.log import once
from kvobs.schema import __version__, spans
from kvobs.schema.signals import Kind, Signal, labelnames
from kvobs.telemetry.tracing.trace_context import otlp_protocol

INTERVAL, _INTERVAL_MS = "OTEL_METRIC_EXPORT_INTERVAL", 60_000.0
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CLOSING_S = 3.0
_CLASSES = {Kind.COUNTER: Counter, Kind.HISTOGRAM: Histogram}
_Known = dict[tuple[Signal, tuple[str, ...]], Point]
Series = Callable[[], Iterable[tuple[Signal, list[Point]]]]


class MetricsPush:
    """Sends the metrics at intervals, from a thread.

    ``series`` returns each metric with its series. They began at ``began_ns``, since the epoch. By default ``exporter``
    is the one that the environment asks for.
    """

    def __init__(self, series: Series, began_ns: int, exporter: otlp.MetricExporter | None = None) -> None:
        self._series = series
        self._exporter = exporter if exporter is not None else make_metric_exporter()
        self._resource = Resource.create({})
        self._scope = InstrumentationScope(spans.SCOPE, __version__)
        self._began_ns = began_ns
        self._sent_ns = began_ns
        self._sent: _Known = {}  # what the receiver has, where it gets differences
        self._is_over = Event()
        self._thread = Thread(target=self._run, name="kvobs-otlp-metrics", daemon=True)

    def take_as_sent(self) -> None:
        """Start deltas from the current totals; a previous exporter has probably sent them."""
        self._sent = {(s, point.labels): point for s, points in self._series() for point in points}
        self._sent_ns = time.time_ns()

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def close(self) -> None:
        """Send the rest, for a few seconds at most."""
        self._is_over.set()
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        send, shutdown = map(faults.contained("export"), (self.send, self._exporter.shutdown))
        while not self._is_over.wait(interval_s()):
            send()
        send()
        shutdown()

    def send(self) -> None:
        """Send all metrics once; numbers that the receiver did not take are part of the next delta."""
        now_ns = time.time_ns()
        current: _Known = {}
        metrics = [
            otlp.Metric(signal.name, signal.help, _unit(signal), data)
            for signal, points in self._series()
            if (data := self._data(signal, points, now_ns, current)).data_points  # without any it would have no kind
        ]
        scope = otlp.ScopeMetrics(self._scope, metrics, "")
        data = otlp.MetricsData([otlp.ResourceMetrics(self._resource, [scope], "")])
        if self._exporter.export(data) is otlp.MetricExportResult.SUCCESS:
            self._sent, self._sent_ns = current, now_ns
            return
        text = (
            "the metrics can't be sent by OTLP; retrying every %g s. The exporter's log has the reason. No total is "
            "lost"
        )
        once("otlp-metrics", logging.ERROR, text, interval_s())

    def _data(self, signal: Signal, points: list[Point], now_ns: int, current: _Known) -> Any:
        if signal.kind is Kind.GAUGE:
            gauges = [otlp.NumberDataPoint(_attributes(signal, point), 0, now_ns, point.value) for point in points]
            return otlp.Gauge(gauges)
        cumulative, preferred = otlp.AggregationTemporality.CUMULATIVE, self._exporter._preferred_temporality or {}
        temporality = preferred.get(_CLASSES[signal.kind], cumulative)
        is_delta = temporality is otlp.AggregationTemporality.DELTA
        begin_ns = self._sent_ns if is_delta else self._began_ns
        rows = []
        for point in points:
            current[signal, point.labels] = point
            shown = _difference(point, self._sent.get((signal, point.labels))) if is_delta else point
            rows.append(_row(signal, shown, begin_ns, now_ns))
        if signal.kind is Kind.COUNTER:
            return otlp.Sum(rows, temporality, is_monotonic=True)
        return otlp.Histogram(rows, temporality)


def interval_s() -> float:
    """Return the time between two sendings; the default unless the variable is a positive number."""
    try:
        ms = float(os.environ.get(INTERVAL) or _INTERVAL_MS)
    except ValueError:
        ms = _INTERVAL_MS
    return (ms if 0 < ms < math.inf else _INTERVAL_MS) / 1000


def make_metric_exporter() -> otlp.MetricExporter:
    """Return OpenTelemetry's exporter of metrics for the protocol of the environment.

    Raises:
        ValueError: the protocol is neither "grpc" nor "http/protobuf".
    """
    if otlp_protocol(*_PROTOCOLS) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http()


def _unit(signal: Signal) -> str:
    """Return the unit in UCUM; empty for plain numbers, to which Prometheus would else append a name."""
    units = {"_seconds": "s", "_bytes_per_second": "By/s", "_bytes": "By", "_tokens": "{token}"}
    return next((unit for part, unit in units.items() if part in signal.name), "")


def _attributes(signal: Signal, point: Point) -> dict[str, str]:
    return dict(zip(labelnames(signal), point.labels, strict=True))


def _difference(point: Point, before: Point | None) -> Point:
    if before is None:
        return point
    buckets = [n - old for n, old in zip(point.buckets, before.buckets, strict=True)]
    marks = {i: mark for i, mark in point.marks.items() if before.marks.get(i) is not mark}
    return Point(point.labels, point.value - before.value, buckets, marks)


def _row(signal: Signal, point: Point, begin_ns: int, now_ns: int) -> Any:
    attributes = _attributes(signal, point)
    if signal.kind is Kind.COUNTER:
        return otlp.NumberDataPoint(attributes, begin_ns, now_ns, point.value)
    exemplars, counts = [_exemplar(mark) for mark in point.marks.values()], list(point.buckets)
    unknown: Any = None  # the smallest and the largest: OTLP leaves them out then
    content = (sum(counts), point.value, counts, signal.buckets, unknown, unknown, exemplars)
    return otlp.HistogramDataPoint(attributes, begin_ns, now_ns, *content)


def _exemplar(mark: TracedValue) -> Exemplar:
    trace_id, span_id = int(mark.trace_id, 16), int(mark.span_id, 16)
    return Exemplar({}, mark.value, int(mark.time_s * 1e9), span_id=span_id, trace_id=trace_id)
