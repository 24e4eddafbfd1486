"""One set of series for each connector, whatever its metrics do; nothing is raised into the API server."""

import gc
import logging
import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.utils import floatToGoString
from vllm.v1.metrics import ray_wrappers

import kvobs
from kvobs import faults
from kvobs.export import prometheus, span_export
from kvobs.export.process import lock_of
from kvobs.export.prometheus import MultiKVConnectorPromMetrics, Shown
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import DYNAMIC_COUNTERS, SIGNALS, Kind, Scope, Signal, word
from kvobs.schema.spans import Reason
from kvobs.vllm_api import versions
from tests.support.contexts import no_otel_variables, record
from tests.support.front import LABELS, REAL, Front, metered
from tests.support.numbers import locate
from tests.support.top_engines import Engines, count
from tests.support.waiting import eventually

LOOKUPS = signals.LOOKUPS


def hits(engines: Engines, n: int, index: int = 0, engine: int = 0) -> None:
    """Let an engine count some hits of a connector."""
    engines.send(lambda recorder: count(recorder, index, LOOKUPS, n, "hit"), engine=engine)


def test_counts_become_counters_of_their_connector_and_engine() -> None:
    engines = Engines("one", "two", engines=2)
    front = engines.front
    hits(engines, 2)
    hits(engines, 3, index=1)
    hits(engines, 10, engine=1)
    hits(engines, 1)
    assert front.value("kvobs_lookups_total", "one", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "two", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "one", outcome="hit", engine="1") == 10


def test_info_metrics_are_there_before_anything_happens() -> None:
    front = Engines("one", "two").front
    sent = {"role": "kv_both", "load_policy": "first", "failure_policy": "recompute"}
    for i, name in enumerate(("one", "two")):
        assert front.value("kvobs_connector_info", name, index=str(i), **{"class": "MeteredConnector"}, **sent) == 1
    versions = {"version": kvobs.__version__, "vllm_version": "0.32.0"}
    assert front.value("kvobs_build_info", None, **versions, native="false") == 1


def test_other_series_appear_when_first_used() -> None:
    engines = Engines("one")
    families = [f for f in engines.front.registry.collect() if f.name.startswith("kvobs")]
    named = {sample.name for family in families for sample in family.samples}
    assert named == {
        f"kvobs_{name}" for name in ("start_time_seconds", "connector_info", "build_info", "local_cache_tokens")
    }


OF_CHILDREN = [signal for signal in SIGNALS if signal.bounds and signal.scope is Scope.CONNECTOR]


@given(st.lists(st.tuples(st.sampled_from(OF_CHILDREN), st.integers(0, 2**36)), max_size=20))
@settings(max_examples=30, deadline=None)
def test_a_histogram_is_as_if_each_value_had_been_observed(seen: list[tuple[Signal, int]]) -> None:
    expected = CollectorRegistry()
    more: Any = {"registry": expected}
    families = {s.name: Histogram(s.name, s.help, [*s.labels], buckets=s.buckets, **more) for s in {s for s, _ in seen}}

    def observe(recorder: Recorder) -> None:
        for signal, ns in seen:
            values = [v[0] for v in signal.labels.values()]
            recorder.observe(0, signal, ns, *values)
            of = families[signal.name].labels(*values) if values else families[signal.name]
            of.observe(ns / 1e9)

    engines = Engines("one")
    engines.send(observe)
    shown, wanted = samples_of(engines.front.registry), samples_of(expected)
    for signal, _ in seen:
        own = {label: values[0] for label, values in signal.labels.items()}
        labels = {**LABELS, "connector": "one", **own}
        for bound in [*map(floatToGoString, signal.buckets), "+Inf"]:
            bucket = f"{signal.name}_bucket"
            assert shown[series(bucket, labels | {"le": bound})] == wanted[series(bucket, own | {"le": bound})]
        for part in (f"{signal.name}_count", f"{signal.name}_sum"):
            assert shown[series(part, labels)] == pytest.approx(wanted[series(part, own)], rel=1e-9)


def series(name: str, labels: dict[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def samples_of(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return all that a registry shows: each question to it would make all of it again."""
    return {series(each.name, each.labels): each.value for family in registry.collect() for each in family.samples}


def test_every_series_of_the_table_is_exposed() -> None:
    engines = Engines("one")
    page = engines.recorders[0].page
    for at in range(word(1, 0)):
        if locate(at)[0].signal.kind is Kind.GAUGE:
            page.set_gauge(at, 1)
        else:
            page.add(at, 1)
    for signal in DYNAMIC_COUNTERS:
        page.rows.add(signal, 0, ("x",) * len(signal.labels), 1)
    samples = [s for f in engines.front.registry.collect() for s in f.samples if not s.name.endswith("_created")]
    exposed = {s.name.removesuffix("_count") for s in samples}
    ours = [signal for signal in SIGNALS if signal.scope in {Scope.CONNECTOR, Scope.PROCESS}]
    assert exposed >= {signal.name for signal in ours}
    for signal in ours:
        of_signal = [s for s in samples if s.name in (signal.name, f"{signal.name}_count")]
        assert len(of_signal) == math.prod(len(values) or 1 for values in signal.labels.values()), signal.name
        for sample in of_signal:
            assert set(sample.labels) - set(LABELS) - {"connector"} == set(signal.labels)
            assert ("connector" in sample.labels) is (signal.scope is Scope.CONNECTOR)


@pytest.mark.usefixtures("in_production")
def test_faults_of_this_process_are_counted() -> None:
    engines = Engines("one")
    front = engines.front
    faults._counts["rebuild"] += 2
    front.shown.look()
    assert front.value("kvobs_internal_errors_total", None, where="rebuild") == 2


def test_a_line_for_each_connector_is_logged_in_each_interval(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.3")
    engines = Engines("one", engines=2)
    hits(engines, 3, engine=1)
    assert eventually(lambda: "engine 001, connector one: lookups=3, hits=3" in caplog.text)


def test_spans_lost_in_the_exporters_thread_count_for_one_engine() -> None:
    front = Engines("one", engines=2).front
    front.shown._drop_spans("export", 3)
    front.shown._drop_spans("queue", 2)
    assert front.value("kvobs_spans_dropped_total", None, where="export") == 3
    assert front.value("kvobs_spans_dropped_total", None, where="queue") == 2
    assert front.value("kvobs_spans_dropped_total", None, where="export", engine="1") is None


@pytest.mark.usefixtures("in_production")
def test_uncountable_lost_spans_are_an_internal_error() -> None:
    front = Front(metered("a"), names=["one"])
    front.shown._is_over.set()
    front.shown._totals.clear()
    front.shown._drop_spans("export", 3)
    assert faults.take() == {"export": 1}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return where the spans of engines end that are traced from now on."""
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    made = InMemorySpanExporter()
    monkeypatch.setattr(span_export, "make_exporter", lambda _endpoint: made)
    return made


def test_each_engines_spans_are_exported_and_the_last_ones_also(exporter: Any) -> None:
    engines = Engines("one", engines=2)
    for i, recorder in enumerate(engines.recorders):
        recorder.page.spans[0].write([record(start_ns=i)])
    engines.front.export_spans()
    found = [(span.start_time, (span.attributes or {})["kv_transfer.engine"]) for span in exporter.get_finished_spans()]
    assert sorted(found) == [(0, 0), (1, 1)]
    engines.front.shown._is_over.set()
    time.sleep(2 * prometheus.LOOK_S)
    engines.recorders[0].page.spans[1].write([record(start_ns=7, reason=Reason.SLOW)])
    engines.front.shown.close()
    assert max(span.start_time or 0 for span in exporter.get_finished_spans()) == 7


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "as vLLM before 0.30 sends it"])
def test_connectors_metrics_keep_their_names_and_gain_the_label(wrapped: bool) -> None:
    front = Front(metered("a"), metered("b"), names=["one", "two"])
    front.metrics.observe({name: {"data": {"n": n}} if wrapped else {"n": n} for name, n in (("one", 1), ("two", 5))})
    assert front.value("scripted_things_total", "one") == 1
    assert front.value("scripted_things_total", "two") == 5


def test_a_connectors_broken_metrics_cost_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(metered("a", "UnmeterableConnector"), metered("b"), names=["one", "two"])
    front.metrics.observe({"one": {"n": 1}, "two": {"n": 2}})
    assert front.value("scripted_things_total", "two") == 2
    assert "'one' can't define its own metrics" in caplog.text


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """Return the registry of the process, without the metrics of engines."""
    MultiKVConnectorPromMetrics._forget_last_engine()
    yield REGISTRY
    MultiKVConnectorPromMetrics._forget_last_engine()


def exposed(registry: CollectorRegistry) -> list[str]:
    return [family.name for family in registry.collect() if family.name.startswith("kvobs_")]


def shows(front: Front) -> bool:
    """Return whether the engine of an API server is told that it shows its metrics."""
    server = Identity.of(front.config).server
    return files.is_held(files.folder(), f"{server}-0{files.COLLECTOR}")


def real(*names: str, engines: int = 1, **kvobs: Any) -> Front:
    return Front(*map(metered, names), names=list(names), types=REAL, engines=engines, **kvobs)


def test_an_engine_built_again_starts_with_fresh_series(registry: CollectorRegistry) -> None:
    """The registry refuses a name that it has; and of two engines' numbers those of the last one are shown."""
    first = real("one")
    assert shows(first)
    second = real("one")
    assert (shows(first), shows(second)) == (False, True)
    assert len(exposed(registry)) == len(set(exposed(registry))) == len(prometheus._METRICS)
    MultiKVConnectorPromMetrics._forget_last_engine()
    assert not shows(second)
    assert exposed(registry) == []


def test_an_engine_that_is_no_longer_shown_is_no_longer_watched() -> None:
    before = {*threading.enumerate()}
    front = Front(metered("a"), names=["one"])
    begun = {*threading.enumerate()} - before
    assert {thread.name for thread in begun} == {"kvobs-watch", "kvobs-spans"}
    front.shown.close()
    del front
    gc.collect()
    assert eventually(lambda: not any(thread.is_alive() for thread in begun))


def test_connectors_families_are_new_with_engines(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has unregistered its own ones by then, and none of other names."""
    for n in (1, 2):
        front = real("one", "two")
        front.metrics.observe({"one": {"n": n}, "two": {"n": n}})
        assert registry.get_sample_value("scripted_things_total", {**LABELS, "connector": "two"}) == n
    assert "can't define its own metrics" not in caplog.text


def test_family_has_the_series_of_all_engines(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.top_engines.Front", lambda *of, **more: Front(*of, types=REAL, **more))
    engines = Engines("one", engines=2)
    for engine in (0, 1):
        hits(engines, 1 + engine, engine=engine)
    (family,) = [family for family in registry.collect() if family.name == "kvobs_lookups"]
    assert {sample.labels["engine"]: sample.value for sample in family.samples} == {"0": 1, "1": 2}
    assert family.documentation == LOOKUPS.help


def test_a_part_of_the_metrics_can_be_asked_for(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.top_engines.Front", lambda *of, **more: Front(*of, types=REAL, **more))
    engines = Engines("one")
    asked = registry.restricted_registry(["kvobs_build_info"])
    assert [sample.name for family in asked.collect() for sample in family.samples] == ["kvobs_build_info"]
    del engines


@pytest.mark.usefixtures("in_production")
def test_metrics_that_fail_to_register_cost_connectors_nothing(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine starts its exporter, which also sends the spans: they are not sent here."""
    other, close, closed = Counter("kvobs_lookups_total", "Of someone else.", registry=registry), Shown.close, []

    def noting(self: Shown) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Shown, "close", noting)
    front = real("one")
    assert faults.take() == {"read": 1}
    assert (shows(front), len(closed)) == (False, 1)
    front.metrics.observe({"one": {"n": 3}})
    assert registry.get_sample_value("scripted_things_total", {**LABELS, "connector": "one"}) == 3
    registry.unregister(other)
    assert shows(real("one"))
    assert faults.take() == {}, "what was not registered is no fault of the next engine"


@pytest.mark.parametrize(
    ("variables", "option", "is_shown"),
    [
        ({}, {}, True),
        ({}, {"exporter": None}, True),
        ({}, {"exporter": {}}, False),
        ({}, {"exporter": {"port": 1234}}, False),
        ({versions.MULTIPROCESS: "/tmp"}, {}, False),
    ],
    ids=str,
)
def test_without_exporter_they_are_shown_if_a_collector_is_seen(
    variables: dict[str, str],
    option: dict[str, Any],
    is_shown: bool,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this variable vLLM shows files, and no collectors; the engine may not know of it."""
    monkeypatch.delenv(versions.MULTIPROCESS, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    front = real("one", **option)
    assert bool(exposed(registry)) is is_shown
    assert shows(front) is is_shown


def test_where_an_exporter_runs_already_it_shows_them(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = Identity.of(real("one", engine_id="mine").config).server
    MultiKVConnectorPromMetrics._forget_last_engine()
    lock = lock_of(server)
    front = real("one", engine_id="mine")
    assert not shows(front)
    assert exposed(registry) == []
    assert caplog.text.count("kvobs's exporter serves the metrics; /metrics of this process does not") == 1
    lock.release()
    assert shows(real("one", engine_id="mine"))


class RayMetrics:
    """Stands for ``ray.util.metrics``: the signatures are those of Ray 2.60, and what is observed is kept."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, float, dict[str, str]]] = []

    def _metric(self, name: str, tag_keys: tuple[str, ...]) -> Any:
        def report(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(tag_keys)
            assert all(isinstance(tag, str) for tag in tags.values())
            self.sent.append((name, value, tags))

        return SimpleNamespace(_tag_keys=tag_keys, inc=report, set=report, observe=report)

    def Counter(self, name: str, description: str = "", tag_keys: tuple[str, ...] = ()) -> Any:  # noqa: N802
        return self._metric(name, tag_keys)

    Gauge = Counter

    def Histogram(  # noqa: N802
        self, name: str, description: str = "", boundaries: list[float] | None = None, tag_keys: tuple[str, ...] = ()
    ) -> Any:
        return self._metric(name, tag_keys)


def test_vllms_classes_for_ray_get_the_connectors_numbers(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = RayMetrics()
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray)
    monkeypatch.setattr(ray_wrappers, "ray_serve", None)
    of = ray_wrappers.RayKVConnectorProm
    types = {Counter: of._counter_cls, Gauge: of._gauge_cls, Histogram: of._histogram_cls}
    front = Front(metered("a"), names=["one"], types=types)
    front.metrics.observe({"one": {"n": 4}})
    assert [(name, value, tags["connector"]) for name, value, tags in ray.sent] == [("scripted_things", 4, "one")]
    assert exposed(registry) == []
    assert not shows(front)
    assert faults.take() == {}
