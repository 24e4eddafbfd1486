"""The ledger against a naive model, and case by case: what opens, completes, fails, closes and releases."""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvobs.state.ledger import Ledger
from kvobs.state.transfers import ReportKind, Stuck
from tests.unit.state.ledger_model import LedgerAgainstModel, report

LedgerAgainstModel.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedger = LedgerAgainstModel.TestCase


def opened(is_async: bool = True, expected: int = 2, ends_save: bool = False) -> Ledger:
    ledger = Ledger([0] * ends_save)
    ledger.propose("r", (0, is_async))
    assert ledger.admit("r", 16, expected) is not None
    return ledger


def test_a_load_that_its_child_withdrew_can_still_fail() -> None:
    """Nobody reports it any more: whoever gives it up must be able to end it."""
    ledger = opened(expected=1)
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    assert ledger.take_loads_in() == ["r"]
    assert ledger.fail("r", 5)
    assert not ledger.fail("r", 6), "it has failed already"
    assert ledger.take_failures() == ("r",)
    ledger.echoed("r")
    load = ledger.close_load("r")
    assert load is not None
    assert load.failed


@pytest.mark.parametrize("sibling_is_first", [True, False])
def test_the_end_of_a_load_is_that_of_its_childs_promise_where_it_reports_no_other(sibling_is_first: bool) -> None:
    """FlexKV promises at an abort, and reports no more than the end of the load."""
    ledger = opened(ends_save=True)
    ledger.finish("r", [(0, 2), (1, 1)], 10, 16)
    ledger.record(report(ReportKind.SAVED, "r", 0, 1), 20)
    if sibling_is_first:
        ledger.record(report(ReportKind.SAVED, "r", 1), 20)
    for rank in (0, 1):
        ledger.record(report(ReportKind.RECEIVED, "r", 0, rank), 30)
    assert ledger.close_load("r", 40) is not None
    assert ledger.incomplete.take_stuck(100, 2) == []
    assert ledger.take_saves_in() == ["r"] * sibling_is_first
    if not sibling_is_first:
        ledger.record(report(ReportKind.SAVED, "r", 1), 50)
        assert ledger.take_saves_in() == ["r"]
    assert ledger.close_saves("r")[0].arrived == {0: 40, 1: 40}
    assert ledger.take_sent() == {"r"}
    assert len(ledger) == 0
    assert [len(each) for child in (0, 1) for each in ledger.in_flight(child)] == [0, 0, 0, 0]


def test_saves_of_a_live_request_are_not_closed() -> None:
    """Its id may be that of one that has ended before."""
    ledger = Ledger()
    ledger.arrive("r")
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.close_saves("r") == ledger.close_saves("unknown") == {}
    assert ledger.finish("r", [(0, 1)]).early


def test_what_is_given_up_completes_once() -> None:
    ledger = opened(expected=1)
    ledger.finish("s", [(0, 2)], 10)
    assert ledger.give_up(0, 9, 20) == (1, 0), "the save began later"
    assert ledger.give_up(0, 10, 20) == (0, 1)
    assert ledger.take_failures() == ("r",)
    assert ledger.take_saves_in() == ["s"]
    (save,) = ledger.close_saves("s").values()
    assert save.is_abandoned
    assert save.outcome == "abandoned"


def test_what_was_stuck_is_not_stuck_again_when_another_rank_reports() -> None:
    ledger = opened(expected=3)
    for rank, now in ((2, 10), (0, 20)):
        ledger.record(report(ReportKind.RECEIVED, "r", 0, rank), now)
    assert ledger.incomplete.take_stuck(9, 3) == []
    assert ledger.incomplete.take_stuck(10, 3) == [(0, Stuck("load", "r", (1,)))], "since the first report"
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0), 30)
    assert ledger.incomplete.take_stuck(40, 3) == []
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 1), 50)
    assert ledger.take_loads_in() == ["r"], "late is not lost"


def test_a_save_that_was_half_reported_before_its_promise_waits_since_the_promise() -> None:
    ledger = opened()
    ledger.record(report(ReportKind.SAVED, "r", 1, 0), 10)
    assert ledger.incomplete.take_stuck(90, 2) == []
    ledger.finish("r", [(1, 2)], 20)
    assert ledger.incomplete.take_stuck(19, 2) == []
    assert ledger.incomplete.take_stuck(20, 2) == [(1, Stuck("save", "r", (1,)))]


def test_a_half_reported_load_that_is_given_up_is_not_stuck_later() -> None:
    """Its failure is known: no rank is waited for any more."""
    ledger = opened(expected=2)
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0), 10)
    assert ledger.fail("r", 20)
    assert ledger.incomplete.take_stuck(100, 2) == []


def test_only_an_open_asynchronous_load_can_be_given_up() -> None:
    """A synchronous one ends with its step, and vLLM has read its end."""
    ledger = opened(is_async=False)
    ledger.arrive("idle")
    for request in ("r", "idle", "unknown"):
        assert not ledger.fail(request, 5)
    assert ledger.take_failures() == ()
    load = ledger.load("r")
    assert load is not None
    assert (load.failed, load.arrived) == (False, {})


# What a child's scheduler side adds to the workers' reports, or withdraws


def test_a_save_that_its_child_withdraws_waits_for_new_reports_also_after_it_was_given_up() -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 1)], 10)
    assert ledger.give_up(0, 10, 20) == (0, 1)
    assert ledger.take_saves_in() == ["r"]
    assert ledger.reopen_save("r", 0)
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.take_saves_in() == ["r"]
    (save,) = ledger.close_saves("r").values()
    assert save.outcome == "ok"
