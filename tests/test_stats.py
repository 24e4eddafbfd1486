"""The payload survives every hop, merges exactly, and nothing that a peer sends makes it raise."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvobs.recorder import WIDTH
from kvobs.signals import LOAD_TOKENS, LOADS, LOOKUPS, TABLE_DIGEST, slot
from kvobs.stats import VERSION, KvobsStats, MultiKVConnectorStats, RawStats, as_dict, class_path, collect, rebuild


class Summed(KVConnectorStats):
    """A child's stats: {"n": count}."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> Summed:
        self.data["n"] = self.data.get("n", 0) + other.data["n"]
        return self

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data.get("n")

    def reduce(self) -> dict[str, int | float]:
        return {"n": self.data["n"]}


class Unmergeable(Summed):
    def aggregate(self, other: KVConnectorStats) -> Summed:
        raise RuntimeError("no")

    def reduce(self) -> dict[str, int | float]:
        raise RuntimeError("no")


class Connector:
    """A class that is registered nowhere."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return Summed(data=data or {})


class BrokenConnector:
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        raise RuntimeError("no")


def payload(**children: KVConnectorStats) -> MultiKVConnectorStats:
    classes = dict.fromkeys(children, class_path(Connector))
    stats = collect(children, classes, [0, 1])
    assert stats is not None
    return stats


def over_the_wire(stats: MultiKVConnectorStats) -> MultiKVConnectorStats:
    """Send it worker -> scheduler -> API server."""
    arrived = pickle.loads(pickle.dumps(stats)).to_dict()
    return rebuild(msgspec.msgpack.decode(msgspec.msgpack.encode(arrived)))


def test_nothing_to_tell_is_none() -> None:
    assert collect({"a": None}, {"a": "m:C"}, []) is None


def test_a_child_of_an_unregistered_class_is_rebuilt_as_what_it_was() -> None:
    arrived = over_the_wire(payload(a=Summed(data={"n": 2})))
    assert isinstance(arrived["a"], Summed)
    assert arrived["a"].data == {"n": 2}
    assert isinstance(arrived["kvobs"], KvobsStats)


@pytest.mark.parametrize(
    "wire",
    [
        {"OffloadingConnector": {"data": {"types": {"x": "counter"}, "data": {"x": {}}}}},  # vLLM 0.11 to 0.29
        {"OffloadingConnector": {"types": {"x": "counter"}, "data": {"x": {}}}},  # vLLM from 0.30 on
        {"OffloadingConnector": OffloadingConnectorStats(data={"types": {"x": "counter"}, "data": {"x": {}}})},
    ],
    ids=["wrapped", "flat", "object"],
)
def test_payloads_without_our_entry_are_rebuilt_by_their_registered_name(wire: dict[str, Any]) -> None:
    stats = rebuild(wire)
    assert isinstance(stats["OffloadingConnector"], OffloadingConnectorStats)
    assert stats["OffloadingConnector"].data == {"types": {"x": "counter"}, "data": {"x": {}}}


def test_mixtures_are_rebuilt() -> None:
    own = KvobsStats.of({"b": class_path(Connector)}, [])
    stats = rebuild({"a": Summed(data={"n": 1}), "b": {"data": {"n": 2}}, "kvobs": own, "c": {"n": 3}, "d": 7})
    assert [type(stats[name]) for name in "abcd"] == [Summed, Summed, RawStats, RawStats]
    assert stats["d"].data == {"value": 7}


@pytest.mark.parametrize(
    "path", ["nowhere:Class", "tests.test_stats:Nothing", "tests.test_stats:BrokenConnector", ":", ""]
)
def test_a_child_that_can_not_be_rebuilt_keeps_its_raw_numbers(path: str) -> None:
    wire = {"a": {"n": 2}, "kvobs": {"v": 1, "children": {"a": path}, "counts": []}}
    stats = rebuild(wire)
    assert isinstance(stats["a"], RawStats)
    assert stats["a"].data == {"n": 2}


def test_no_data_is_an_empty_mapping() -> None:
    assert rebuild(None).data == {}
    assert rebuild(None).is_empty()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
own_entry = st.fixed_dictionaries(
    {"v": st.just(VERSION) | anything, "table": st.just(TABLE_DIGEST) | anything},
    optional={
        "children": anything | st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
        "counts": anything | st.lists(st.integers(), max_size=6),
    },
)


@given(
    st.dictionaries(st.text(max_size=5) | st.just("OffloadingConnector"), anything, max_size=3), anything | own_entry
)
def test_whatever_a_peer_sends_nothing_is_raised(wire: dict[str, Any], own: Any) -> None:
    for data in (wire, {**wire, "kvobs": own}, own):
        stats = rebuild(copy.deepcopy(data))
        stats.aggregate(rebuild(copy.deepcopy(data)))
        stats.reduce()
        stats.is_empty()
        stats.to_dict()


counts = st.dictionaries(st.integers(0, 2 * WIDTH - 1), st.integers(1, 10**6), max_size=8)


@given(st.lists(counts, min_size=1, max_size=5), st.randoms())
def test_counts_merge_exactly_in_any_order(parts: list[dict[int, int]], shuffle: Any) -> None:
    total: dict[int, int] = {}
    for part in parts:
        for key, n in part.items():
            total[key] = total.get(key, 0) + n
    shuffle.shuffle(parts)
    flat = [[number for pair in part.items() for number in pair] for part in parts]
    merged, *rest = [MultiKVConnectorStats(data={"kvobs": KvobsStats.of({"a": "m:C", "b": "m:C"}, f)}) for f in flat]
    for other in rest:
        merged.aggregate(other)
    own = merged["kvobs"]
    assert isinstance(own, KvobsStats)
    assert own.counts() == total


def test_aggregate_neither_changes_nor_keeps_its_argument() -> None:
    mine, theirs = payload(), payload(a=Summed(data={"n": 1}))
    before = copy.deepcopy(theirs.to_dict())
    mine.aggregate(theirs).aggregate(payload(a=Summed(data={"n": 5})))
    assert theirs.to_dict() == before
    assert mine["a"].data == {"n": 6}


def test_another_versions_counts_are_not_mixed_with_ours() -> None:
    mine = KvobsStats.of({"a": "m:C"}, [1, 2])
    mine.aggregate(KvobsStats(data={"v": 99, "table": 1, "children": {}, "counts": [1, 40]}))
    assert mine.counts() == {1: 2}


def test_stats_that_can_not_be_merged_keep_their_raw_numbers() -> None:
    mine = MultiKVConnectorStats(data={"a": Unmergeable(data={"n": 1})})
    mine.aggregate(MultiKVConnectorStats(data={"a": Unmergeable(data={"n": 2})}))
    assert isinstance(mine["a"], RawStats)
    assert mine["a"].data == {"n": 3}


def test_the_log_has_one_line_for_each_child_that_has_something_to_say() -> None:
    flat = [WIDTH + slot(LOOKUPS, "hit"), 3, WIDTH + slot(LOADS, "async", "ok"), 2, WIDTH + slot(LOAD_TOKENS), 640]
    own = KvobsStats.of({"a": "m:C", "b": "m:C", "c": "m:C"}, flat)
    stats = MultiKVConnectorStats(data={"kvobs": own, "b": Summed(data={"n": 7}), "c": Unmergeable(data={"n": 1})})
    assert stats.reduce() == {"b": "3 lookups, 2 loads of 640 tokens; n=7"}


def test_reset_and_emptiness_reach_every_part() -> None:
    stats = payload(a=Summed(data={"n": 1}))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_items_are_read_and_written_by_name() -> None:
    stats = MultiKVConnectorStats()
    stats["a"] = Summed(data={"n": 1})
    assert stats["a"].data == {"n": 1}


def test_as_dict_reads_every_form() -> None:
    assert as_dict(Summed(data={"n": 1})) == as_dict({"data": {"n": 1}}) == as_dict({"n": 1}) == {"n": 1}
    assert as_dict({"data": 1}) == {"data": 1}
