"""What is sent by OTLP is what is scraped: the same series, totals or differences, exemplars and buckets."""

import threading
import time
from itertools import chain
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http
from opentelemetry.sdk.metrics import Counter, Histogram
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExporter, MetricExportResult, MetricsData

from kvobs import faults
from kvobs.export.otlp_metrics import INTERVAL, MetricsPush, interval_s, make_metric_exporter
from kvobs.export.totals import Totals
from kvobs.schema import signals, spans
from kvobs.schema.signals import LOAD_DURATION, LOOKUPS, Kind, labelnames, slot, word
from tests.support.contexts import no_otel_variables, record
from tests.support.written import Numbers, Pages, numbers, stopped_clock

DELTA, CUMULATIVE = AggregationTemporality.DELTA, AggregationTemporality.CUMULATIVE
HIT = word(0, slot(LOOKUPS, "hit"))
OLDEST = word(0, slot(signals.OLDEST_IN_FLIGHT, "load"))
Sent = dict[tuple[str, tuple[tuple[str, Any], ...]], tuple[float, tuple[int, ...]]]


class Kept(MetricExporter):
    """Keeps what is sent, or does not take it."""

    def __init__(self, temporality: AggregationTemporality = CUMULATIVE) -> None:
        super().__init__({Counter: temporality, Histogram: temporality})
        self.sent: list[MetricsData] = []
        self.takes = True
        self.is_sent = threading.Event()
        self.is_shut = threading.Event()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **kwargs: Any) -> MetricExportResult:
        encode_metrics(metrics_data)  # what can't be encoded would be lost
        if self.takes:
            self.sent.append(metrics_data)
            self.is_sent.set()
        return MetricExportResult.SUCCESS if self.takes else MetricExportResult.FAILURE

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **kwargs: Any) -> None:
        self.is_shut.set()

    def points(self, of: int = -1) -> Sent:
        found: Sent = {}
        for resource in self.sent[of].resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        value = float(point.sum if hasattr(point, "sum") else point.value)
                        key = (metric.name, tuple(sorted((point.attributes or {}).items())))
                        found[key] = (value, tuple(getattr(point, "bucket_counts", ())))
        return found


def push(totals: Totals, exporter: MetricExporter) -> MetricsPush:
    return MetricsPush(totals.series, 5, exporter)


def scraped(totals: Totals) -> Sent:
    return {
        (s.name, tuple(sorted(zip(labelnames(s), p.labels, strict=True)))): (float(p.value), tuple(p.buckets))
        for s, points in totals.series()
        for p in points
    }


@given(st.lists(numbers(), max_size=3))
@settings(max_examples=30, deadline=None)
@stopped_clock()
def test_totals_are_those_of_a_scrape(parts: list[Numbers]) -> None:
    pages, kept = Pages(None, 0), Kept()
    totals = pages.totals()
    pushing = push(totals, kept)
    for i, part in enumerate(parts):
        part.add_to(pages.writers[i % 2])
        pushing.send()
        assert kept.points() == scraped(totals)


@given(st.lists(st.tuples(numbers(), st.booleans()), max_size=4))
@settings(max_examples=30, deadline=None)
def test_differences_add_up_to_the_totals_whatever_is_not_taken(parts: list[tuple[Numbers, bool]]) -> None:
    pages, kept = Pages(None, 0), Kept(DELTA)
    totals = pages.totals()
    pushing = push(totals, kept)
    for i, (part, takes) in enumerate([*parts, (Numbers({}, {}, {}), True)]):
        part.add_to(pages.writers[i % 2])
        kept.takes = takes
        pushing.send()
    sums: Sent = {}
    for i in range(len(kept.sent)):
        for key, (value, buckets) in kept.points(i).items():
            old, counts = sums.get(key, (0.0, (0,) * len(buckets)))
            sums[key] = (old + value, tuple(a + b for a, b in zip(counts, buckets, strict=True)))
    gauges = {s.name for s in signals.SIGNALS if s.kind is Kind.GAUGE}
    for key, (value, buckets) in scraped(totals).items():
        if key[0] not in gauges:
            assert sums[key][1] == buckets
            assert sums[key][0] == pytest.approx(value, rel=1e-9)


def test_kinds_units_buckets_and_times_are_those_of_the_table() -> None:
    pages, kept = Pages(), Kept()
    for at in (HIT, word(0, slot(LOAD_DURATION, "async"))):
        pages.add(at)
    pages.add(word(0, slot(signals.LOAD_BYTES)), 8)
    push(pages.totals(), kept).send()
    (resource,) = kept.sent[0].resource_metrics
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    assert scope.scope.name == "kvobs"
    assert {name: metrics[name].unit for name in ("kvobs_load_duration_seconds", "kvobs_load_bytes_total")} == {
        "kvobs_load_duration_seconds": "s",
        "kvobs_load_bytes_total": "By",
    }
    assert metrics["kvobs_lookups_total"].unit == ""
    assert metrics["kvobs_lookups_total"].data.is_monotonic  # type: ignore[union-attr]
    (point,) = metrics["kvobs_load_duration_seconds"].data.data_points
    assert list(point.explicit_bounds) == LOAD_DURATION.buckets  # type: ignore[union-attr]
    assert point.start_time_unix_nano == 5 < point.time_unix_nano
    assert set(metrics) <= {signal.name for signal in signals.SIGNALS}


def test_no_metric_without_series_is_sent_and_an_idle_age_is_0() -> None:
    """In OTLP a metric without points has no kind, and a gauge that is left out keeps its last value."""
    pages, kept = Pages(), Kept()
    totals = pages.totals()
    for begun, ages in ((None, []), (time.perf_counter_ns() - 10**10, [10]), (0, [0])):
        if begun is not None:
            pages.writers[0].set_gauge(OLDEST, begun)
        push(totals, kept).send()
        metrics = [m for r in kept.sent[-1].resource_metrics for s in r.scope_metrics for m in s.metrics]
        assert all(metric.data.data_points for metric in metrics)
        points = [metric.data.data_points for metric in metrics if metric.name == signals.OLDEST_IN_FLIGHT.name]
        values: list[Any] = [*chain(*points)]
        assert [point.value for point in values] == pytest.approx(ages, abs=5)
        assert {point.start_time_unix_nano for point in values} <= {0}


def hits(kept: Kept, of: int = -1) -> list[tuple[float, int, int]]:
    """Return value, begin and end of the points of the counter of lookups."""
    (resource,) = kept.sent[of].resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    points: Any = metrics["kvobs_lookups_total"].data.data_points
    return [(point.value, point.start_time_unix_nano, point.time_unix_nano) for point in points]


def test_the_first_difference_is_that_to_the_begin_of_the_engine() -> None:
    """Of an exporter that is started by hand, after hours."""
    pages, kept = Pages(), Kept(DELTA)
    pushing = push(pages.totals(), kept)
    pages.add(HIT, 100)
    pushing.send()
    pages.add(HIT, 1)
    pushing.send()
    ((first, began, until),), ((second, since, _),) = hits(kept, 0), hits(kept, 1)
    assert (first, second, began) == (100, 1, 5)
    assert since == until > began


def test_after_a_restart_differences_start_with_the_totals() -> None:
    pages, kept = Pages(), Kept(DELTA)
    pushing, before_ns = push(pages.totals(), kept), time.time_ns()
    pages.add(HIT, 100)
    pushing.take_as_sent()
    pages.add(HIT, 2)
    pushing.send()
    ((value, since_ns, _),) = hits(kept)
    assert value == 2
    assert since_ns >= before_ns


def test_an_exemplar_is_sent_once_where_differences_are() -> None:
    pages, kept = Pages(), Kept(DELTA)
    totals = pages.totals()
    pushing = push(totals, kept)
    first = word(0, slot(LOAD_DURATION, "async"))
    one = record(observed_ns=2_000_000, attributes={spans.CONNECTOR: "one", spans.MODE: "async"})
    for is_marked in (True, False):
        pages.add(first + LOAD_DURATION.bucket(2_000_000))
        if is_marked:
            totals.mark(one, 5.0)
        pushing.send()
    found = []
    for data in kept.sent:
        metrics = {m.name: m for m in data.resource_metrics[0].scope_metrics[0].metrics}
        found.append([e for p in metrics[LOAD_DURATION.name].data.data_points for e in p.exemplars])
    assert [len(exemplars) for exemplars in found] == [1, 0]
    assert found[0][0].trace_id == int(one.trace_id, 16)
    assert (found[0][0].value, found[0][0].time_unix_nano) == (0.002, 5 * 10**9)


def test_the_last_numbers_are_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    pages, kept = Pages(), Kept()
    pushing = push(pages.totals(), kept)
    pushing.start()
    pages.add(HIT, 3)
    pushing.close()
    assert kept.is_shut.is_set()
    assert [value for value, _, _ in hits(kept)] == [3]


def test_a_receiver_that_raises_is_an_exporters_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    contained: list[str] = []
    monkeypatch.setattr(faults, "contain", contained.append)
    kept = Kept()
    monkeypatch.setattr(kept, "export", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(kept, "shutdown", lambda *_, **__: 1 / 0)
    pushing = push(Pages().totals(), kept)
    pushing.start()
    pushing.close()
    assert contained == ["export", "export"]


@pytest.mark.parametrize(
    ("value", "seconds"), [("", 60), ("5000", 5), ("0.5", 0.0005), ("-1", 60), ("x", 60), ("inf", 60)]
)
def test_the_interval_is_that_of_the_environment(value: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch, **{INTERVAL: value})
    assert interval_s() == seconds


def test_protocol_and_temporality_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE="delta")
    exporter = make_metric_exporter()
    assert isinstance(exporter, Grpc)
    assert (exporter._preferred_temporality or {})[Histogram] is DELTA
    exporter.shutdown()
    no_otel_variables(
        monkeypatch, OTEL_EXPORTER_OTLP_PROTOCOL="grpc", OTEL_EXPORTER_OTLP_METRICS_PROTOCOL="http/protobuf"
    )
    assert isinstance(make_metric_exporter(), Http)
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_PROTOCOL="smoke")
    with pytest.raises(ValueError, match="'smoke', allowed: 'grpc', 'http/protobuf'"):
        make_metric_exporter()
