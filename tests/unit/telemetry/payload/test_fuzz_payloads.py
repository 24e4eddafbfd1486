"""Stats of older, newer and broken peers on vLLM's own way into the API server: nothing raises, nothing piles up."""

import copy
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvobs import faults
from kvobs.telemetry.payload import stats
from kvobs.telemetry.payload.stats import Classes, MultiKVConnectorStats, rebuild
from kvobs.testing import transfer_config
from tests.support.contexts import json_values, near_misses
from tests.support.front import Front, metered

CONNECTORS = {"one": "tests.support.scripted:MeteredConnector", "two": "tests.support.scripted:MeteredConnector"}
FEW = 400
STATS_CLASSES = ("NixlConnector", "OffloadingConnector", "MooncakeConnector", "HF3FSKVConnector", "HiSparseConnector")


def good() -> dict[str, Any]:
    return {"one": {"n": 1}, "kvobs": dict(CONNECTORS)}


class ApiServer:
    """What reads payloads there: vLLM's wire, the connectors' metrics, vLLM's periodic log."""

    def __init__(self) -> None:
        self.front = Front(metered("a"), metered("b"), names=["one", "two"])
        self.front.shown._is_over.set()  # kvobs's own numbers come from pages
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

    def things(self, name: str = "one") -> float:
        return self.front.value("scripted_things_total", name) or 0

    def series(self) -> int:
        return sum(len(family.samples) for family in self.front.registry.collect())


class Lasting:
    """One for many examples; another one once its counter was given an infinity, or what no 1 changes."""

    def __init__(self) -> None:
        self._server = ApiServer()

    def server(self) -> ApiServer:
        if not self._server.things() < 2**50:
            self._server = ApiServer()
        return self._server


@pytest.fixture(scope="module")
def lasting() -> Lasting:
    return Lasting()


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
    into = copy.copy(into)
    into[path[0]] = put(into[path[0]], path[1:], value)
    return into


SENT: dict[str, Any] = {"one": {"n": 2}, "two": {"n": 3, "more": {"of": [1]}}, "kvobs": dict(CONNECTORS)}
PLACES = [path for path in places(SENT) if path]


@pytest.mark.usefixtures("in_production")
@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(PLACES), broken), min_size=1, max_size=3))
def test_broken_stats_cost_no_other_anything(lasting: Lasting, wrong: list[tuple[tuple[Any, ...], Any]]) -> None:
    sent = SENT
    for path, value in wrong:
        if path in list(places(sent)):
            sent = put(sent, path, value)
    server = lasting.server()
    series = server.series()
    server.receive(sent)
    if not isinstance(sent, dict):
        return
    server.write_log()
    server = lasting.server()
    before = server.things()
    server.receive(good())
    assert server.things() - before == pytest.approx(1)
    assert server.series() < series + 250


@given(json_values)
def test_no_stats_are_lost_whatever_stands_for_the_classes(sent: Any) -> None:
    classes = Classes.read(sent)
    assert all(type(name) is type(path) is str for name, path in classes.data.items())
    assert rebuild({"other": {"n": 1}, "kvobs": sent})["other"].data == {"n": 1}


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("name", STATS_CLASSES)
@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from(["data", "types", "num_failed_transfers"]) | st.text(max_size=3), broken),
    st.integers(1, 3),
)
def test_connectors_strange_stats_never_raise(name: str, lasting: Lasting, noted: dict[Any, Any], times: int) -> None:
    """NIXL's stats, for one, can't say whether they are empty when a key is missing."""
    server = lasting.server()
    before = server.things()
    for _ in range(times):
        server.receive({name: noted, **good()})
    server.write_log()
    assert server.things() - before == pytest.approx(times)


@pytest.mark.usefixtures("in_production")
def test_stats_nested_too_deep_cost_their_connector_only(lasting: Lasting) -> None:
    deep: Any = 1
    for _ in range(3000):
        deep = {"d": deep}
    mine = rebuild({"strange": {"n": deep}, "other": {"n": 1}})
    mine.aggregate(rebuild({"strange": {"n": deep}, "other": {"n": 1}}))
    assert mine["other"].data == {"n": 2}
    assert "strange" not in MultiKVConnectorStats.reduce(mine)
    lasting.server().front.metrics.observe({"one": {"n": deep}, "kvobs": CONNECTORS})
    faults.take()


OTHERS: dict[str, Any] = {
    "of the version before": {"v": 5, "table": 7, "connectors": CONNECTORS, "counts": [1, 2], "spans": [["x"]]},
    "fewer connectors": {"one": CONNECTORS["one"]},
    "more connectors": {**CONNECTORS, "three": "m:C"},
    "names that are none": {1: "m:C", **CONNECTORS},
    "a connector without a class": {**CONNECTORS, "two": None},
    "a class that is not imported": {**CONNECTORS, "two": "os:system"},
    "a class that is no connector": {**CONNECTORS, "two": "os.path:join"},
    "classes that are none": [["one", "m:C"]],
}


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize("how", OTHERS)
def test_stats_of_other_classes_are_counted_by_their_name(how: str, caplog: pytest.LogCaptureFixture) -> None:
    server = ApiServer()
    for _ in range(2):
        server.receive({"one": {"n": 1}, "two": {"n": 2}, "three": {"n": 3}, "kvobs": OTHERS[how]})
    assert (server.things("one"), server.things("two")) == (2, 4)
    server.write_log()
    assert all(len(line.getMessage()) < 400 for line in caplog.records)


@pytest.mark.usefixtures("in_production")
def test_names_that_nobody_configured_are_kept_nowhere() -> None:
    server = ApiServer()
    for i in range(2000):
        server.receive({f"n{i}": {"n": 1}, f"q{i}": {}, "kvobs": {f"n{i}": f"m{i}:C", f"o{i}": "m:C"}})
    assert server.series() < FEW
    kept = server.log.transfer_stats_accumulator.data
    assert len(kept) <= stats._ENTRIES_AT_MOST + 1
    assert len(kept["kvobs"].data) <= 2
    server.receive(good())
    assert server.things() == 1


@pytest.mark.usefixtures("in_production")
def test_entries_without_numbers_do_not_pile_up_in_an_idle_log() -> None:
    server = ApiServer()
    for i in range(3 * stats._ENTRIES_AT_MOST):
        server.receive({f"n{i}": {}})
    assert server.write_log() == "", "vLLM forgets what it has written only"
    assert len(server.log.transfer_stats_accumulator.data) <= stats._ENTRIES_AT_MOST
    server.receive(good())
    assert "kvobs" in server.log.transfer_stats_accumulator.data, "there is room for the classes"


def test_every_class_of_stats_is_one_that_vllm_has() -> None:
    assert set(STATS_CLASSES) <= set(KVConnectorFactory._registry)
