"""Events of a connector are counted by type and medium; what its store holds follows from them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from kvobs.connectors.kv_events import KvEvents, evicts
from kvobs.connectors.sub_connector import SubConnector
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import EVICTED_TOKENS, KV_EVENTS, SAVE_TOKENS, STORED_TOKENS, Signal, slot, word
from tests.engine.connectors_stats import IdleConnector
from tests.support.numbers import numbers, taken

SIZE = 16


def made(cls: type[IdleConnector]) -> tuple[SubConnector, Recorder]:
    recorder = Recorder(1)
    return SubConnector(0, "one", object.__new__(cls), recorder), recorder


def by_medium(recorder: Recorder, signal: Signal) -> dict[str, int]:
    """Return what a page has of a connector's metric, without what is 0."""
    all_numbers = numbers(recorder)
    slots = {medium: word(0, slot(signal, medium)) for medium in signal.labels["medium"]}
    found = {medium: (all_numbers.counts | all_numbers.gauges).get(at, 0) for medium, at in slots.items()}
    return {medium: n for medium, n in found.items() if n}


def stored(hashes: Sequence[int], medium: str | None = "CPU", size: int = SIZE, group: int | None = None) -> Any:
    return BlockStored(list(hashes), None, [0] * size * len(hashes), size, None, medium, None, group_idx=group)


def removed(hashes: Sequence[int], medium: str | None = "CPU", group: int | None = None) -> Any:
    return BlockRemoved(list(hashes), medium, group_idx=group)


def events_of(evicting: Sequence[str] = ("cpu",), group: int = 0) -> tuple[KvEvents, Recorder]:
    recorder = Recorder(1)
    return KvEvents(recorder, 0, group=group, evicts=evicting), recorder


def test_kv_events_are_counted_by_type_and_medium_and_passed_on() -> None:
    def stored(medium: str | None) -> Any:
        return BlockStored([1], None, [1], 16, None, medium, None)

    odd = SimpleNamespace(medium=["unhashable"])
    events = [stored("CPU"), BlockRemoved([1], "cpu"), stored("cpu"), stored("STORAGE"), stored("nvme"), stored(None)]
    events += [AllBlocksCleared(), odd]

    class Publishes(IdleConnector):
        def take_events(self) -> Any:
            return iter(events)

    connector, recorder = made(Publishes)
    assert connector.take_events() == tuple(events)
    grown = taken(recorder).counts
    seen = {
        (kind, medium): grown.get(word(0, slot(KV_EVENTS, kind, medium)), 0)
        for kind in KV_EVENTS.labels["type"]
        for medium in KV_EVENTS.labels["medium"]
    }
    assert seen == {
        ("stored", "cpu"): 2, ("stored", "storage"): 1, ("stored", "other"): 2,
        ("removed", "cpu"): 1, ("removed", "storage"): 0, ("removed", "other"): 1,
    }  # fmt: skip


def test_saved_tokens_are_from_events_with_one_groups_tokens() -> None:
    """A sliding window's events are about the same tokens, or have none."""

    def stored(tokens: int, medium: str | None, group: int | None = None, kind: Any = BlockStored) -> Any:
        return kind([1], None, [0] * tokens, 16, None, medium, None, group_idx=group)

    odd = SimpleNamespace(medium="cpu", token_ids=[1])
    events = [stored(16, "CPU"), stored(32, "cpu", 1), stored(16, "cpu", 0), stored(48, "STORAGE", 1), stored(8, None)]
    recorder = Recorder(1)
    KvEvents(recorder, 0, group=1).count([*events, stored(0, "STORAGE"), BlockRemoved([1], "cpu"), odd])
    grown = taken(recorder).counts
    saved = {medium: grown.get(word(0, slot(SAVE_TOKENS, medium))) for medium in SAVE_TOKENS.labels["medium"]}
    assert saved == {"cpu": 48, "storage": 48, "other": 8}
    KvEvents(recorder, 0).count([stored(0, "cpu")])
    assert word(0, slot(SAVE_TOKENS, "cpu")) not in taken(recorder).counts, "unknown is not zero"


STEPS: st.SearchStrategy[Any] = st.lists(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.sets(st.integers(0, 9), min_size=1), st.sampled_from(["CPU", "STORAGE"])),
            st.tuples(st.just("remove"), st.sets(st.integers(0, 9), min_size=1), st.sampled_from(["CPU", "STORAGE"])),
            st.tuples(st.just("clear"), st.just(set()), st.none()),
        ),
        max_size=4,
    ),
    max_size=12,
)


@given(STEPS)
@settings(max_examples=50)
def test_the_store_holds_what_a_set_of_hashes_would(steps: list[list[tuple[str, set[int], str | None]]]) -> None:
    """The model keeps every hash; a connector stores what it does not have, and removes what it has."""
    events, recorder = events_of(("cpu", "storage"))
    holds: dict[str, set[int]] = {"cpu": set(), "storage": set()}
    gone = dict.fromkeys(holds, 0)
    for step in steps:
        batch: list[Any] = []
        for kind, hashes, medium in step:
            if medium is None:
                batch.append(AllBlocksCleared())
                holds = {name: set() for name in holds}
                continue
            own = holds[medium.lower()]
            moved = hashes - own if kind == "store" else hashes & own
            if not moved:
                continue
            if kind == "store":
                own |= moved
                batch.append(stored(sorted(moved), medium))
            else:
                own -= moved
                gone[medium.lower()] += len(moved)
                batch.append(removed(sorted(moved), medium))
        events.count(batch)
        assert by_medium(recorder, STORED_TOKENS) == {name: SIZE * len(own) for name, own in holds.items() if own}
        assert by_medium(recorder, EVICTED_TOKENS) == {name: SIZE * n for name, n in gone.items() if n}


def test_evictions_from_an_earlier_life_leave_no_negative_store() -> None:
    events, recorder = events_of()
    events.count([stored([1]), removed([7, 8, 9])])
    assert by_medium(recorder, STORED_TOKENS) == {}
    assert by_medium(recorder, EVICTED_TOKENS) == {"cpu": 3 * SIZE}
    events.count([stored([2, 3])])
    assert by_medium(recorder, STORED_TOKENS) == {"cpu": 2 * SIZE}


def test_only_the_group_with_all_tokens_counts() -> None:
    events, recorder = events_of(group=1)
    events.count([stored([1, 2], group=1), stored([1, 2], group=0, size=4), removed([1], group=0)])
    assert by_medium(recorder, STORED_TOKENS) == {"cpu": 2 * SIZE}
    assert by_medium(recorder, EVICTED_TOKENS) == {}


def test_blocks_without_a_size_are_no_tokens() -> None:
    """OffloadingConnector without self_describing_kv_events."""
    events, recorder = events_of()
    events.count([stored([1, 2], size=0), removed([1])])
    assert by_medium(recorder, STORED_TOKENS) == by_medium(recorder, EVICTED_TOKENS) == {}
    events.count([stored([3])])
    assert by_medium(recorder, STORED_TOKENS) == {"cpu": 2 * SIZE}, "one of them is larger than nothing"


def test_a_store_that_never_reports_what_leaves_has_no_size() -> None:
    events, recorder = events_of(())
    events.count([stored([1, 2], "cpu"), stored([3, 4, 5], "STORAGE")])
    assert by_medium(recorder, STORED_TOKENS) == {}
    events.count([removed([3], "STORAGE")])
    assert by_medium(recorder, STORED_TOKENS) == {"storage": 2 * SIZE}


@pytest.mark.parametrize("answer", [True, None, False])
def test_a_reset_without_an_event_empties_the_memory(answer: bool | None) -> None:
    """OffloadingConnector publishes nothing at a reset; events from before it come with the next step."""
    late: list[Any] = []

    class OffloadingConnector(IdleConnector):
        def take_events(self) -> Any:
            return [late.pop(0)] if late else []

        def reset_cache(self) -> bool | None:
            return answer

    connector, recorder = made(OffloadingConnector)
    late += [stored([1, 2]), stored([3])]
    connector.take_events()
    assert connector.reset_cache() is answer
    held = {} if answer else {"cpu": 2 * SIZE}
    assert by_medium(recorder, STORED_TOKENS) == held
    connector.take_events()
    connector.take_events()
    assert by_medium(recorder, STORED_TOKENS) == ({} if answer else {"cpu": 3 * SIZE})
    late.append(stored([4]))
    connector.take_events()
    assert by_medium(recorder, STORED_TOKENS) == {"cpu": SIZE if answer else 4 * SIZE}


def test_a_watcher_gets_the_blocks_of_the_group_in_their_order() -> None:
    told: list[tuple[str, int, str, Sequence[int | bytes]]] = []

    class Watching:
        def stored(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
            told.append(("stored", index, medium, hashes))

        def evicted(self, index: int, medium: str, hashes: Sequence[int | bytes]) -> None:
            told.append(("evicted", index, medium, hashes))

    events, _ = events_of()
    events.watcher = Watching()
    events.count([stored([1, 2]), removed([1]), stored([9], group=3), AllBlocksCleared()])
    assert told == [("stored", 0, "cpu", [1, 2]), ("evicted", 0, "cpu", [1])]


def test_subclasses_of_known_connectors_report_evictions() -> None:
    class SimpleCPUOffloadConnector: ...

    class Own(SimpleCPUOffloadConnector): ...

    assert evicts(Own) == {"cpu", "storage"}
    assert not evicts(SimpleNamespace)
