"""Payloads of older, newer and broken peers on vLLM's own way into the API server: nothing raises, nothing piles up."""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvobs import faults
from kvobs.export import span_export
from kvobs.probe.increments import Increments
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import LOOKUPS, PROCESS_WIDTH, slot
from kvobs.telemetry.payload import kvobs_stats, stats
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, rebuild
from kvobs.telemetry.payload.wire import VERSION
from kvobs.testing import transfer_config
from tests.support.contexts import near_misses, no_otel_variables, record
from tests.support.front import Front, metered

HIT = PROCESS_WIDTH + slot(LOOKUPS, "hit")
CHILDREN = {"one": "tests.support.scripted:MeteredConnector", "two": "tests.support.scripted:MeteredConnector"}
GOOD = {HIT: 1, slot(signals.SELF_SECONDS, "record"): 10}
FEW = 400
NOBODY = "http://127.0.0.1:1"
STATS_CLASSES = ("NixlConnector", "OffloadingConnector", "MooncakeConnector", "HF3FSKVConnector", "HiSparseConnector")


def good() -> dict[str, Any]:
    return {"one": {"n": 1}, "kvobs": KvobsStats.of(CHILDREN, Increments(dict(GOOD), [], {})).to_dict()}


def telling() -> dict[str, Any]:
    recorder = Recorder(2)
    recorder.observe(0, signals.LOAD_DURATION, 2_000_000, "async")
    recorder.count(1, slot(LOOKUPS, "miss"), 3)
    recorder.count_open(0, signals.CALL_ERRORS, "save_kv_layer", "OSError")
    recorder.count_open(1, signals.SLOWEST_RANK, "3")
    recorder.set_gauge(0, slot(signals.IN_FLIGHT, "load"), 2)
    numbers = recorder.take()._replace(spans=[[record()]])
    return {"one": {"n": 2}, "two": {"n": 3}, "kvobs": KvobsStats.of(CHILDREN, numbers).to_dict()}


class ApiServer:
    """What reads payloads there: vLLM's wire, kvobs's metrics, vLLM's periodic log."""

    def __init__(self, *, is_traced: bool = False) -> None:
        with pytest.MonkeyPatch.context() as patch:
            no_otel_variables(patch, **({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": NOBODY} if is_traced else {}))
            # A real one would draw from Python's random, in a thread of its own, while Hypothesis does.
            patch.setattr(span_export, "make_exporter", lambda endpoint: InMemorySpanExporter())
            self.front = Front(metered("a"), metered("b"), names=["one", "two"])
        self.log = KVConnectorLogging(transfer_config("kvobs", [metered("a"), metered("b")], {"names": ["one", "two"]}))
        self.logged: list[str] = []
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(SchedulerStats)

    def receive(self, sent: Any) -> None:
        arrived = self._decoder.decode(self._encoder.encode(SchedulerStats(kv_connector_stats=sent)))
        if arrived.kv_connector_stats:  # as vLLM's loggers ask
            self.log.observe(arrived.kv_connector_stats)
        if arrived.kv_connector_stats is not None:
            self.front.metrics.observe(arrived.kv_connector_stats)

    def write_log(self) -> str:
        self.log.log(log_fn=lambda message, text: self.logged.append(text))
        return self.logged.pop() if self.logged else ""

    def hits(self) -> float:
        return self.front.value("kvobs_lookups_total", "one", outcome="hit") or 0

    def total(self, metric: str) -> float:
        return sum(s.value for f in self.front.registry.collect() for s in f.samples if s.name == metric)

    def series(self) -> int:
        return sum(len(family.samples) for family in self.front.registry.collect())


@pytest.fixture(scope="module")
def lasting() -> Iterator[ApiServer]:
    """Return one for many examples."""
    server = ApiServer(is_traced=True)
    yield server
    assert server.front.metrics._cutter is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_export, "CLOSING_S", 0.1)
        server.front.metrics._cutter.close()


numbers = st.sampled_from([-1, 0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, float("nan"), True])
leaves = st.none() | st.text(max_size=5) | st.floats() | near_misses | numbers
keys = st.integers(-5, 5) | st.text(max_size=3)
broken = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=5
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def put(into: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    if isinstance(into, tuple):
        into = list(into)
    into = copy.copy(into)
    into[path[0]] = put(into[path[0]], path[1:], value)
    return into


def builtin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: builtin(inner) for key, inner in value.items()}
    return [builtin(inner) for inner in value] if isinstance(value, list | tuple) else value


TELLING: dict[str, Any] = builtin(telling())
PLACES = [path for path in places(TELLING) if path]


@pytest.mark.usefixtures("in_production")
@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(PLACES), broken), min_size=1, max_size=3))
def test_a_broken_payload_costs_no_other_anything(lasting: ApiServer, wrong: list[tuple[tuple[Any, ...], Any]]) -> None:
    sent = TELLING
    for path, value in wrong:
        if path in list(places(sent)):
            sent = put(sent, path, value)
    series = lasting.series()
    lasting.receive(sent)
    if not isinstance(sent, dict):
        return
    before = lasting.hits(), lasting.front.value("scripted_things_total", "one") or 0
    lasting.receive(good())
    assert lasting.hits() - before[0] == pytest.approx(1, abs=max(1e-9, before[0] * 1e-15))
    after = lasting.front.value("scripted_things_total", "one") or 0
    # Its own counter may have been given an infinity, or no number.
    assert after - before[1] == pytest.approx(1, abs=max(1e-9, before[1] * 1e-15)) or not math.isfinite(after)
    assert lasting.series() < series + 250
    lasting.write_log()


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("name", STATS_CLASSES)
@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from(["data", "types", "num_failed_transfers"]) | st.text(max_size=3), broken),
    st.integers(1, 3),
)
def test_childrens_strange_stats_never_raise(name: str, lasting: ApiServer, noted: dict[Any, Any], times: int) -> None:
    """NIXL's stats, for one, can't say whether they are empty when a key is missing."""
    for _ in range(times):
        lasting.receive({name: noted, "kvobs": good()["kvobs"]})
    assert f"'lookups': {times}, 'hits': {times}" in lasting.write_log()


@pytest.mark.usefixtures("in_production")
def test_stats_nested_too_deep_cost_their_child_only(lasting: ApiServer) -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = {"d": deep}
    mine = rebuild({"strange": {"n": deep}, **good()})
    mine.aggregate(rebuild({"strange": {"n": deep}, **good()}))
    assert MultiKVConnectorStats.reduce(mine)["one"].items() >= {"lookups": 2, "hits": 2}.items()
    lasting.front.metrics.observe({"one": {"n": deep}, "kvobs": good()["kvobs"]})
    faults.take()


OTHERS: dict[str, dict[str, Any]] = {
    "older": {"v": VERSION - 1},
    "newer": {"v": VERSION + 1, "counts": {"h": [1, 2]}, "more": [1]},
    "other table": {"table": 1},
    "a long table": {"table": "x" * 10_000},
    "no version": {"v": None},
    "fewer children": {"children": {"one": "m:C"}},
    "more children": {"children": {**CHILDREN, "three": "m:C"}},
    "other names": {"children": {"one": "m:C", "three": "m:C"}},
    "other order": {"children": dict(reversed(CHILDREN.items()))},
    "names that are none": {"children": {1: "m:C", "two": "m:C"}},
    "a child without a class": {"children": {"one": None, "two": "m:C"}},
    "children that are none": {"children": [["one", "m:C"]]},
}


@pytest.mark.parametrize("how", OTHERS)
def test_numbers_of_another_version_or_others_are_refused(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Slots are positions: with other children they would be counted for the wrong ones."""
    server = ApiServer()
    series = server.series()
    for _ in range(2):
        server.receive({"kvobs": {**TELLING["kvobs"], **OTHERS[how]}})
    assert server.front.value("kvobs_internal_errors_total", None, where="version") == 2
    assert server.series() <= series + 8, "faults and costs of this process"
    assert [
        len(line.getMessage()) < 400 for line in caplog.records if "a different version of kvobs" in line.message
    ] == [True]
    server.receive(good())
    assert server.hits() == 1


@pytest.mark.usefixtures("in_production")
def test_names_that_nobody_configured_are_kept_nowhere() -> None:
    server = ApiServer()
    random.seed(0)
    for i in range(2000):
        own = KvobsStats.of({f"n{i}": f"m{i}:C", f"o{i}": "m:C"}, Increments(dict(GOOD), [], {})).to_dict()
        server.receive({f"n{i}": {"n": 1}, f"q{i}": {}, "kvobs": own})
        for row in ([f"s{i}", 0, 1], ["kvobs_connector_info", 0, *map(str, range(i, i + 5)), 1], ["kvobs_build_info"]):
            server.front.metrics.observe({"kvobs": KvobsStats.of(CHILDREN, Increments({}, [row], {})).data})
    assert server.series() < FEW
    kept = server.front.metrics._totals[0]
    assert [len(found) for found in (kept._counts, kept._opened, kept._marks)] == [4, 0, 0], "hits, and this process"
    assert len(server.log.transfer_stats_accumulator.data) <= stats._ENTRIES_AT_MOST
    server.receive(good())
    assert server.hits() == 1


@pytest.mark.usefixtures("in_production")
def test_entries_without_numbers_do_not_pile_up_in_a_log_that_has_nothing_to_say() -> None:
    server = ApiServer()
    for i in range(3 * stats._ENTRIES_AT_MOST):
        server.receive({f"n{i}": {}})
    assert server.write_log() == "", "vLLM forgets what it has written only"
    assert len(server.log.transfer_stats_accumulator.data) <= stats._ENTRIES_AT_MOST
    server.receive(good())
    assert "one={'lookups': 1, 'hits': 1" in server.write_log(), "there is room for kvobs's own"


@pytest.mark.usefixtures("in_production")
def test_slots_decide_on_no_memory() -> None:
    server = ApiServer()
    for i in range(100):
        far = {**good()["kvobs"], "counts": [10**9 + i, 1], "gauges": {10**9 + i: 1}, "opened": [["x" * 200, 0, 1]]}
        server.receive({"kvobs": far})
    own = server.log.transfer_stats_accumulator["kvobs"].data
    assert (own["counts"], own["gauges"], own["opened"]) == ([], {}, [])
    with pytest.raises(ValueError, match="count 1 of slot 1000000000 is out of range"):
        kvobs_stats._added_up([10**9, 1, -(10**9), 0])


def test_every_class_of_stats_is_one_that_vllm_has() -> None:
    assert set(STATS_CLASSES) <= set(KVConnectorFactory._registry)
