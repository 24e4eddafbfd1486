"""The series of an engine: what its pages hold is published, and nothing that is not this engine's."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain

from kvobs import faults
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.totals import FRESH_S, Exposition, Point, Totals, TotalsCollector
from kvobs.page import files
from kvobs.page.description import ConnectorInfo, End
from kvobs.page.layout import HEAD, MAGIC, VERSION
from kvobs.page.reader import Call
from kvobs.schema import signals, spans
from kvobs.schema.signals import LOAD_DURATION, SIGNALS, Kind, Scope, Signal, labelnames, slot, word
from tests.support.contexts import record
from tests.support.waiting import eventually
from tests.support.watched import process
from tests.support.written import CONNECTORS, Numbers, Pages, numbers, stopped_clock

HIT = slot(signals.LOOKUPS, "hit")
TWO_MS = 2_000_000


def points(totals: Totals, signal: Signal) -> list[Point]:
    return dict(totals.series())[signal]


def value(totals: Totals, signal: Signal, *labels: str) -> float | None:
    found = [point.value for point in points(totals, signal) if point.labels == ("tiny", "0", *labels)]
    assert len(found) <= 1
    return found[0] if found else None


def test_each_metric_has_its_labels_and_its_place() -> None:
    pages = Pages(None, 0)
    pages.add(word(0, HIT), 2)
    pages.add(word(1, HIT), 3, writer=1)
    pages.add(slot(signals.GC_PAUSES, "worker"), 5 * 10**8, writer=1)
    totals = pages.totals()
    assert value(totals, signals.LOOKUPS, "one", "hit") == 2
    assert value(totals, signals.LOOKUPS, "two", "hit") == 3
    assert value(totals, signals.GC_PAUSES, "worker") == 0.5
    assert [signal for signal, _ in totals.series()] == list(SIGNALS)
    for signal, found in totals.series():
        assert {len(point.labels) for point in found} <= {len(labelnames(signal))}


def test_before_the_first_page_every_metric_is_without_series() -> None:
    pages = Pages()
    pages.writers[0].close()
    assert [(signal, list(found)) for signal, found in pages.totals().series()] == [(each, []) for each in SIGNALS]


def test_a_model_has_the_name_that_the_api_server_gives_it() -> None:
    totals = Pages(index=3).totals(model="another")
    assert {point.labels[:2] for _, found in totals.series() for point in found} == {("another", "3")}


def test_open_series_have_their_labels() -> None:
    pages = Pages(None, 0)
    for page in pages.writers:
        page.rows.add(signals.CALL_ERRORS, 0, ("save_kv_layer", "OSError"), 1)
    pages.writers[1].rows.add(signals.PEER_LOAD_SECONDS, 1, ("host:1",), 10**9)
    totals = pages.totals()
    assert points(totals, signals.CALL_ERRORS) == [Point(("tiny", "0", "one", "save_kv_layer", "OSError"), 2)]
    assert value(totals, signals.PEER_LOAD_SECONDS, "two", "host:1") == 1


def test_a_gauge_has_its_last_value_and_an_age_grows_until_unset() -> None:
    load, oldest = (word(0, slot(signal, "load")) for signal in (signals.IN_FLIGHT, signals.OLDEST_IN_FLIGHT))
    pages = Pages(None, 0)
    page, totals = pages.writers[0], pages.totals()
    assert points(totals, signals.IN_FLIGHT) == [], "a gauge that was never set is none"
    for n in (2, 1, 0):
        page.set_gauge(load, n)
        page.set_gauge(oldest, 5 * 10**9 * bool(n))
        assert value(totals, signals.IN_FLIGHT, "one", "load") == n
        for now_s in (6, 66):
            with stopped_clock(now_s * 10**9):
                age = value(totals, signals.OLDEST_IN_FLIGHT, "one", "load")
                assert age == (pytest.approx(now_s - 5) if n else 0)


@pytest.mark.parametrize(("halted_s", "age_s"), [(0, 61), (3, 61), (60, 6)])
def test_an_age_restarts_after_a_process_of_the_engine_stopped(halted_s: int, age_s: int) -> None:
    watch: Any = SimpleNamespace(calls=list, end=None, previous=None, halted_ns=halted_s * 10**9)
    pages = Pages()
    pages.writers[0].set_gauge(word(0, slot(signals.OLDEST_IN_FLIGHT, "load")), 5 * 10**9)
    with stopped_clock(66 * 10**9):
        assert value(pages.totals(watch=watch), signals.OLDEST_IN_FLIGHT, "one", "load") == pytest.approx(age_s)


@pytest.mark.parametrize("fault", ["hangs", "holds the GIL"])
def test_numbers_are_right_and_ages_grow_while_the_engine_hangs(fault: str) -> None:
    """Also of the call before the one that hangs, and without a turn of its GIL."""
    pages = Pages(0, connectors=(ConnectorInfo("cpu"), ConnectorInfo("remote")))
    pages.writers[0].set_gauge(word(1, slot(signals.OLDEST_IN_FLIGHT, "load")), perf_counter_ns() - 900 * 10**9)
    ages = list[tuple[float, float, float]]()  # when it was asked, the age, and when there was an answer
    with process(pages.engine_id, None, fault):
        engine = pages.engine()
        totals = Totals(engine, EngineWatch(engine))
        assert eventually(lambda: points(totals, signals.CALL_IN_PROGRESS))
        calls = {p.labels[2]: sum(p.buckets) for p in points(totals, signals.CALL_DURATION) if sum(p.buckets)}
        for signal in (signals.CALL_IN_PROGRESS, signals.OLDEST_IN_FLIGHT) * 2:
            ages.append((time.monotonic(), points(totals, signal)[0].value, time.monotonic()))
    assert calls == {"cpu": 1}
    assert 1 <= ages[0][1] < 900 < ages[1][1]
    for (first, young, then), (second, old, now) in zip(ages[:2], ages[2:], strict=True):
        assert second - then <= old - young <= now - first


def test_a_span_marks_the_bucket_of_its_duration() -> None:
    pages = Pages()
    totals = pages.totals()
    attributes = {spans.CONNECTOR: "one", spans.MODE: "async", spans.OUTCOME: "ok"}
    load = record(name="kv.load", observed_ns=TWO_MS, attributes=attributes)
    totals.mark(load, 12.0)
    assert points(totals, signals.LOAD_DURATION) == [], "an exemplar alone is no series"
    first = word(0, slot(signals.LOAD_DURATION, "async"))
    bucket = signals.LOAD_DURATION.bucket(TWO_MS)
    pages.add(first + bucket, 1)
    pages.add(first + signals.LOAD_DURATION.sum_offset, TWO_MS)
    (point,) = points(totals, signals.LOAD_DURATION)
    assert dict(point.marks) == {bucket: (TWO_MS * 1e-9, 12.0, load.trace_id, load.span_id)}
    assert point.value == TWO_MS * 1e-9
    assert sum(point.buckets) == point.buckets[bucket] == 1
    totals.mark(load._replace(attributes={**load.attributes, spans.CONNECTOR: "nobody"}), 13.0)
    totals.mark(load._replace(observed_ns=0), 13.0)
    assert points(totals, signals.LOAD_DURATION) == [point]


def test_the_engine_and_its_connectors_are_there_from_the_start() -> None:
    """Also kvobs_start_time_seconds and kvobs_link_bytes_per_second."""
    pages = Pages(None, 0, index=2)
    totals = pages.totals()
    found = points(totals, signals.CONNECTOR_INFO)
    assert [point.labels for point in found] == [
        ("tiny", "2", name, str(i), "MeteredConnector", "kv_both", "first", "recompute")
        for i, name in enumerate(CONNECTORS)
    ]
    (build,) = points(totals, signals.BUILD_INFO)
    assert (build.labels, build.value) == (("tiny", "2", "1", "0.32.0", "false"), 1)
    (start,) = points(totals, signals.START_TIME)
    assert start.labels == ("tiny", "2")
    assert start.value == pytest.approx(pages.writers[0].process.began_ns / 1e9, abs=0.001)
    assert points(totals, signals.LINK_SPEED) == []
    connectors = (ConnectorInfo("one", "C", "kv_both", link_gbps=400), ConnectorInfo("two", "C", "kv_both"))
    assert points(Pages(connectors=connectors).totals(), signals.LINK_SPEED) == [Point(("tiny", "0", "one"), 50e9)]


def test_the_exporters_own_gauges_are_set_there() -> None:
    totals = Pages().totals()
    totals.set_gauge(signals.ENGINE_UP, 1)
    assert value(totals, signals.ENGINE_UP) == 1
    assert {s for s, found in totals.series() if s.scope is Scope.EXPORTER and found} == {signals.ENGINE_UP}


def test_counts_of_this_process_are_added_to_the_engines() -> None:
    where = slot(signals.INTERNAL_ERRORS, "read")
    pages = Pages()
    pages.add(where, 2)
    totals = pages.totals(own={where: 3})
    assert value(totals, signals.INTERNAL_ERRORS, "read") == 5
    totals.count(where, 4)
    assert value(totals, signals.INTERNAL_ERRORS, "read") == 9
    assert totals.own == {where: 7}


def test_a_page_of_another_version_is_an_internal_error() -> None:
    pages = Pages()
    (files.folder() / f"{pages.name}rank0-1-1{files.SUFFIX}").write_bytes(HEAD.pack(MAGIC, VERSION ^ 1, 8) + bytes(99))
    totals = pages.totals()
    for _ in range(2):
        assert value(totals, signals.INTERNAL_ERRORS, "version") == 1


def test_calls_in_progress_and_the_end_are_as_the_watch_sees() -> None:
    """kvobs_call_in_progress_seconds has the oldest of those with the same labels, kvobs_engine_ended no rank."""
    now, hook = perf_counter_ns(), "get_num_new_matched_tokens"
    calls = [
        Call("remote", "wait_for_save", 1, now - 9 * 10**9),
        Call("remote", hook, None, now - 7 * 10**9),
        Call("remote", hook, None, now - 5 * 10**9),
        Call("cpu", "register_kv_caches", 0, now - 3 * 10**9),
    ]
    watch: Any = SimpleNamespace(calls=lambda: calls, end=None, previous=None, halted_ns=0)
    totals = Pages().totals(watch=watch)
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


def exposition(*totals: Totals, clock: Callable[[], float] = time.monotonic) -> Exposition:
    return Exposition(lambda: totals, lambda: None, clock)


def samples(*totals: Totals) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = plain(exposition(*totals).text("")[1].decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


@given(st.lists(numbers(at_most=2**60), max_size=3))
@settings(max_examples=20, deadline=None)
@stopped_clock()
def test_a_scrape_has_the_sums_of_all_processes(parts: list[Numbers]) -> None:
    """Each sample is its word, or the sum of them, in Prometheus's unit; buckets are cumulative."""
    pages = Pages(None, *range(len(parts)))
    for part, page in zip(parts, pages.writers[1:], strict=True):
        part.add_to(page)
    totals = pages.totals()
    found, counts = samples(totals), totals.engine.counts()
    for scope in (Scope.PROCESS, Scope.CONNECTOR):
        for index, name in enumerate(CONNECTORS if scope is Scope.CONNECTOR else ("",)):
            for series in signals.SERIES[scope]:
                signal, at = series.signal, word(index, series.first) if name else series.first
                values = counts[at : at + series.width]
                if signal.kind is Kind.GAUGE or not any(values):
                    continue
                of = dict(
                    zip(labelnames(signal), ("tiny", "0", *([name] if name else []), *series.values), strict=True)
                )
                if signal.kind is Kind.COUNTER:
                    assert found[signal.name, frozenset(of.items())] == pytest.approx(
                        values[0] * signal.unit, rel=1e-15
                    )
                    continue
                assert found[f"{signal.name}_sum", frozenset(of.items())] == pytest.approx(values[-1] * signal.unit)
                assert found[f"{signal.name}_count", frozenset(of.items())] == float(sum(values[:-1]))
                buckets = sorted(
                    (float(labels["le"]), n)
                    for (sample, has), n in found.items()
                    if sample == f"{signal.name}_bucket" and of.items() <= (labels := dict(has)).items()
                )
                assert [n for _, n in buckets] == pytest.approx([sum(values[: i + 1]) for i in range(len(buckets))])
    rows = {(s.name, *p.labels[2:]): p.value / s.unit for s, ps in totals.series() if s.is_open for p in ps if ps}
    for (signal, index, texts), n in totals.engine.rows().items():
        assert rows[signal.name, CONNECTORS[index], *texts] == pytest.approx(n)


def test_several_engines_series_are_in_one_text_and_not_mixed() -> None:
    first = Pages(None, 0)
    second = Pages(None, of=first, index=1)
    first.add(word(0, HIT), 3, writer=1)
    second.add(word(0, HIT), 4)
    found = samples(first.totals(), second.totals())
    of_hits = {dict(labels)["engine"]: n for (name, labels), n in found.items() if name == "kvobs_lookups_total"}
    assert of_hits == {"0": 3, "1": 4}


def test_no_number_of_a_scrape_falls_while_processes_come_and_go() -> None:
    pages = Pages(None)
    totals, seen = pages.totals(), list[float]()
    for i in range(4):
        pages.begin(0)
        totals.engine.find()
        for writer in range(len(pages.writers)):
            pages.add(word(0, HIT), 1, writer=writer)
        if i % 2:
            pages.writers[-1].close()
        seen.append(value(totals, signals.LOOKUPS, "one", "hit") or 0)
    assert seen == [2, 5, 9, 14]
    assert all(before <= after for before, after in pairwise(seen))


def loaded() -> tuple[Pages, Totals]:
    pages = Pages()
    totals = pages.totals()
    first = word(0, slot(LOAD_DURATION, "async"))
    pages.add(first + LOAD_DURATION.bucket(TWO_MS), 3)
    pages.add(first + LOAD_DURATION.sum_offset, 3 * TWO_MS)
    attributes: dict[str, spans.Value] = {spans.CONNECTOR: "one", spans.MODE: "async"}
    totals.mark(record(name="kv.load", observed_ns=TWO_MS, attributes=attributes), 5.0)
    return pages, totals


def test_openmetrics_has_exemplars_at_the_same_path() -> None:
    _pages, totals = loaded()
    content_type, text = exposition(totals).text(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families: Any = open_metrics(text.decode())  # type: ignore[no-untyped-call]
    marked = [s for f in families for s in f.samples if s.exemplar is not None]
    assert [s.labels["le"] for s in marked] == ["0.00232267"]
    assert marked[0].exemplar.labels == {"trace_id": record().trace_id}
    assert marked[0].exemplar.value == 0.002
    content_type, text = exposition(totals).text("text/plain")
    assert content_type.startswith("text/plain")
    assert not [s for f in plain(text.decode()) for s in f.samples if s.exemplar is not None]


def test_a_start_time_has_no_more_digits_than_every_store_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """VictoriaMetrics also returned 1795919721.8830268 as ...266: rules that compare start times saw another engine."""
    totals = Pages().totals()
    assert totals.engine.head is not None
    head = replace(totals.engine.head, began_ns=1_795_919_721_883_026_812)
    monkeypatch.setattr(type(totals.engine), "head", head)
    (start,) = points(totals, signals.START_TIME)
    assert repr(start.value) == "1795919721.883"


@pytest.mark.usefixtures("in_production")
def test_an_error_takes_no_other_metrics_from_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry asks all collectors at once: vLLM's own metrics would be lost with kvobs's."""
    totals, registry = Pages().totals(), CollectorRegistry()
    vllms = Counter("vllms_own", "...", registry=registry)
    registry.register(TotalsCollector(lambda: [totals]))
    vllms.inc()
    with monkeypatch.context() as patch:
        patch.setattr(totals.engine, "counts", Mock(side_effect=RuntimeError("of kvobs")))
        text = generate_latest(registry).decode()
    assert "vllms_own_total 1.0" in text
    assert "kvobs_lookups_total{" not in text
    assert faults.take() == {"read": 1}
    assert "kvobs_start_time_seconds{" in generate_latest(registry).decode()


def test_every_metric_of_the_table_is_announced() -> None:
    for totals in ([], [Pages().totals()]):
        _, text = exposition(*totals).text("")
        kinds = {family.name: family.type for family in plain(text.decode())}
        for signal in signals.SIGNALS:
            name = signal.name.removesuffix("_total") if signal.kind is Kind.COUNTER else signal.name
            assert kinds[name] == signal.kind.value


def test_scrapes_at_the_same_time_get_the_same_text() -> None:
    now, (pages, totals), refreshed = 0.0, loaded(), list[float]()
    page = Exposition(lambda: [totals], lambda: refreshed.append(now), lambda: now)
    before = page.text("")
    pages.add(word(1, HIT), 1)
    assert page.text("") == before
    assert page.text(OPENMETRICS) != before
    assert page.text("text/plain; version=x")[0] == before[0], "as without a wish"
    pages.add(word(1, HIT), 1)
    now += FRESH_S
    again = page.text("")
    assert again != before
    pages.add(word(1, HIT), 1)
    page.forget()
    assert page.text("") != again
    assert refreshed == [0.0] * 3 + [FRESH_S] * 2


def test_nothing_is_infinite_but_the_last_bucket() -> None:
    _pages, totals = loaded()
    _, text = exposition(totals).text("")
    assert all(math.isfinite(s.value) for f in plain(text.decode()) for s in f.samples)
