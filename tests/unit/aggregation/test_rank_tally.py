"""The tally against a model that is obviously right: random ranks, repeats, strangers, expectations; and its bounds."""

import logging

import pytest

from kvobs.aggregation import rank_tally
from kvobs.aggregation.rank_tally import Round, Rounds, RoundStart, Tally


def test_the_missing_ranks_are_those_that_have_not_reported() -> None:
    assert Round(RoundStart(0, 3, 3), 0b010).missing == (0, 2)
    assert Round(RoundStart(0, 3, 3), 0b1010).missing == (0, 2), "a stranger stands for one of them, unknown which"
    assert Round(RoundStart(0, 2, 3), 0b010).missing == (), "two of three are enough: unknown which"
    assert Round(RoundStart(0, 4, 3), 0b010).missing == ()


def test_the_next_stuck_round_is_the_oldest_not_yet_found() -> None:
    rounds = Rounds()
    for request, now in (("a", 5), ("b", 8)):
        rounds.count(request, 1, RoundStart(now, 2, 2))
    for before, due in ((4, 15), (5, 18), (8, None)):
        rounds.find_stuck(before)
        assert rounds.next_stuck(10) == due


def test_completed_rounds_are_forgotten_by_their_completion_time() -> None:
    tally = Tally()
    tally.count([(1, {"r"})], RoundStart(0, 2, 3))
    tally.count([(2, {"r"})], RoundStart(5, 2, 3))
    tally.forget(4)
    assert list(tally.completed) == ["r"]
    tally.forget(5)
    assert tally.completed == {}


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("expected", [1, 2])
def test_the_oldest_go_where_too_many_are_remembered(
    expected: int, new: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_tally, "MOST", 3 * new)
    tally = Tally()
    for step in range(9):
        tally.count([(1, {f"{letter}{step}" for letter in "rs"[:new]})], RoundStart(step, expected, 2))
        known = {*tally.open, *tally.completed}
        assert known == {f"{letter}{i}" for letter in "rs"[:new] for i in range(max(0, step - 2), step + 1)}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (expected - 1)


def test_kept_rounds_are_kept_whatever_their_number_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tally, "MOST", 2)
    rounds = Rounds()
    for request in ("kept", "a", "b", "c"):
        rounds.count(request, 1, RoundStart(0, 2, 2))
    rounds.trim(but={"kept"})
    assert list(rounds) == ["kept", "c"]
    rounds.forget(0, but={"kept"})
    assert list(rounds) == ["kept"]
