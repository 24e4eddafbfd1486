"""What some ranks have reported and others not is handed out once, when it is old enough, with the silent ranks."""

from __future__ import annotations

from kvobs.state.transfers import IncompleteTransfers, Load, Save, Slowest, Stuck


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
