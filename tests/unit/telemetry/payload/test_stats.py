"""The connectors' own stats survive every hop, merge as their classes do, and nothing that a peer sends raises."""

import copy
import pickle
import re
from ast import literal_eval
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorStats

import kvobs
from kvobs import faults
from kvobs.telemetry.payload import stats
from kvobs.telemetry.payload.stats import Classes, MultiKVConnectorStats, RawStats, class_path, rebuild
from tests.support.scripted import Stats


class Looked(Stats):
    def reduce(self) -> dict[str, int]:
        return {"lookups": self.data["n"]}


class Unmergeable(Stats):
    def aggregate(self, other: KVConnectorStats) -> Stats:
        raise RuntimeError("no")

    def reduce(self) -> dict[str, int]:
        raise RuntimeError("no")


class Connector(KVConnectorBase_V1):
    """A class that is registered nowhere."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Stats(data=data or {})


class Outer:
    class Inner(Connector):
        """A class within another."""


class BrokenConnector(KVConnectorBase_V1):
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        raise RuntimeError("no")


def payload(**connectors: KVConnectorStats) -> MultiKVConnectorStats:
    classes = dict.fromkeys(connectors, class_path(Connector))
    return MultiKVConnectorStats(data={**connectors, "kvobs": Classes.of(classes)})


@pytest.mark.parametrize("cls", [Connector, Outer.Inner])
def test_an_unregistered_class_is_rebuilt_as_what_it_was(cls: type) -> None:
    """From the worker by way of the scheduler to the API server."""
    ours = Classes.of({"a": class_path(cls)})
    sent = pickle.loads(pickle.dumps(MultiKVConnectorStats(data={"kvobs": ours, "a": Stats(data={"n": 2})})))
    arrived = rebuild(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_dict())))
    assert ours.data["a"].partition(":")[2] == cls.__qualname__
    assert isinstance(arrived["a"], Stats)
    assert arrived["a"].data == {"n": 2}
    assert isinstance(arrived["kvobs"], Classes)
    assert arrived["kvobs"].data == ours.data


def test_mixtures_are_rebuilt() -> None:
    ours = Classes.of({"b": class_path(Connector)})
    raw: dict[str, Any] = {"c": {"n": 3}, "d": 7, "e": {"data": 1}}
    stats = rebuild({"a": Stats(data={"n": 1}), "b": {"data": {"n": 2}}, "kvobs": ours, **raw})
    assert [type(stats[name]) for name in "abcd"] == [Stats, Stats, RawStats, RawStats]
    assert [stats[name].data for name in "bcde"] == [{"n": 2}, {"n": 3}, {"value": 7}, {"data": 1}]
    assert rebuild(None).data == {}


@pytest.mark.parametrize("path", ["nowhere:Class", f"{__name__}:Nothing", f"{__name__}:BrokenConnector", ":", ""])
def test_a_connector_without_rebuilding_keeps_its_raw_numbers(path: str) -> None:
    stats = rebuild({"a": {"n": 2}, "kvobs": {"a": path}})
    assert isinstance(stats["a"], RawStats)
    assert stats["a"].data == {"n": 2}


def test_raw_numbers_are_summed_at_any_depth_and_not_shared() -> None:
    mine, theirs = RawStats(data={}), RawStats(data={"n": 1, "deep": {"of": {"n": 1}}, "list": [1], "is": True})
    for _ in range(2):
        mine.aggregate(theirs)
    assert mine.data == {"n": 2, "deep": {"of": {"n": 2}}, "list": [1], "is": True}
    mine.data["deep"]["of"]["n"] = mine.data["list"][0] = 9
    assert theirs.data == {"n": 1, "deep": {"of": {"n": 1}}, "list": [1], "is": True}


class SilentConnector(KVConnectorBase_V1):
    """Has stats, and nothing to make of them in the API server: the base class's answer is None."""


@pytest.mark.parametrize("router", [stock.MultiConnector, kvobs.MultiConnector], ids=["stock", "kvobs"])
def test_a_connector_that_makes_nothing_of_its_stats_is_left_out(router: Any) -> None:
    wire: dict[str, Any] = {"ExampleConnector": {"n": 2}}
    if router is kvobs.MultiConnector:
        wire = {"a": {"n": 3}, "kvobs": {"a": class_path(SilentConnector)}}
    assert set(router.build_kv_connector_stats(wire).data) <= {"kvobs"}


def test_aggregate_neither_changes_nor_keeps_its_argument() -> None:
    mine, theirs = payload(), payload(a=Stats(data={"n": 1}))
    before = copy.deepcopy(theirs.data)
    mine.aggregate(theirs).aggregate(payload(a=Stats(data={"n": 5})))
    assert theirs.data == before
    assert mine["a"].data == {"n": 6}


@pytest.mark.usefixtures("in_production")
def test_classes_that_can_not_be_merged_are_no_connectors_fault(caplog: pytest.LogCaptureFixture) -> None:
    ours: dict[str, Any] = {"kvobs": RawStats(data={}), "a": Stats(data={"n": 1})}
    theirs = MultiKVConnectorStats(data={"kvobs": None, "a": Stats(data={"n": 2})})
    mine = MultiKVConnectorStats(data=ours)
    mine.data["kvobs"].data = None
    mine.aggregate(theirs).aggregate(MultiKVConnectorStats(data=None))
    assert mine["a"].data == {"n": 3}, "which comes after them"
    assert "connector 'kvobs'" not in caplog.text
    assert faults.take() == {"merge": 1}


def test_classes_of_all_ranks_are_from_the_first_with_some() -> None:
    none, mine, theirs = Classes.of({}), {"a": "m:A"}, {"a": "m:A", "b": "m:B"}
    merged = none.aggregate(Classes.of(mine)).aggregate(Classes.of(theirs))
    assert merged is none
    assert merged.data == mine
    merged.data["c"] = "m:C"
    assert mine == {"a": "m:A"}, "nothing is shared"


def test_classes_are_no_numbers() -> None:
    """vLLM asks its stats whether they are empty, and writes their summary into its log, after which it resets them."""
    classes = Classes.of({"a": "m:A"})
    assert classes.is_empty()
    assert classes.reduce() == {}
    classes.reset()
    assert classes.data == {"a": "m:A"}
    stats = MultiKVConnectorStats(data={"kvobs": classes})
    assert stats.is_empty()
    assert stats.reduce() == {}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (None, {}),
        (7, {}),
        ([["a", "m:A"]], {}),
        ({"a": "m:A", "b": None, 1: "m:C", "d": ["m:D"]}, {"a": "m:A"}),
        ({"data": {"a": "m:A"}}, {"a": "m:A"}),
        (Classes.of({"a": "m:A"}), {"a": "m:A"}),
        ({"v": 5, "table": 1, "connectors": {"a": "m:A"}, "counts": [0, 1]}, {}),
    ],
    ids=["none", "a number", "a list", "no texts", "wrapped", "an object", "of an older version"],
)
def test_of_a_peers_classes_those_that_are_texts_are_read(sent: Any, read: dict[str, str]) -> None:
    assert Classes.read(sent).data == read
    stats = rebuild({"kvobs": sent, "a": {"n": 1}})
    assert stats["a"].data == {"n": 1}


def test_stats_that_can_not_be_merged_keep_their_raw_numbers() -> None:
    mine = MultiKVConnectorStats(data={"a": Unmergeable(data={"n": 1})})
    mine.aggregate(MultiKVConnectorStats(data={"a": Unmergeable(data={"n": 2})}))
    assert isinstance(mine["a"], RawStats)
    assert mine["a"].data == {"n": 3}


def test_the_log_has_each_connectors_own_summary() -> None:
    """What kvobs counts is in a line of kvobs's own: see ``kvobs.export.summary``."""
    stats = payload(a=Stats(data={}), b=Looked(data={"n": 7}), c=Unmergeable(data={"n": 1}))
    assert stats.reduce() == {"b": {"lookups": 7}}


@pytest.mark.parametrize("cls", [stock.MultiKVConnectorStats, MultiKVConnectorStats], ids=["stock", "kvobs"])
def test_the_log_line_has_a_dict_of_numbers_per_connector(cls: Any) -> None:
    """As readers of stock's line expect it: their pattern is name={metric: number}."""
    stats = cls(data={"a": Stats(data={"n": 1}), "b": Stats(data={"n": 2})})
    if cls is MultiKVConnectorStats:
        stats["kvobs"] = Classes.of({"a": "m:C", "b": "m:C"})
    said: list[str] = []
    logging = KVConnectorLogging(None)
    logging.transfer_stats_accumulator = stats
    logging.log(lambda form, *args: said.append(form % args))
    (line,) = said
    assert line.startswith("KV Transfer metrics: ")
    found = dict(re.findall(r"(\w+)=(\{.*?\})", line))
    assert {name: literal_eval(numbers)["n"] for name, numbers in found.items()} == {"a": 1, "b": 2}


class Unreadable(Stats):
    def is_empty(self) -> bool:
        raise RuntimeError("no")


def test_stats_that_cannot_answer_whether_they_are_empty_stay(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM drops empty ones."""
    assert MultiKVConnectorStats(data={"one": Stats(data={})}).is_empty()
    assert not MultiKVConnectorStats(data={"one": Stats(data={}), "two": Unreadable(data={})}).is_empty()
    assert "the stats of connector 'two' can't be read" in caplog.text


def test_stats_for_vllms_rust_front_end_have_vllms_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_is_for_rust", lambda: True)
    classes = {"one": "m:Connector", "two": "m:Connector", "three": "m:Outer.OtherConnector"}
    data: dict[str, KVConnectorStats] = {"kvobs": Classes.of(classes)}
    data |= {name: Stats(data={"n": n}) for n, name in enumerate([*classes, "Stranger"], 1)}
    sent = MultiKVConnectorStats(data=data)
    summed = {"Connector": 3, "OtherConnector": 3, "Stranger": 4}
    theirs = {name: Stats(data={"n": n}) for name, n in summed.items()}
    assert sent.to_dict() == stock.MultiKVConnectorStats(data=theirs).to_dict()
    assert sent.to_dict() == sent.to_dict(), "nothing is added up twice"
    assert data["one"].data == {"n": 1}


class NotCopied(Stats):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("cannot pickle a lock")


@pytest.mark.usefixtures("in_production")
def test_stats_unfit_for_the_rust_front_end_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_is_for_rust", lambda: True)
    data: dict[str, KVConnectorStats] = {"one": NotCopied(data={"n": 1}), "two": Stats(data={"n": 2})}
    assert MultiKVConnectorStats(data=data).to_dict() == {"two": {"n": 2}}
    assert faults.take() == {"merge": 1}
