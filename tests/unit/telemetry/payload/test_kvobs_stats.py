"""kvobs's numbers merge exactly in any order, survive pickle and msgpack, and are read with suspicion."""

import copy
import pickle
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs import faults
from kvobs.probe.increments import Increments
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import CHILD_WIDTH, PROCESS_WIDTH, TABLE_DIGEST, slot
from kvobs.schema.spans import Record
from kvobs.telemetry.payload import kvobs_stats
from kvobs.telemetry.payload.kvobs_stats import LONG, KvobsStats, as_dict, summarize
from kvobs.telemetry.payload.wire import MOST, ROWS, VERSION, packed
from tests.support.contexts import record, records

CHILDREN = {"a": "m:C", "b": "m:C"}
sizes = st.integers(1, 10**15) | st.integers(2**53 - 2, 2**53 + 2) | st.integers(1, MOST // 10)
counts = st.dictionaries(st.integers(0, PROCESS_WIDTH + 2 * CHILD_WIDTH - 1), sizes, max_size=8)
rows = st.tuples(st.sampled_from(["kvobs_call_errors_total", "kvobs_slowest_rank_total"]), st.integers(0, 1))
opened = st.dictionaries(rows, st.integers(1, 5)).map(lambda d: [[*key, "x", n] for key, n in d.items()])
gauges = st.dictionaries(st.integers(0, 9), st.integers(0, 2**62), max_size=3)
groups = st.lists(st.lists(records, min_size=1, max_size=2), max_size=2)
parts = st.builds(Increments, counts, opened, gauges, groups)


def numbers(increments: Increments) -> KvobsStats:
    return KvobsStats.of(CHILDREN, increments)


def added(parts: list[Increments]) -> Increments:
    by_slot: Counter[int] = Counter()
    by_row: Counter[tuple[Any, ...]] = Counter()
    last: dict[int, int] = {}
    for part in parts:
        by_slot.update(part.counts)
        by_row.update({tuple(key): n for *key, n in part.opened})
        last |= part.gauges
    spans = [group for part in parts for group in part.spans]
    return Increments(dict(by_slot), [[*key, n] for key, n in by_row.items()], last, spans)


@given(st.lists(parts, min_size=1, max_size=5))
def test_numbers_merge_exactly_survive_every_hop_and_share_nothing(sent: list[Increments]) -> None:
    others = [pickle.loads(pickle.dumps(numbers(part))) for part in copy.deepcopy(sent)]
    before = copy.deepcopy([other.data for other in others])
    merged = KvobsStats()
    for other in others:
        merged.aggregate(other)
    assert [other.data for other in others] == before
    arrived = KvobsStats(data=as_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(merged.to_dict()))))
    expected, received = added(sent), arrived.increments()
    assert received[:3] == expected[:3]
    spans = [[Record.read(row) for row in group] for group in received.spans]
    assert [[one and one._replace(links=tuple(one.links)) for one in group] for group in spans] == expected.spans
    for_log = KvobsStats.read(arrived)  # which adds up all payloads of its interval
    assert (for_log.increments(), for_log.children) == (expected._replace(spans=[]), CHILDREN)


@given(st.lists(counts, min_size=1, max_size=9), st.sampled_from([0, 20]))
def test_merged_parts_are_added_up_once_they_are_many(taken: list[dict[int, int]], few: int) -> None:
    merged, *others = [numbers(Increments(part, [], {})) for part in taken]
    for other in others:
        merged.aggregate(other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvobs_stats, "FEW", few)
        is_long = len(merged.data["counts"]) > few
        once = merged.to_dict()["counts"]
    total = added([Increments(part, [], {}) for part in taken]).counts
    assert merged.increments().counts == total
    assert KvobsStats(data=merged.data).increments().counts == total
    assert not is_long or len(once) <= len(packed(total)) + 2
    assert sum(once[::2]) == 0


def test_a_list_of_parts_does_not_grow_without_end() -> None:
    mine = numbers(Increments.none())
    part = numbers(Increments(dict.fromkeys(range(100), 1), [], {}))
    for _ in range(1000):
        mine.aggregate(part)
        assert len(mine.data["counts"]) <= LONG
    assert mine.increments().counts == dict.fromkeys(range(100), 1000)
    for first in (0, ROWS):
        mine.aggregate(numbers(Increments({}, [["s", 0, str(i), 1] for i in range(first, first + ROWS)], {})))
    assert len(mine.data["opened"]) == ROWS


def test_few_parts_are_added_up_by_who_reads_them_and_another_versions_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineCore makes the payload before a step's outputs go out."""
    monkeypatch.setattr(kvobs_stats, "FEW", 8)
    merged = numbers(Increments({1: 1}, [], {})).aggregate(numbers(Increments({1: 2}, [], {})))
    assert merged.to_dict()["counts"] == [1, 1, -1, 0, 1, 2, -1, 0]
    assert merged.aggregate(numbers(Increments({1: 4}, [], {}))).to_dict()["counts"] == [1, 7, -1, 0]
    other = {"v": VERSION + 1, "table": TABLE_DIGEST, "children": {}, "counts": [1, 1, -1, 0] * 3}
    assert KvobsStats(data=copy.deepcopy(other)).to_dict() == other


def test_a_payload_without_numbers_says_whose_the_childrens_stats_are_and_takes_numbers_in() -> None:
    """Most steps have one: it is made and read without looking at numbers."""
    children = {"one": "m:C", "two": "m:D"}
    bare, full = KvobsStats.bare(children), KvobsStats.of(children, Increments({3: 4}, [["s", 0, "x", 1]], {5: 6}))
    assert bare.data == KvobsStats.of(children, Increments.none()).data
    assert (bare.is_bare, full.is_bare) == (True, False)
    read = KvobsStats.read(msgspec.msgpack.decode(msgspec.msgpack.encode(bare.data)))
    assert (read.data, read.children) == (bare.data, children)
    assert read.aggregate(full).increments() == full.increments()
    assert KvobsStats.bare(children).is_bare, "none shares its numbers with another"


def test_peers_stats_of_another_class_are_merged() -> None:
    sent = numbers(Increments({3: 4}, [], {}))
    assert KvobsStats.bare({}).aggregate(KVConnectorStats(data=sent.to_dict())).increments() == sent.increments()


def test_another_versions_numbers_are_kept_and_never_mixed_with_ours() -> None:
    other = {"v": 99, "table": 1, "children": {}, "counts": [1, 40]}
    mine = numbers(Increments({1: 2}, [], {}))
    mine.aggregate(KvobsStats.read(other))
    assert mine.increments().counts == {1: 2}
    theirs = KvobsStats.read(other)
    assert theirs.aggregate(mine).data == other
    assert theirs.increments() == Increments.none()
    theirs.spend(1, 1)
    assert theirs.to_dict() == other
    for key in ("v", "table"):
        assert not KvobsStats(data={**KvobsStats.bare({}).data, key: 0}).is_bare


@pytest.mark.usefixtures("in_production")
def test_malformed_numbers_are_refused_whole_and_counted() -> None:
    sent = numbers(Increments({1: 2}, [["s", 0, 1]], {3: 4})).data
    sent["gauges"][5] = -6
    stats = KvobsStats.read({**sent, "children": {"a": "m:C", "b": 7}})
    assert (stats.increments(), stats.children) == (Increments.none()._replace(spans=[]), {"a": "m:C"})
    assert faults.take() == {"rebuild": 1}


def test_emptiness_and_reset() -> None:
    assert numbers(Increments.none()).is_empty()
    for some in (
        Increments({1: 1}, [], {}),
        Increments({}, [["s", 0, 1]], {}),
        Increments({}, [], {1: 0}),
        Increments({}, [], {}, [[record()]]),
    ):
        stats = numbers(some)
        assert not stats.is_empty()
        stats.reset()
        assert stats.is_empty()
        assert stats.is_ours


def summary(recorder: Recorder, *names: str) -> dict[str, dict[str, int | float]]:
    return summarize(names, recorder.take())


def test_a_busy_child_in_a_few_numbers() -> None:
    recorder = Recorder(2)
    for outcome, n in {"hit": 3, "miss": 4, "pending": 1}.items():
        recorder.count(1, slot(signals.LOOKUPS, outcome), n)
    for mode, n in {"async": 2, "sync": 1}.items():
        recorder.count(1, slot(signals.LOADS, mode, "ok"), n)
        for _ in range(n):
            recorder.observe(1, signals.LOAD_DURATION, 3_000_000, mode)
    recorder.count(1, slot(signals.LOADS, "async", "failed"))
    recorder.count(1, slot(signals.LOAD_TOKENS), 640)
    recorder.failed(1, "wait_for_save", 0, 5, OSError())
    recorder.observe(1, signals.LOAD_STALL, 12_400_000)
    recorder.observe(1, signals.SAVE_STALL, 400_000)
    recorder.timed(0, "wait_for_save", lambda: None)()
    counted: dict[str, float] = {
        "lookups": 8,
        "hits": 3,
        "loads": 3,
        "load_tokens": 640,
        "failed_loads": 1,
        "errors": 1,
    }
    shown = summary(recorder, "idle", "busy")
    counted |= {"errors": 1, "load_mean_ms": 3.0, "load_p99_ms": 3.01, "estimated_loads": 0, "load_wait_ms": 12}
    assert shown == {"busy": counted}
    assert [*shown["busy"]][3:6] == ["load_tokens", "load_mean_ms", "load_p99_ms"]


def test_a_gain_is_logged_with_the_number_of_its_loads() -> None:
    recorder = Recorder(1)
    recorder.count(0, slot(signals.LOADS, "async", "ok"), 3)
    recorder.count(0, slot(signals.ESTIMATED_LOADS), 2)
    recorder.count(0, slot(signals.PREFILL_SAVED), 5 * 10**8)
    recorder.count(0, slot(signals.LOAD_WAITED), 7 * 10**8)
    assert summary(recorder, "c") == {"c": {"loads": 3, "estimated_loads": 2, "gain_ms": -200}}


@pytest.mark.parametrize(
    ("durations_ms", "shown"), [([1] * 99 + [900], 1.06), ([1] * 98 + [900] * 2, 917.0), ([99_000, 10_000], 58_700.0)]
)
def test_the_99th_percentile_is_the_middle_of_its_bucket(durations_ms: list[int], shown: float) -> None:
    recorder = Recorder(1)
    recorder.count(0, slot(signals.LOADS, "async", "ok"), len(durations_ms))
    for ms in durations_ms:
        recorder.observe(0, signals.LOAD_DURATION, ms * 1_000_000, "async")
    assert summary(recorder, "c")["c"]["load_p99_ms"] == shown


def named(value: object) -> str:
    """Return a name that is the same in each of the processes that run tests: the order of a set is not."""
    return "+".join(sorted(value)) if isinstance(value, set) else str(getattr(value, "name", value))


COUNTED = [
    (signals.LOOKUPS, ("hit",), {"lookups", "hits"}),
    (signals.LOOKUPS, ("miss",), {"lookups"}),
    (signals.LOOKUPS, ("pending",), {"lookups"}),
    *((signals.LOADS, (mode, "ok"), {"loads"}) for mode in ("async", "sync")),
    *((signals.LOADS, (mode, "failed"), {"failed_loads"}) for mode in ("async", "sync")),
    *((signals.LOADS, (mode, "aborted"), {"aborted_loads"}) for mode in ("async", "sync")),
    (signals.LOAD_TOKENS, (), {"load_tokens"}),
    (signals.UNUSED_HIT_TOKENS, ("other_chosen",), {"lost_to_shorter_offer"}),
    (signals.UNUSED_HIT_TOKENS, ("aborted",), set()),
    *((signals.SAVES, (outcome,), {"promised_saves"}) for outcome in signals.SAVES.labels["outcome"]),
    (signals.SLOW_CALLS, ("wait_for_save",), {"slow_calls"}),
    (signals.STRAY_REPORTS, ("load",), set()),
]


@pytest.mark.parametrize(("signal", "values", "keys"), COUNTED, ids=named)
def test_each_count_is_under_its_keys_only(signal: signals.Signal, values: tuple[str, ...], keys: set[str]) -> None:
    recorder = Recorder(2)
    recorder.count(0, slot(signal, *values), 7)
    none = {"estimated_loads": 0} if "loads" in keys else {}
    assert summary(recorder, "one", "two") == ({"one": {**dict.fromkeys(keys, 7), **none}} if keys else {})


@pytest.mark.parametrize(
    ("signal", "key"), [(signals.LOAD_STALL, "load_wait_ms"), (signals.SAVE_STALL, "save_wait_ms")]
)
def test_waits_are_shown_from_a_millisecond_on(signal: signals.Signal, key: str) -> None:
    for ns, shown in ((999_999, {}), (1_000_000, {"c": {key: 1}}), (2_600_000, {"c": {key: 3}})):
        recorder = Recorder(1)
        recorder.observe(0, signal, ns)
        assert summary(recorder, "c") == shown


def test_the_errors_of_a_child_are_its_own() -> None:
    recorder = Recorder(2)
    for _ in range(2):
        recorder.count_error(1, "wait_for_save", 0, 5, OSError())
    recorder.count_error(1, "wait_for_save", 0, 5, KeyError())
    recorder.count_open(0, signals.SLOWEST_RANK, "3")
    assert summary(recorder, "one", "two") == {"two": {"errors": 3}}
