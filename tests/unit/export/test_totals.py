"""The totals of an engine: what is added is there and published, and nothing that is not this engine's."""

import math
import time
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from kvobs.export.engine_watch import End
from kvobs.export.totals import FRESH_S, Exposition, Point, Totals
from kvobs.probe.black_box import Call
from kvobs.probe.increments import Increments
from kvobs.schema import signals, spans
from kvobs.schema.signals import LOAD_DURATION, SERIES_AT_MOST, SIGNALS, Kind, Scope, Signal, labelnames, place, slot
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.wire import ConnectorInfo
from tests.support.contexts import record
from tests.support.payloads import CONNECTORS, engine, numbers, stopped_clock

HIT = slot(signals.LOOKUPS, "hit")
TWO_MS = 2_000_000


def points(totals: Totals, signal: Signal) -> list[Point]:
    return dict(totals.series())[signal]


def value(totals: Totals, signal: Signal, *labels: str) -> float | None:
    found = [point.value for point in points(totals, signal) if point.labels == ("tiny", "0", *labels)]
    assert len(found) <= 1
    return found[0] if found else None


def added(parts: Iterable[Increments]) -> Totals:
    totals = Totals(engine())
    for part in parts:
        totals.add(part)
    return totals


@given(st.lists(numbers(), max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_payloads_does_not_matter_but_for_gauges(parts: list[Increments], random: object) -> None:
    parts = [part._replace(gauges={}) for part in parts]
    shuffled = list(parts)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = ({s: sorted(p) for s, p in added(some).series()} for some in (parts, shuffled))
    assert one == other


def test_each_metric_has_its_labels_and_its_place() -> None:
    totals = added(
        [Increments({place(0, HIT): 2, place(1, HIT): 3, slot(signals.SELF_SECONDS, "flush"): 5 * 10**8}, [], {})]
    )
    assert value(totals, signals.LOOKUPS, "one", "hit") == 2
    assert value(totals, signals.LOOKUPS, "two", "hit") == 3
    assert value(totals, signals.SELF_SECONDS, "flush") == 0.5
    assert [signal for signal, _ in totals.series()] == list(SIGNALS)
    for signal, found in totals.series():
        assert {len(point.labels) for point in found} <= {len(labelnames(signal))}


ERROR, IN_FLIGHT = "kvobs_call_errors_total", slot(signals.IN_FLIGHT, "load")


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": {place(2, HIT): 1}},
        {"counts": {-1: 1}},
        {"counts": {place(0, IN_FLIGHT): 1}},
        {"gauges": {place(2, IN_FLIGHT): 1}},
        {"gauges": {place(0, HIT): 7}},
        {"opened": [[ERROR, 2, "a", "b", 1]]},
        {"opened": [[ERROR, -1, "a", "b", 1]]},
        {"opened": [[ERROR, 0, "a", "b", -1]]},
        {"opened": [[ERROR, 0, "a", 1]]},
        {"opened": [["unknown", 0, 1]]},
        {"opened": [["kvobs_lookups_total", 0, "hit", 1]]},
        {"opened": [["kvobs_connector_info", 0, *"abcde", 1]]},
        {"opened": [["kvobs_engine_ended", 0, "one", "wait_for_save", "SIGKILL", 1]]},
    ],
    ids=str,
)
def test_numbers_of_no_series_of_this_engine_are_refused_with_all_that_came_with_them(wrong: dict[str, Any]) -> None:
    totals = added([Increments({place(0, HIT): 1}, [[ERROR, 0, "a", "b", 1]], {place(0, IN_FLIGHT): 2})])
    before = list(totals.series())
    right = Increments({place(0, HIT): 4}, [[ERROR, 0, "a", "b", 1]], {place(0, IN_FLIGHT): 3})
    counts, gauges = right.counts | wrong.get("counts", {}), right.gauges | wrong.get("gauges", {})
    with pytest.raises(ValueError, match="of no connector of one, two|gauge|no series has the row"):
        totals.add(Increments(counts, [*right.opened, *wrong.get("opened", [])], gauges))
    assert list(totals.series()) == before


def test_open_series_are_limited() -> None:
    rows = [["kvobs_call_errors_total", 0, "save_kv_layer", f"E{i}", 1] for i in range(SERIES_AT_MOST + 9)]
    totals = added(
        [Increments({}, rows, {}), Increments({}, [["kvobs_call_errors_total", 1, "h", "E", 1], rows[0]], {})]
    )
    found = points(totals, signals.CALL_ERRORS)
    assert len(found) == SERIES_AT_MOST + 2
    assert value(totals, signals.CALL_ERRORS, "one", "_OTHER", "_OTHER") == 9
    assert value(totals, signals.CALL_ERRORS, "one", "save_kv_layer", "E0") == 2
    assert value(totals, signals.CALL_ERRORS, "two", "h", "E") == 1


def test_a_gauge_has_its_last_value_and_an_age_grows_until_there_is_none() -> None:
    load, oldest = slot(signals.IN_FLIGHT, "load"), slot(signals.OLDEST_IN_FLIGHT, "load")
    totals = added(
        [Increments({}, [], {place(0, load): 2, place(0, oldest): 5 * 10**9}), Increments({}, [], {place(0, load): 1})]
    )
    assert value(totals, signals.IN_FLIGHT, "one", "load") == 1
    for now_s in (6, 66):
        with stopped_clock(now_s * 10**9):
            assert value(totals, signals.OLDEST_IN_FLIGHT, "one", "load") == pytest.approx(now_s - 5)
    totals.add(Increments({}, [], {place(0, oldest): 0}))
    assert value(totals, signals.OLDEST_IN_FLIGHT, "one", "load") == 0


@pytest.mark.parametrize(("halted_s", "age_s"), [(0, 61), (3, 61), (60, 6)])
def test_an_age_begins_again_after_a_process_of_the_engine_was_stopped(halted_s: int, age_s: int) -> None:
    watch: Any = SimpleNamespace(calls=list, end=None, previous=None, halted_ns=halted_s * 10**9)
    totals = Totals(engine(), watch)
    totals.add(Increments({}, [], {place(0, slot(signals.OLDEST_IN_FLIGHT, "load")): 5 * 10**9}))
    with stopped_clock(66 * 10**9):
        assert value(totals, signals.OLDEST_IN_FLIGHT, "one", "load") == pytest.approx(age_s)


def test_a_span_marks_the_bucket_of_its_duration() -> None:
    totals = Totals(engine())
    attributes = {spans.CONNECTOR: "one", spans.MODE: "async", spans.OUTCOME: "ok"}
    load = record(name="kv.load", observed_ns=TWO_MS, attributes=attributes)
    totals.mark(load, 12.0)
    assert points(totals, signals.LOAD_DURATION) == [], "an exemplar alone is no series"
    first = place(0, slot(signals.LOAD_DURATION, "async"))
    bucket = signals.LOAD_DURATION.bucket(TWO_MS)
    totals.add(Increments({first + bucket: 1, first + signals.LOAD_DURATION.sum_offset: TWO_MS}, [], {}))
    (point,) = points(totals, signals.LOAD_DURATION)
    assert dict(point.marks) == {bucket: (TWO_MS * 1e-9, 12.0, load.trace_id, load.span_id)}
    assert point.value == TWO_MS * 1e-9
    assert sum(point.buckets) == point.buckets[bucket] == 1
    totals.mark(load._replace(attributes={**load.attributes, spans.CONNECTOR: "nobody"}), 13.0)
    totals.mark(load._replace(observed_ns=0), 13.0)
    assert points(totals, signals.LOAD_DURATION) == [point]


def test_the_engine_and_its_connectors_are_there_from_the_start() -> None:
    """Also kvobs_start_time_seconds and kvobs_link_bytes_per_second."""
    totals = Totals(engine(index=2))
    found = points(totals, signals.CONNECTOR_INFO)
    assert [point.labels for point in found] == [
        ("tiny", "2", name, str(i), "MeteredConnector", "kv_both", "first", "recompute")
        for i, name in enumerate(CONNECTORS)
    ]
    assert [point.value for point in points(totals, signals.BUILD_INFO)] == [1]
    assert points(totals, signals.START_TIME) == [Point(("tiny", "2"), 1e-9)]
    assert points(totals, signals.LINK_SPEED) == []
    connectors = (ConnectorInfo("one", "C", "kv_both", link_gbps=400), ConnectorInfo("two", "C", "kv_both"))
    assert points(Totals(engine(connectors=connectors)), signals.LINK_SPEED) == [Point(("tiny", "0", "one"), 50e9)]


def test_the_exporters_own_gauges_are_set_there() -> None:
    totals = Totals(engine())
    totals.set_exporter_gauge(signals.ENGINE_UP, 1)
    assert value(totals, signals.ENGINE_UP) == 1
    totals.add(Increments.none())
    assert {s for s, found in totals.series() if s.scope is Scope.EXPORTER and found} == {signals.ENGINE_UP}


def test_calls_in_progress_and_the_end_are_those_that_the_watch_sees() -> None:
    """kvobs_call_in_progress_seconds has the oldest of those with the same labels, kvobs_engine_ended no rank."""
    now, hook = perf_counter_ns(), "get_num_new_matched_tokens"
    calls = [
        Call("remote", "wait_for_save", 1, now - 9 * 10**9),
        Call("remote", hook, None, now - 7 * 10**9),
        Call("remote", hook, None, now - 5 * 10**9),
        Call("cpu", "register_kv_caches", 0, now - 3 * 10**9),
    ]
    watch: Any = SimpleNamespace(calls=lambda: calls, end=None, previous=None, halted_ns=0)
    totals = Totals(engine(), watch)
    ages = {point.labels: point.value for point in points(totals, signals.CALL_IN_PROGRESS)}
    assert ages == {
        ("tiny", "0", "remote", "wait_for_save", "1"): pytest.approx(9, abs=1),
        ("tiny", "0", "remote", hook, "scheduler"): pytest.approx(7, abs=1),
        ("tiny", "0", "cpu", signals.OTHER, "0"): pytest.approx(3, abs=1),
    }
    assert points(totals, signals.ENGINE_ENDED) == []
    calls.clear()
    watch.end = End("remote", "wait_for_save", 1, "SIGKILL")
    assert points(totals, signals.CALL_IN_PROGRESS) == []
    assert points(totals, signals.ENGINE_ENDED) == [Point(("tiny", "0", "remote", "wait_for_save", "SIGKILL"), 1)]
    watch.previous = watch.end
    watch.end = End("", "", None, "exit 1")
    assert points(totals, signals.ENGINE_ENDED) == [Point(("tiny", "0", "", "", "exit 1"), 1)]
    watch.end = None
    assert points(totals, signals.ENGINE_ENDED) == [Point(("tiny", "0", "remote", "wait_for_save", "SIGKILL"), 2)]


OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"


def exposition(totals: Totals, clock: Callable[[], float] = time.monotonic) -> Exposition:
    return Exposition(totals, lambda: None, clock)


def samples(totals: Totals) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = plain(exposition(totals).text("")[1].decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@given(st.lists(numbers(), max_size=4), st.integers(1, 10**6))
@settings(max_examples=40, deadline=None)
@stopped_clock()
def test_totals_of_any_size_are_the_same_after_every_hop(parts: list[Increments], times: int) -> None:
    """Two ranks' payloads, merged; by msgpack, as to an API server; and, added up, by a line to an exporter."""
    children, expected, sent = dict.fromkeys(CONNECTORS, "m:C"), Totals(engine()), Increments.none()
    for part in parts:
        many = part._replace(counts={slot: n * times for slot, n in part.counts.items()})
        merged = KvobsStats.of(children, many).aggregate(KvobsStats.of(children, part._replace(gauges={})))
        arrived = KvobsStats(data=msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict())))
        sent.add(arrived.increments())
        expected.add(many)
        expected.add(part)
    totals = Totals(engine())
    totals.add(wire.read(wire.from_line(wire.to_line(wire.message(sent)))))
    assert sent.counts == sum_of(parts, times + 1)
    assert samples(totals) == pytest.approx(samples(expected), rel=0)


def sum_of(parts: list[Increments], times: int) -> dict[int, int]:
    return {slot: sum(part.counts.get(slot, 0) for part in parts) * times for part in parts for slot in part.counts}


def loaded() -> Totals:
    totals = Totals(engine())
    first = place(0, slot(LOAD_DURATION, "async"))
    totals.add(
        Increments({first + LOAD_DURATION.bucket(2_000_000): 3, first + LOAD_DURATION.sum_offset: 6_000_000}, [], {})
    )
    attributes: dict[str, spans.Value] = {spans.CONNECTOR: "one", spans.MODE: "async"}
    totals.mark(record(name="kv.load", observed_ns=2_000_000, attributes=attributes), 5.0)
    return totals


def test_openmetrics_has_exemplars_at_the_same_path() -> None:
    content_type, text = exposition(loaded()).text(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families: Any = open_metrics(text.decode())  # type: ignore[no-untyped-call]
    marked = [s for f in families for s in f.samples if s.exemplar is not None]
    assert [s.labels["le"] for s in marked] == ["0.00232267"]
    assert marked[0].exemplar.labels == {"trace_id": record().trace_id}
    assert marked[0].exemplar.value == 0.002
    content_type, text = exposition(loaded()).text("text/plain")
    assert content_type.startswith("text/plain")
    assert not [s for f in plain(text.decode()) for s in f.samples if s.exemplar is not None]


def test_every_metric_of_the_table_is_announced() -> None:
    _, text = exposition(Totals(engine())).text("")
    kinds = {family.name: family.type for family in plain(text.decode())}
    for signal in signals.SIGNALS:
        name = signal.name.removesuffix("_total") if signal.kind is Kind.COUNTER else signal.name
        assert kinds[name] == signal.kind.value


def test_scrapes_at_the_same_time_get_the_same_text() -> None:
    now, totals = 0.0, loaded()
    page = exposition(totals, lambda: now)
    before = page.text("")
    totals.add(Increments({place(1, slot(signals.LOOKUPS, "hit")): 1}, [], {}))
    assert page.text("") == before
    assert page.text(OPENMETRICS) != before
    assert page.text("text/plain; version=x")[0] == before[0], "as without a wish"
    now += FRESH_S
    assert page.text("") != before


def test_nothing_is_infinite_but_the_last_bucket() -> None:
    _, text = exposition(loaded()).text("")
    assert all(math.isfinite(s.value) for f in plain(text.decode()) for s in f.samples)
