"""What some ranks have reported and others not is handed out once, when it is old enough, with the silent ranks."""

from __future__ import annotations

import pytest

from kvobs.state.transfers import IncompleteTransfers, Load, Report, ReportKind, Save, Slowest, Stuck


def load(*arrived: int, expected: int = 3) -> Load:
    return Load(0, 16, True, expected, arrived=dict.fromkeys(arrived, 1))


def test_the_silent_ranks_are_named_once() -> None:
    halves = IncompleteTransfers()
    halves.note("load", 0, "old", load(1), 10)
    halves.note("save", 1, "older", Save(True, expected=3, arrived={0: 1, 2: 1}), 9)
    halves.note("load", 0, "young", load(0), 11)
    assert halves.take_stuck(8, 3) == []
    assert halves.take_stuck(10, 3) == [(0, Stuck("load", "old", (0, 2))), (1, Stuck("save", "older", (1,)))]
    assert len(halves) == 1
    assert halves.take_stuck(10, 3) == []
    assert halves.take_stuck(11, 3) == [(0, Stuck("load", "young", (1, 2)))]


def test_ranks_are_not_named_where_it_is_not_known_which_were_to_report() -> None:
    halves = IncompleteTransfers()
    halves.note("load", 0, "r", load(1, expected=2), 1)
    assert halves.take_stuck(1, 3) == [(0, Stuck("load", "r", ()))]


def test_what_is_over_is_forgotten() -> None:
    halves = IncompleteTransfers()
    halves.note("load", 0, "r", load(0), 1)
    halves.forget("load", 0, "r")
    halves.forget("save", 0, "never")
    assert len(halves) == 0


def test_the_slowest_rank_is_the_last_one() -> None:
    assert load(0).slowest is None
    assert Load(0, 1, True, 2, arrived={0: 5, 1: 9, 2: 7}).slowest == Slowest(1, 4)


@pytest.mark.parametrize(
    ("is_async", "opened", "arrived", "duration"),
    [
        (True, 10, {0: 12, 1: 25}, 15),
        (True, 10, {0: 7}, 0),
        (True, 10, {}, 0),
        (False, 10, {0: 12, 1: 25}, 25),
        (False, 10, {}, 0),
    ],
)
def test_a_load_lasts_until_its_last_rank_and_a_synchronous_one_as_long_as_on_its_slowest(
    is_async: bool, opened: int, arrived: dict[int, int], duration: int
) -> None:
    assert Load(0, 16, is_async, 2, opened, arrived=arrived).duration_ns == duration


@pytest.mark.parametrize(
    ("failed_on", "aborted", "outcome"),
    [(set(), False, "ok"), (set(), True, "aborted"), ({1}, False, "failed"), ({1}, True, "failed")],
)
def test_a_load_fails_if_it_does_on_any_rank(failed_on: set[int], aborted: bool, outcome: str) -> None:
    ended = Load(0, 16, True, 2, failed_on=failed_on, aborted=aborted)
    assert ended.failed is bool(failed_on)
    assert ended.outcome == outcome


@pytest.mark.parametrize(
    ("done", "arrived", "is_abandoned", "is_over"),
    [
        (False, (), False, False),
        (False, (0,), False, False),
        (False, (0, 1), False, True),
        (False, (0, 1, 2), False, True),
        (True, (), False, True),
        (False, (), True, True),
    ],
)
def test_a_save_is_over_when_no_report_is_waited_for(
    done: bool, arrived: tuple[int, ...], is_abandoned: bool, is_over: bool
) -> None:
    save = Save(True, done, expected=2, arrived=dict.fromkeys(arrived, 1), is_abandoned=is_abandoned)
    assert save.is_over is is_over
    assert save.is_in is (len(arrived) >= 2)
    assert save.outcome == ("abandoned" if is_abandoned else "ok")


def test_transfers_and_reports_begin_with_nothing_known() -> None:
    """Nothing is promised, reported, failed or measured; a save waits for one rank at least."""
    load, save = Load(1, 16, True, 2), Save()
    assert (load.opened_ns, load.blocks, load.size, load.arrived, load.lost_tokens, load.ranks) == (
        0,
        (),
        0,
        {},
        None,
        {},
    )
    assert (load.failed_on, load.needs_echo, load.aborted) == (set(), False, False)
    assert (save.promised, save.done, save.expected, save.promised_ns) == (False, False, 1, 0)
    assert (save.arrived, save.ranks, save.is_abandoned, save.is_given_up) == ({}, {}, False, False)
    assert Report(3, ReportKind.SAVED, "r", 1, 7) == (3, ReportKind.SAVED, "r", 1, 7, 0, 0)
