"""kvobs's numbers merge exactly in any order, survive pickle and msgpack, and are read with suspicion."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.schema.signals import CHILD_WIDTH, PROCESS_WIDTH, TABLE_DIGEST
from kvobs.schema.spans import Record
from kvobs.telemetry.payload import payload
from kvobs.telemetry.payload.payload import LONG, KvobsStats, as_dict
from kvobs.telemetry.payload.wire import BASE, VERSION, packed
from kvobs.telemetry.recording.journal import Group
from kvobs.telemetry.recording.taken import Taken, nothing
from tests.support.contexts import json_values, record
from tests.support.span_records import records

CHILDREN = {"a": "m:C", "b": "m:C"}
sizes = st.integers(1, 10**15) | st.integers(BASE - 2, BASE + 2) | st.integers(1, 2**600)
counts = st.dictionaries(st.integers(0, PROCESS_WIDTH + 2 * CHILD_WIDTH - 1), sizes, max_size=8)
rows = st.tuples(st.sampled_from(["kvobs_call_errors_total", "kvobs_slowest_rank_total"]), st.integers(0, 1))
opened = st.dictionaries(rows, st.integers(1, 5)).map(lambda d: [[*key, "x", n] for key, n in d.items()])
parts = st.builds(Taken, counts, opened, st.just({}), st.just([]))


def numbers(taken: Taken) -> KvobsStats:
    return KvobsStats.of(CHILDREN, taken)


def added(taken: list[Taken]) -> tuple[dict[int, int], dict[tuple[Any, ...], int]]:
    """Add up the plain way."""
    by_slot: dict[int, int] = {}
    by_row: dict[tuple[Any, ...], int] = {}
    for part in taken:
        for slot, n in part.counts.items():
            by_slot[slot] = by_slot.get(slot, 0) + n
        for *key, n in part.opened:
            by_row[tuple(key)] = by_row.get(tuple(key), 0) + n
    return by_slot, by_row


@given(st.lists(parts, min_size=1, max_size=5), st.randoms())
def test_numbers_merge_exactly_in_any_order_and_survive_every_hop(taken: list[Taken], shuffle: random.Random) -> None:
    expected = added(taken)
    shuffle.shuffle(taken)
    merged, *others = [pickle.loads(pickle.dumps(numbers(part))) for part in copy.deepcopy(taken)]
    for other in others:
        merged.aggregate(other)
    arrived = KvobsStats.read(msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict())))
    assert added([arrived.taken()]) == expected
    assert arrived.children == CHILDREN


@given(st.lists(counts, min_size=1, max_size=9), st.sampled_from([0, 20]))
def test_what_was_merged_is_added_up_once_it_is_long(taken: list[dict[int, int]], few: int) -> None:
    merged, *others = [numbers(Taken(part, [], {})) for part in taken]
    for other in others:
        merged.aggregate(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "FEW", few)
        is_long = len(merged.data["counts"]) > few
        once = merged.to_dict()["counts"]
    total = added([Taken(part, [], {}) for part in taken])[0]
    assert merged.taken().counts == total
    assert KvobsStats(data=merged.data).taken().counts == total
    assert not is_long or len(once) <= len(packed(total)) + 2
    assert sum(once[::2]) == 0


def test_a_list_of_parts_does_not_grow_without_end() -> None:
    mine = numbers(nothing())
    part = numbers(Taken(dict.fromkeys(range(100), 1), [], {}))
    for _ in range(1000):
        mine.aggregate(part)
        assert len(mine.data["counts"]) <= LONG
    assert mine.taken().counts == dict.fromkeys(range(100), 1000)


def test_few_parts_are_added_up_by_who_reads_them_and_another_versions_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore makes the payload before a step's outputs go out."""
    monkeypatch.setattr(payload, "FEW", 8)
    merged = numbers(Taken({1: 1}, [], {})).aggregate(numbers(Taken({1: 2}, [], {})))
    assert merged.to_dict()["counts"] == [1, 1, -1, 0, 1, 2, -1, 0]
    assert merged.aggregate(numbers(Taken({1: 4}, [], {}))).to_dict()["counts"] == [1, 7, -1, 0]
    other = {"v": VERSION + 1, "table": TABLE_DIGEST, "children": {}, "counts": [1, 1, -1, 0] * 3}
    assert KvobsStats(data=copy.deepcopy(other)).to_dict() == other


def test_numbers_that_were_nothing_do_not_grow_those_that_still_are() -> None:
    """Worker and scheduler of one process each begin with nothing."""
    for _ in range(2):
        mine = numbers(nothing())
        mine.aggregate(numbers(Taken({1: 1}, [["s", 0, 1]], {1: 1})))
        mine.spend(3, 4)
        assert mine.taken() == Taken({1: 1, 3: 4}, [["s", 0, 1]], {1: 1}, [])
    assert numbers(nothing()).is_empty()


def test_a_payload_without_numbers_says_whose_the_childrens_stats_are_and_takes_numbers_in() -> None:
    """Most steps have one: it is made and read without looking at numbers."""
    children = {"one": "m:C", "two": "m:D"}
    bare, full = KvobsStats.bare(children), KvobsStats.of(children, Taken({3: 4}, [["s", 0, "x", 1]], {5: 6}))
    assert bare.data == KvobsStats.of(children, nothing()).data
    assert (bare.is_bare, full.is_bare) == (True, False)
    read = KvobsStats.read(msgspec.msgpack.decode(msgspec.msgpack.encode(bare.data)))
    assert (read.data, read.children) == (bare.data, children)
    assert read.aggregate(full).taken() == full.taken()
    assert KvobsStats.bare(children).is_bare, "none shares its numbers with another"


@pytest.mark.parametrize("key", ["v", "table"])
def test_what_another_version_sends_is_never_bare(key: str) -> None:
    other = KvobsStats.bare({})
    other.data[key] = 0
    assert not other.is_bare


def test_what_a_peer_has_sent_as_stats_of_another_class_is_merged() -> None:
    sent = numbers(Taken({3: 4}, [], {}))
    assert KvobsStats.bare({}).aggregate(KVConnectorStats(data=sent.to_dict())).taken() == sent.taken()


def test_of_gauges_the_last_one_counts() -> None:
    mine = numbers(Taken({}, [], {1: 5, 2: 6}))
    mine.aggregate(numbers(Taken({}, [], {2: 7})))
    assert mine.taken().gauges == {1: 5, 2: 7}


def test_merging_neither_changes_nor_keeps_its_argument() -> None:
    mine, theirs = KvobsStats(), numbers(Taken({1: 2}, [["s", 0, 1]], {3: 4}))
    before = copy.deepcopy(theirs.data)
    mine.aggregate(theirs)
    mine.spend(5, 7)
    mine.aggregate(numbers(Taken({1: 9}, [["s", 0, 1]], {3: 9})))
    assert theirs.data == before
    assert mine.taken() == Taken({1: 11, 5: 7}, [["s", 0, 2]], {3: 9}, [])


def test_another_versions_numbers_are_kept_and_never_mixed_with_ours() -> None:
    other = {"v": 99, "table": 1, "children": {}, "counts": [1, 40]}
    mine = numbers(Taken({1: 2}, [], {}))
    mine.aggregate(KvobsStats.read(other))
    assert mine.taken().counts == {1: 2}
    theirs = KvobsStats.read(other)
    assert theirs.aggregate(mine).data == other
    assert theirs.taken() == nothing()
    theirs.spend(1, 1)
    assert theirs.to_dict() == other


@pytest.mark.usefixtures("in_production")
def test_malformed_numbers_are_refused_whole_and_counted() -> None:
    sent = numbers(Taken({1: 2}, [["s", 0, 1]], {3: 4})).data
    sent["gauges"][5] = -6
    stats = KvobsStats.read({**sent, "children": {"a": "m:C", "b": 7}})
    assert (stats.taken(), stats.children) == (nothing()._replace(spans=[]), {"a": "m:C"})
    assert faults.take() == {"rebuild": 1}


def test_emptiness_and_reset() -> None:
    assert numbers(nothing()).is_empty()
    for some in (
        Taken({1: 1}, [], {}),
        Taken({}, [["s", 0, 1]], {}),
        Taken({}, [], {1: 0}),
        Taken({}, [], {}, [[record()]]),
    ):
        stats = numbers(some)
        assert not stats.is_empty()
        stats.reset()
        assert stats.is_empty()
        assert stats.is_ours


class Plain(KVConnectorStats):
    """Stats of a child."""


def test_as_dict_reads_every_form() -> None:
    assert as_dict(Plain(data={"n": 1})) == as_dict({"data": {"n": 1}}) == as_dict({"n": 1}) == {"n": 1}
    assert as_dict({"data": 1}) == {"data": 1}
    assert as_dict(7) == {"value": 7}


# --- spans

groups = st.lists(st.lists(records, min_size=1, max_size=2), max_size=3)


@given(st.lists(groups, min_size=1, max_size=4))
def test_spans_survive_every_hop_group_by_group_and_merge_in_order(sent: list[list[Group]]) -> None:
    first, *others = [pickle.loads(pickle.dumps(numbers(Taken({}, [], {}, part)))) for part in sent]
    for other in others:
        first.aggregate(other)
    whole = [group for part in sent for group in part]
    assert first.is_empty() is (not whole)
    arrived = KvobsStats(data=as_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(first.to_dict()))))
    read = [[Record.read(row) for row in group] for group in arrived.taken().spans]
    assert [[one and one._replace(links=tuple(one.links)) for one in group] for group in read] == whole


def test_spans_are_for_who_gets_the_payload_itself() -> None:
    """vLLM's log adds up all payloads of its interval."""
    mine = numbers(Taken({1: 2}, [], {}, [[record()]]))
    before = copy.deepcopy(mine.data)
    log = KvobsStats.read(mine.data)
    for _ in range(3):
        log.aggregate(KvobsStats.read(mine))
    assert (log.data["spans"], log.taken().counts) == ([], {1: 8})
    assert mine.data == before


def test_merging_spans_neither_changes_nor_keeps_its_argument() -> None:
    mine, theirs = KvobsStats(), numbers(Taken({}, [], {}, [[record()]]))
    for _ in range(3):
        mine.aggregate(theirs)
    assert len(mine.taken().spans) == 3
    assert len(theirs.taken().spans) == 1
    mine.reset()
    assert (mine.is_empty(), len(theirs.taken().spans)) == (True, 1)


@given(json_values)
def test_spans_are_groups_in_a_list_or_nothing(sent: Any) -> None:
    stats = KvobsStats(data={"v": VERSION, "table": TABLE_DIGEST, "children": {}, "counts": [], "spans": sent})
    assert stats.taken().spans == [
        group for group in (sent if isinstance(sent, list) else []) if isinstance(group, list)
    ]
    assert KvobsStats.read(stats).data["spans"] == []
