"""One set of series for each child, whatever its metrics do; nothing is raised into the API server."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import vllm
from hypothesis import given
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.utils import floatToGoString
from vllm.v1.metrics import ray_wrappers

import kvobs
from kvobs import faults
from kvobs.export import prometheus
from kvobs.export.prometheus import MultiKVConnectorPromMetrics
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import CHILD_WIDTH, LOOKUPS, OPEN, PROCESS_WIDTH, SIGNALS, Kind, Scope, Signal, slot
from kvobs.vllm_api import versions
from tests.support.front import LABELS, Front, metered, own

HIT = PROCESS_WIDTH + slot(LOOKUPS, "hit")
ONE = {"one": "m:C"}


def test_counts_become_counters_of_the_right_child_and_engine() -> None:
    front = Front(metered("a"), metered("b"), engines=2, names=["one", "two"])
    both = {"one": "m:C", "two": "m:C"}
    front.metrics.observe({"kvobs": own({HIT: 2, HIT + CHILD_WIDTH: 3}, both)}, 0)
    front.metrics.observe({"kvobs": own({HIT: 10}, both)}, 1)
    front.metrics.observe({"kvobs": own({HIT: 1}, both)}, 0)
    assert front.value("kvobs_lookups_total", "one", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "two", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "one", outcome="hit", engine="1") == 10


def test_info_metrics_are_there_before_anything_happens() -> None:
    front = Front(metered("a"), metered("b", "OtherMeteredConnector"), names=["one", "two"], load_policy="longest")
    sent = {"role": "kv_both", "load_policy": "longest", "failure_policy": "recompute"}
    assert front.value("kvobs_connector_info", "one", index="0", **{"class": "MeteredConnector"}, **sent) == 1
    assert front.value("kvobs_connector_info", "two", index="1", **{"class": "OtherMeteredConnector"}, **sent) == 1
    versions = {"version": kvobs.__version__, "vllm_version": vllm.__version__}
    assert front.value("kvobs_build_info", None, **versions, native="true") == 1


def test_other_series_appear_when_first_used() -> None:
    front = Front(metered("a"))
    families = [f for f in front.registry.collect() if f.name.startswith("kvobs") and not f.name.endswith("_info")]
    assert [sample.name for family in families for sample in family.samples] == ["kvobs_start_time_seconds"]


OF_CHILDREN = [signal for signal in SIGNALS if signal.bounds and signal.scope is Scope.CHILD]


@given(st.lists(st.tuples(st.sampled_from(OF_CHILDREN), st.integers(0, 2**36)), max_size=20))
def test_a_histogram_is_what_observing_one_by_one_would_have_made(seen: list[tuple[Signal, int]]) -> None:
    recorder = Recorder(1)
    expected = CollectorRegistry()
    more: Any = {"registry": expected}
    families = {s.name: Histogram(s.name, s.help, [*s.labels], buckets=s.buckets, **more) for s in {s for s, _ in seen}}
    for signal, ns in seen:
        values = [v[0] for v in signal.labels.values()]
        recorder.observe(0, signal, ns, *values)
        (families[signal.name].labels(*values) if values else families[signal.name]).observe(ns / 1e9)
    front = Front(metered("a"), names=["one"])
    front.metrics.observe({"kvobs": own(recorder.take().counts, ONE)})
    for signal, _ in seen:
        labels = {label: values[0] for label, values in signal.labels.items()}
        for bound in [*map(floatToGoString, signal.buckets), "+Inf"]:
            assert front.value(f"{signal.name}_bucket", "one", le=bound, **labels) == (
                expected.get_sample_value(f"{signal.name}_bucket", {"le": bound, **labels})
            )
        for part in ("count", "sum"):
            assert front.value(f"{signal.name}_{part}", "one", **labels) == pytest.approx(
                expected.get_sample_value(f"{signal.name}_{part}", labels), rel=1e-9
            )


def test_every_series_of_the_table_is_exposed() -> None:
    front = Front(metered("a"), names=["one"])
    places = range(PROCESS_WIDTH + CHILD_WIDTH)
    counts = {place: 1 for place in places if signals.locate(place)[0].signal.kind is not Kind.GAUGE}
    gauges = {place: 1 for place in places if place not in counts}
    counters = [s for s in SIGNALS if OPEN in s.labels.values() and s.kind is Kind.COUNTER]
    rows = [[s.name, 0, *("x" for _ in s.labels), 1] for s in counters]
    front.metrics.observe({"kvobs": own(counts, ONE, gauges, rows)})
    samples = [s for family in front.registry.collect() for s in family.samples if not s.name.endswith("_created")]
    exposed = {s.name.removesuffix("_count") for s in samples}
    ours = [signal for signal in SIGNALS if signal.scope in {Scope.CHILD, Scope.PROCESS}]
    assert exposed >= {signal.name for signal in ours}
    for signal in ours:
        of_signal = [s for s in samples if s.name in (signal.name, f"{signal.name}_count")]
        assert len(of_signal) == math.prod(len(values) or 1 for values in signal.labels.values()), signal.name
        for sample in of_signal:
            assert set(sample.labels) - set(LABELS) - {"connector"} == set(signal.labels)
            assert ("connector" in sample.labels) is (signal.scope is Scope.CHILD)


def test_applying_costs_and_faults_of_this_process_are_counted() -> None:
    front = Front(metered("a"), names=["one"])
    faults._counts["rebuild"] += 2
    front.metrics.observe({})
    assert front.value("kvobs_internal_errors_total", None, where="rebuild") == 2
    assert (front.value("kvobs_self_seconds_total", None, where="apply") or 0) > 0


def test_the_time_of_each_payload_is_counted_whether_it_has_numbers_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(metered("a"), names=["one"])
    times = [0, 5, 9, 100, 103, 110]  # begin, applied, cut
    monkeypatch.setattr(prometheus, "perf_counter_ns", lambda: times.pop(0))
    front.metrics.observe({"kvobs": own({}, ONE)})
    front.metrics.observe({"kvobs": own({HIT: 1}, ONE)})
    for where, ns in (("apply", 8), ("cut", 11)):
        assert front.value("kvobs_self_seconds_total", None, where=where) == pytest.approx(ns / 1e9, rel=1e-9)


def test_spans_that_the_exporters_thread_loses_are_counted_for_the_first_engine() -> None:
    front = Front(metered("a"), names=["one"], engines=2)
    front.metrics._drop_spans("export", 3)
    front.metrics._drop_spans("queue", 2)
    assert front.value("kvobs_spans_dropped_total", None, where="export") == 3
    assert front.value("kvobs_spans_dropped_total", None, where="queue") == 2
    assert front.value("kvobs_spans_dropped_total", None, where="export", engine="1") is None


@pytest.mark.usefixtures("in_production")
def test_spans_that_can_not_be_counted_as_lost_are_an_internal_error() -> None:
    front = Front(metered("a"), names=["one"])
    front.metrics._totals.clear()
    front.metrics._drop_spans("export", 3)
    assert faults.take() == {"cut": 1}


def test_a_payload_without_numbers_costs_no_metric_anything_until_one_with_numbers_comes() -> None:
    front = Front(metered("a"), names=["one"])
    bare = {"kvobs": own({}, ONE), "one": {"n": 1}}
    for _ in range(3):
        front.metrics.observe(bare)
    assert front.value("scripted_things_total", "one") == 3
    assert front.value("kvobs_self_seconds_total", None, where="apply") is None
    spent = front.metrics._spent[0][prometheus._APPLY]
    assert spent > 0
    front.metrics.observe({"kvobs": own({HIT: 1}, ONE)})
    assert (front.value("kvobs_self_seconds_total", None, where="apply") or 0) > spent / 1e9
    faults._counts["rebuild"] += 2
    front.metrics.observe(bare)
    assert front.value("kvobs_internal_errors_total", None, where="rebuild") == 2, "faults do not wait"


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "as vLLM before 0.30 sends it"])
def test_childrens_own_metrics_keep_their_names_and_gain_the_label(wrapped: bool) -> None:
    front = Front(metered("a"), metered("b"), names=["one", "two"])
    front.metrics.observe({name: {"data": {"n": n}} if wrapped else {"n": n} for name, n in (("one", 1), ("two", 5))})
    assert front.value("scripted_things_total", "one") == 1
    assert front.value("scripted_things_total", "two") == 5


def test_a_child_whose_metrics_can_not_be_made_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(metered("a", "UnmeterableConnector"), metered("b"), names=["one", "two"])
    front.metrics.observe({"one": {"n": 1}, "two": {"n": 2}})
    assert front.value("scripted_things_total", "two") == 2
    assert "'one' can't define its own metrics" in caplog.text


REAL: Any = {kind: kind for kind in (Counter, Gauge, Histogram)}


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """Return the registry of the process, without the metrics of engines."""
    MultiKVConnectorPromMetrics._forget_last_engine()
    yield REGISTRY
    MultiKVConnectorPromMetrics._forget_last_engine()


def exposed(registry: CollectorRegistry) -> list[str]:
    return [family.name for family in registry.collect() if family.name.startswith("kvobs_")]


def test_an_engine_built_twice_in_one_process_starts_with_fresh_series(registry: CollectorRegistry) -> None:
    """The registry refuses a name that it has; and of two engines' numbers those of the last one are shown."""
    labels = {**LABELS, "connector": "one", "outcome": "hit"}
    for _ in range(2):
        front = Front(metered("a"), names=["one"], types=REAL)
        front.metrics.observe({"kvobs": own({HIT: 1}, ONE)})
        assert registry.get_sample_value("kvobs_lookups_total", labels) == 1
        assert len(exposed(registry)) == len(set(exposed(registry))) == len(prometheus._METRICS)


def test_childrens_families_are_new_with_engines(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM has unregistered its own ones by then, and none of other names."""
    for n in (1, 2):
        front = Front(metered("a"), metered("b"), names=["one", "two"], types=REAL)
        front.metrics.observe({"one": {"n": n}, "two": {"n": n}})
        assert registry.get_sample_value("scripted_things_total", {**LABELS, "connector": "two"}) == n
    assert "can't define its own metrics" not in caplog.text


def test_family_has_the_series_of_all_engines(registry: CollectorRegistry) -> None:
    front = Front(metered("a"), names=["one"], engines=2, types=REAL)
    for engine in (0, 1):
        front.metrics.observe({"kvobs": own({HIT: 1 + engine}, ONE)}, engine)
    (family,) = [family for family in registry.collect() if family.name == "kvobs_lookups"]
    assert {sample.labels["engine"]: sample.value for sample in family.samples} == {"0": 1, "1": 2}
    assert family.documentation == LOOKUPS.help


def test_a_part_of_the_metrics_can_be_asked_for(registry: CollectorRegistry) -> None:
    Front(metered("a"), types=REAL)
    asked = registry.restricted_registry(["kvobs_build_info"])
    assert [sample.name for family in asked.collect() for sample in family.samples] == ["kvobs_build_info"]


@pytest.mark.usefixtures("in_production")
def test_metrics_that_can_not_be_registered_cost_the_children_theirs_nothing(registry: CollectorRegistry) -> None:
    other = Counter("kvobs_lookups_total", "Of someone else.", registry=registry)
    front = Front(metered("a"), names=["one"], types=REAL)
    assert faults.take() == {"apply": 1}
    front.metrics.observe({"one": {"n": 3}, "kvobs": own({HIT: 1}, ONE)})
    assert registry.get_sample_value("scripted_things_total", {**LABELS, "connector": "one"}) == 3
    registry.unregister(other)
    Front(metered("a"), types=REAL)
    assert faults.take() == {}, "what was not registered is no fault of the next engine"


@pytest.mark.parametrize(("option", "warnings"), [({}, 1), ({"exporter": None}, 0)], ids=["auto", "never"])
def test_numbers_that_nobody_sees_are_warned_of_once_unless_it_is_known(
    registry: CollectorRegistry,
    option: dict[str, Any],
    warnings: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this variable vLLM shows files, and no collectors; the engine may not know of it."""
    monkeypatch.setenv(versions.MULTIPROCESS, "/tmp")
    front = Front(metered("a"), names=["one"], types=REAL, **option)
    for _ in range(2):
        front.metrics.observe({"kvobs": own({}, ONE)})
    assert "does not show them" not in caplog.text
    for _ in range(2):
        front.metrics.observe({"kvobs": own({HIT: 1}, ONE)})
    assert exposed(registry) == []
    assert caplog.text.count("does not show them") == warnings


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


def test_vllms_classes_in_front_of_ray_get_the_childrens_numbers(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = RayMetrics()
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray)
    monkeypatch.setattr(ray_wrappers, "ray_serve", None)
    of = ray_wrappers.RayKVConnectorProm
    types = {Counter: of._counter_cls, Gauge: of._gauge_cls, Histogram: of._histogram_cls}
    front = Front(metered("a"), names=["one"], types=types)
    front.metrics.observe({"kvobs": own({HIT: 1}, ONE), "one": {"n": 4}})
    assert [(name, value, tags["connector"]) for name, value, tags in ray.sent] == [("scripted_things", 4, "one")]
    assert exposed(registry) == []
    assert faults.take() == {}
