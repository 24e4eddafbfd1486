"""The numbers of loads and saves follow from the reports of ranks, and what is in progress is counted."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.state.ledger import Ledger
from kvobs.state.transfers import InProgress, Load, ReportKind, Save, Slowest, Times
from tests.support.reports import report, took


@pytest.mark.parametrize(
    ("expected", "ranks", "slowest"),
    [
        (2, took(5, 9), Slowest(1, 4)),
        (3, took(7, 3, 7), Slowest(0, 4)),
        (1, took(5, 9), Slowest(1, 4)),
        (1, took(5), None),
        (3, took(5, 9), None),
        (2, took(5) | {1: (109, 0, 0)}, Slowest(0, 5)),
        (2, took(5) | {1: None}, None),
        (3, took(7, 3) | {2: None}, None),
    ],
    ids=[
        "two",
        "three",
        "one is enough",
        "alone",
        "one is missing",
        "one reported before the order",
        "one made no report",
        "one of three made none",
    ],
)
def test_the_slowest_rank_took_longest(expected: int, ranks: dict[int, Times | None], slowest: Slowest | None) -> None:
    load, save = Load(0, 1, True, expected, arrived=ranks), Save(expected=expected, arrived=ranks)
    assert load.slowest == save.slowest == slowest


@pytest.mark.parametrize(
    ("is_async", "arrived_ns", "duration"), [(True, 25, 15), (True, 7, 0), (True, 0, 0), (False, 25, 9), (False, 0, 0)]
)
def test_how_long_a_load_lasts(is_async: bool, arrived_ns: int, duration: int) -> None:
    arrived = took(5, 9) if arrived_ns else {}
    assert Load(0, 16, is_async, 2, 10, arrived=arrived, arrived_ns=arrived_ns).duration_ns == duration


RANKS = range(3)
moments = st.integers(1, 10**10)
offsets = st.sampled_from([0, 50_000_000, -50_000_000, 600 * 10**9, -600 * 10**9]) | st.integers(-(10**12), 10**12)


@given(
    st.sampled_from([ReportKind.RECEIVED, ReportKind.SAVED, ReportKind.SYNC_DONE]),
    st.lists(st.tuples(offsets, moments, moments, moments), min_size=3, max_size=3),
)
def test_no_clock_of_a_rank_changes_a_number(kind: ReportKind, ranks: list[tuple[int, int, int, int]]) -> None:
    """Each rank got its order, took a while and was read some time later; its host's clock is off by an offset."""
    start = 10**18

    def numbers(offset_of: list[int]) -> tuple[int, Slowest | None]:
        ledger = Ledger()
        ledger.propose("r", (0, kind is ReportKind.RECEIVED))
        load = ledger.admit("r", 16 * (kind is not ReportKind.SAVED), len(RANKS), start)
        if kind is ReportKind.SAVED:
            ledger.finish("r", [(0, len(RANKS))], start)
        read = start
        for rank, offset in zip(RANKS, offset_of, strict=True):
            _, late, spent, more = ranks[rank]
            began = start + late + offset
            read = max(read, start + late + spent + more)
            ledger.record(report(rank, kind, "r", 0, began + spent, spent, began), read)
        if load is not None:
            return load.duration_ns, load.slowest
        ((_, _, save),) = ledger.close([], ["r"]).saves
        return save.arrived_ns - save.promised_ns, save.slowest

    found = numbers([offset for offset, *_ in ranks])
    assert found == numbers([0, 0, 0])
    spent = [spent for _, _, spent, _ in ranks]
    waited = max(late + spent + more for _, late, spent, more in ranks)
    assert found[0] == (max(spent) if kind is ReportKind.SYNC_DONE else waited)
    assert found[1] == Slowest(spent.index(max(spent)), max(spent) - min(spent))


@pytest.mark.parametrize(
    ("failed_on", "aborted", "outcome"),
    [(set(), False, "ok"), (set(), True, "aborted"), ({1}, False, "failed"), ({1}, True, "failed")],
)
def test_a_load_fails_if_it_does_on_any_rank(failed_on: set[int], aborted: bool, outcome: str) -> None:
    ended = Load(0, 16, True, 2, failed_on=failed_on, aborted=aborted)
    assert ended.failed is bool(failed_on)
    assert ended.outcome == outcome


REQUESTS = st.sampled_from("abcd")
EVENTS = st.one_of(
    st.tuples(st.just("begin"), REQUESTS, st.integers(0, 3)),
    st.tuples(st.just("end"), REQUESTS, st.just(0)),
    st.tuples(st.just("take late"), REQUESTS, st.integers(0, 9)),
)


@given(st.lists(EVENTS, max_size=30))
def test_open_transfers_are_those_begun_and_not_ended(events: list[tuple[str, str, int]]) -> None:
    live: list[tuple[str, int, int]] = []
    taken: set[int] = set()  # when those began that were taken as late
    in_progress = InProgress[str]()
    for now_ns, (what, request, tokens) in enumerate(events, 1):
        is_in = request in [each[0] for each in live]
        assert (request in in_progress) is is_in
        in_progress.changes.clear()
        if what == "end":
            in_progress.end(request)
            live = [each for each in live if each[0] != request]
        elif what == "take late":
            late = [each for each in live if each[1] <= now_ns - tokens and each[1] not in taken]
            assert in_progress.take_late(now_ns - tokens) == late
            taken.update(began_ns for _, began_ns, _ in late)
        else:
            in_progress.begin(request, now_ns, tokens)
            if not is_in:
                live.append((request, now_ns, tokens))
        has_changed = what == "end" if is_in else what == "begin"
        assert in_progress.changes == ({in_progress} if has_changed else set())
        assert len(in_progress) == len(live)
        assert in_progress.tokens == sum(held for _, _, held in live)
        assert in_progress.oldest_ns == (live[0][1] if live else 0)
        half = now_ns // 2
        assert list(in_progress.begun_before(half)) == [each[0] for each in live if each[1] <= half]
