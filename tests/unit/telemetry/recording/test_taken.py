"""Increments add up exactly, in the order of their first."""

from __future__ import annotations

from kvobs.telemetry.recording.taken import Taken, add_rows, nothing


def test_equal_rows_are_summed_in_the_order_of_their_first() -> None:
    mine, theirs = [["s", 0, "x", 1], ["s", 0, "y", 2]], [["s", 1, "x", 4], ["s", 0, "x", 8]]
    assert add_rows(mine, theirs) == [["s", 0, "x", 9], ["s", 0, "y", 2], ["s", 1, "x", 4]]


def test_increments_of_any_size_are_added_and_what_is_added_stays_as_it_is() -> None:
    mine, more = nothing(), Taken({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
    for _ in range(3):
        mine.add(more)
        mine.add(Taken({1: 1}, [], {5: 7, 8: 9}))
    assert mine == Taken({1: 3 * 10**30 + 3, 2: 3}, [["s", 0, 3 * 10**30]], {5: 7, 8: 9})
    assert more == Taken({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
