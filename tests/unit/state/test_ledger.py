"""The ledger against a naive model: random lookups, allocations, reports on any rank in any order, aborts, resumes."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Report, ReportKind, Stuck

REQUESTS = ("r0", "r1", "r2")
CHILDREN = (0, 1)
RANKS = (0, 1)

requests = st.sampled_from(REQUESTS)
children = st.sampled_from(CHILDREN)
ranks = st.sampled_from(RANKS)


def report(kind: ReportKind, request: str, child: int, rank: int = 0) -> Report:
    return Report(rank, kind, request, child, 0)


@dataclass
class Told:
    """What the test itself knows of one live request: only what was said, nothing derived."""

    candidate: tuple[int, bool] | None = None
    load: tuple[int, bool, int] | None = None  # child, is_async, ranks expected
    arrived: set[int] = field(default_factory=set)
    failed: bool = False
    echo: str = "none"  # none, ordered, done
    saved: dict[int, set[int]] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)  # child -> ranks expected
    done: set[int] = field(default_factory=set)  # children whose promise is settled: before it was made, by a load
    tails: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # children that completed their save on the scheduler's side
    load_added: bool = False  # its child said on the scheduler's side that the load is in
    saves_added: bool = False
    finished: bool = False
    held: bool = False
    awaited: bool = False

    def load_is_over(self) -> bool:
        if self.load is None:
            return True
        arrived = len(self.arrived) >= self.load[2]
        return arrived and (not self.failed or self.echo == "done")

    def saves_are_over(self) -> bool:
        return all(self.save_is_over(child) for child in self.promised)

    def save_is_over(self, child: int) -> bool:
        return child in self.done or len(self.saved.get(child, ())) >= self.promised[child]


class LedgerAgainstModel(RuleBasedStateMachine):
    """Each rule does the same to the ledger and to the model; ``settle`` compares what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.told: dict[str, Told] = {}
        self.stray = 0

    @rule(request=requests, candidate=st.none() | st.tuples(children, st.booleans()))
    def look_up(self, request: str, candidate: tuple[int, bool] | None) -> None:
        told = self.told.setdefault(request, Told())
        if told.finished:
            return
        self.ledger.propose(request, candidate)
        told.candidate = candidate

    @rule(request=requests, tokens=st.sampled_from([0, 16]), expected=st.sampled_from([1, 2]))
    def allocate(self, request: str, tokens: int, expected: int) -> None:
        told = self.told.get(request)
        if told is None or told.finished or told.load is not None:
            return  # vLLM allocates for a load only after the one before is over
        load = self.ledger.admit(request, tokens, expected)
        if tokens and told.candidate:
            child, is_async = told.candidate
            assert load is not None
            assert (load.child, load.is_async, load.tokens) == (child, is_async, tokens)
            told.load, told.arrived, told.failed, told.echo = (child, is_async, expected), set(), False, "none"
        else:
            assert load is None
        told.candidate = None

    @rule(request=requests, child=children, rank=ranks, kind=st.sampled_from([ReportKind.RECEIVED, ReportKind.FAILED]))
    def report_load(self, request: str, child: int, rank: int, kind: ReportKind) -> None:
        told = self.told.get(request)
        stray = self.ledger.record(report(kind, request, child, rank))
        owns = told is not None and told.load is not None and told.load[:2] == (child, True)
        assert (stray is None) == owns
        if told is not None and owns and not told.load_is_over() and told.echo == "none":
            told.arrived.add(rank)
            told.failed |= kind is ReportKind.FAILED

    @rule(request=requests, child=children, rank=ranks)
    def report_sync(self, request: str, child: int, rank: int) -> None:
        assert self.ledger.record(report(ReportKind.SYNC_DONE, request, child, rank)) is None
        told = self.told.get(request)
        if told is not None and told.load is not None and told.load[:2] == (child, False):
            told.arrived.add(rank)

    @rule(request=requests, child=children, rank=ranks)
    def report_save(self, request: str, child: int, rank: int) -> None:
        told = self.told.get(request)
        stray = self.ledger.record(report(ReportKind.SAVED, request, child, rank))
        if told is None or (told.finished and child not in told.promised):
            assert stray is not None
        if told is not None and (not told.finished or child in told.promised):
            told.saved.setdefault(child, set()).add(rank)

    @rule(request=requests, child=children)
    def accept_tail(self, request: str, child: int) -> None:
        told = self.told.setdefault(request, Told())
        if told.finished:
            return
        self.ledger.accept_tail(request, child)
        assert child in self.ledger.tails(request)
        told.tails.add(child)
        told.saved.pop(child, None)  # not about that block

    @rule(request=requests, child=children)
    def add_load(self, request: str, child: int) -> None:
        """Let a child's scheduler side say that its load is in: that counts for all ranks."""
        told = self.told.get(request)
        if told is not None and told.load is not None and len(told.arrived) >= told.load[2]:
            return  # it has been shown so
        is_in = self.ledger.complete_load(request, child, 1)
        if told is None or told.load is None or told.load[:2] != (child, True):
            assert is_in is None
            return
        assert is_in is not told.failed
        told.arrived.update(range(told.load[2]))
        told.load_added = is_in is True

    @rule(request=requests, child=children)
    def add_save(self, request: str, child: int) -> None:
        told = self.told.get(request)
        are_in = self.ledger.complete_save(request, child, 1)
        if told is None or not told.finished or child not in told.promised or child in told.done:
            assert are_in is None
            return
        if not told.save_is_over(child):
            told.saved.setdefault(child, set()).update(range(told.promised[child]))
        told.given_up.add(child)
        assert are_in is told.saves_are_over()
        told.saves_added |= are_in

    @rule(request=requests, promises=st.dictionaries(children, st.sampled_from([1, 2])))
    def finish(self, request: str, promises: dict[int, int]) -> None:
        told = self.told.setdefault(request, Told())
        if told.finished:
            return
        promises = {**dict.fromkeys(told.tails, 2), **promises}
        finished = self.ledger.finish(request, promises.items())
        told.finished, told.promised = True, promises
        told.held = not told.saves_are_over()
        told.awaited = told.held or (told.load is not None and told.load[1])
        assert finished.holds == told.held
        assert {f.child for f in finished.stray} == set(told.saved) - set(promises)
        told.done = {c for c, n in promises.items() if len(told.saved.get(c, ())) >= n}
        assert set(finished.early) == told.done

    @rule(withdraws=st.none() | st.tuples(requests, children))
    def settle(self, withdraws: tuple[str, int] | None = None) -> None:
        """Do what the scheduler's side does with each step's output, and compare with the model.

        A save that is in only with the end of its sibling's load is closed in the step after that.
        """
        expected_received: set[str] = set()
        expected_sent: set[str] = set()
        self._settle_once(expected_received, expected_sent, withdraws)
        self._settle_once(expected_received, expected_sent)
        assert self.ledger.take_saves_in() == self.ledger.take_loads_in() == []
        assert self.ledger.take_received() == expected_received
        assert self.ledger.take_sent() == expected_sent

    def _settle_once(self, received: set[str], sent: set[str], withdraws: tuple[str, int] | None = None) -> None:
        self._echo()
        loads, saves = self.ledger.take_loads_in(), self.ledger.take_saves_in()
        for request in saves:
            assert self.told[request].saves_are_over(), "handed out before all promises are met"
        loads += [request for request, told in self.told.items() if told.load_added and request not in loads]
        saves += [request for request, told in self.told.items() if told.saves_added and request not in saves]
        if withdraws is not None and withdraws[0] in saves:
            self._withdraw(*withdraws)
            saves = [request for request in saves if self.told[request].saves_are_over()]
        received.update(filter(self._close_load, loads))
        for request in saves:
            told = self.told[request]
            told.saves_added = False
            closed = self.ledger.close_saves(request)
            assert set(closed) <= set(told.promised)
            told.done.update(told.promised)
        for request, told in list(self.told.items()):
            assert not (told.load is not None and told.load_is_over()), "a load that is in was not handed out"
            if told.finished and told.load is None and told.done >= set(told.promised):
                if told.awaited:
                    (sent if told.held else received).add(request)
                del self.told[request]

    def _echo(self) -> None:
        echoes = self.ledger.take_failures()
        assert set(echoes) == {r for r, t in self.told.items() if t.load and t.failed and t.echo == "none" and _in(t)}
        for request in echoes:
            self.told[request].echo = "done"
            self.ledger.echoed(request)

    def _close_load(self, request: str) -> bool:
        """Close a load that is in; return whether vLLM goes on with its request."""
        told = self.told[request]
        assert told.load_is_over(), "closed before its owner finished on every rank"
        assert self.ledger.close_load(request) is not None
        assert told.load is not None
        child, is_async, _ = told.load
        told.load, told.load_added = None, False
        if is_async and told.finished and child in told.promised:
            told.done.add(child)
        return is_async and not told.finished

    def _withdraw(self, request: str, child: int) -> None:
        """Let a child say that its save is not in after all; ranks may report it again."""
        told = self.told[request]
        has_one = child in told.promised and child not in told.done and child not in told.given_up
        assert self.ledger.reopen_save(request, child) is has_one
        if has_one:
            told.saved[child] = set()
            told.saves_added = False

    @precondition(lambda self: self.told)
    @rule()
    def everything_is_reported(self) -> None:
        """Let every open load and promise complete, end every request: nothing may be left."""
        for request, told in list(self.told.items()):
            if not told.finished:
                self.finish(request, {})
        for request, told in list(self.told.items()):
            for rank in RANKS:
                if told.load is not None and told.load[1]:
                    self.report_load(request, told.load[0], rank, ReportKind.RECEIVED)
                elif told.load is not None:
                    self.report_sync(request, told.load[0], rank)
                for child in told.promised:
                    self.report_save(request, child, rank)
        self.settle()
        assert self.told == {}
        assert len(self.ledger) == 0

    @invariant()
    def keeps_only_live_requests(self) -> None:
        assert set(self.ledger) <= set(self.told)

    @invariant()
    def knows_what_some_ranks_have_reported_and_others_not(self) -> None:
        halves = {
            ("load", told.load[0], request)
            for request, told in self.told.items()
            if told.load is not None and 0 < len(told.arrived) < told.load[2]
        }
        halves |= {
            ("save", child, request)
            for request, told in self.told.items()
            for child, expected in told.promised.items()
            if child not in told.done and 0 < len(told.saved.get(child, ())) < expected
        }
        assert set(self.ledger.incomplete._since) == halves


def _in(told: Told) -> bool:
    return told.load is not None and len(told.arrived) >= told.load[2]


LedgerAgainstModel.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestLedger = LedgerAgainstModel.TestCase


def opened(is_async: bool = True, expected: int = 2) -> Ledger:
    ledger = Ledger()
    ledger.propose("r", (0, is_async))
    assert ledger.admit("r", 16, expected) is not None
    return ledger


def test_a_rank_that_reports_twice_counts_once() -> None:
    ledger = opened()
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0))
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0))
    assert ledger.take_loads_in() == []
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 1))
    assert ledger.take_loads_in() == ["r"]


def test_bad_blocks_fail_a_load_without_counting_as_its_arrival() -> None:
    ledger = opened(expected=1)
    ledger.record(report(ReportKind.SPOILED, "r", 0))
    assert ledger.take_failures() == ()
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    assert ledger.take_failures() == ("r",)
    assert ledger.take_loads_in() == []


def test_bad_blocks_that_vllm_knows_of_need_no_echo() -> None:
    ledger = opened(expected=1)
    ledger.record(report(ReportKind.HOLED, "r", 0))
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    assert ledger.take_failures() == ()
    assert ledger.take_loads_in() == ["r"]
    load = ledger.close_load("r")
    assert load is not None
    assert load.failed


def test_the_choice_is_the_candidate_until_vllm_allocates_and_then_the_owner() -> None:
    ledger = Ledger()
    ledger.propose("r", (1, True))
    assert (ledger.choice("r"), ledger.owner("r")) == (1, None)
    ledger.admit("r", 16, 1)
    assert (ledger.choice("r"), ledger.owner("r")) == (1, 1)
    ledger.propose("r", (0, True))
    assert (ledger.choice("r"), ledger.owner("r")) == (0, 1)
    ledger.propose("r", None)
    assert (ledger.choice("r"), ledger.owner("r")) == (1, 1)


def test_saves_that_are_in_with_the_loaders_own_among_them_are_handed_out_once() -> None:
    """The load's end covers its connector's promise, which all ranks have reported already."""
    ledger = Ledger()
    ledger.propose("r", (0, True))
    ledger.admit("r", 16, 1)
    ledger.finish("r", [(0, 1), (1, 1)])
    for kind, child in ((ReportKind.RECEIVED, 0), (ReportKind.SAVED, 0), (ReportKind.SAVED, 1)):
        ledger.record(Report(0, kind, "r", child, 5))
    assert (ledger.take_loads_in(), ledger.take_saves_in()) == (["r"], ["r"])
    assert ledger.close_load("r") is not None
    assert set(ledger.close_saves("r")) == {1}
    assert ledger.take_saves_in() == []
    assert ledger.take_sent() == {"r"}
    assert len(ledger) == 0


def test_a_sync_load_outlives_its_request_by_its_last_report_and_releases_nothing() -> None:
    ledger = opened(is_async=False)
    assert ledger.finish("r", []).holds is False
    ledger.record(report(ReportKind.SYNC_DONE, "r", 0, 0))
    ledger.record(report(ReportKind.SYNC_DONE, "r", 0, 1))
    (request,) = ledger.take_loads_in()
    load = ledger.close_load(request)
    assert load is not None
    assert not load.aborted
    assert len(ledger) == 0
    assert ledger.take_received() == ledger.take_sent() == set()


def test_saves_are_closed_together_and_once() -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 1), (1, 1)])
    ledger.record(report(ReportKind.SAVED, "r", 1))
    assert ledger.take_saves_in() == [], "the other promise is open"
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.take_saves_in() == ["r"]
    assert set(ledger.close_saves("r")) == {0, 1}
    assert ledger.close_saves("r") == {}
    assert ledger.take_sent() == {"r"}
    assert len(ledger) == 0


def test_saves_of_a_live_request_are_not_closed() -> None:
    """Its id may be that of one that has ended before."""
    ledger = Ledger()
    ledger.arrive("r")
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.close_saves("r") == {}
    assert ledger.finish("r", [(0, 1)]).early


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


def test_the_promise_of_a_child_is_settled_by_its_own_aborted_load() -> None:
    """FlexKV promises at an abort, and reports no more than the end of the load."""
    ledger = opened(expected=1)
    assert ledger.finish("r", [(0, 1)]).holds
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    ledger.close_load("r")
    assert ledger.take_sent() == {"r"}
    assert len(ledger) == 0
    assert ledger.take_saves_in() == [], "vLLM has released it; a request of this id is another one"


def test_the_promise_of_a_sibling_is_not_settled_by_a_load() -> None:
    ledger = opened(expected=1)
    ledger.finish("r", [(0, 1), (1, 1)])
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    ledger.close_load("r")
    assert ledger.take_sent() == set()
    ledger.record(report(ReportKind.SAVED, "r", 1))
    assert ledger.take_saves_in() == ["r"]
    assert set(ledger.close_saves("r")) == {1}
    assert ledger.take_sent() == {"r"}


def test_a_report_before_a_partial_tail_is_not_about_the_tail() -> None:
    """Its blocks would be freed while they are read."""
    ledger = Ledger()
    ledger.arrive("r")
    ledger.record(report(ReportKind.SAVED, "r", 0))
    ledger.accept_tail("r", 0)
    assert ledger.finish("r", [(0, 1)]).holds
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.take_saves_in() == ["r"]


def test_what_is_given_up_completes_once() -> None:
    ledger = opened(expected=1)
    ledger.finish("s", [(0, 2)], 10)
    assert ledger.give_up(0, 9, 20) == (1, 0), "the save began later"
    assert ledger.give_up(0, 10, 20) == (0, 1)
    assert ledger.take_failures() == ("r",)
    assert ledger.take_saves_in() == ["s"]
    (save,) = ledger.close_saves("s").values()
    assert save.is_abandoned


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


def test_partial_tails_are_known_until_the_request_ends() -> None:
    ledger = Ledger()
    assert ledger.tails("r") == frozenset()
    ledger.accept_tail("r", 1)
    assert ledger.tails("r") == {1}
    ledger.finish("r", [])
    assert ledger.tails("r") == frozenset()


@pytest.mark.parametrize("is_known", [False, True])
def test_there_is_no_load_to_close_of_a_request_without_one(is_known: bool) -> None:
    """A connector may add a request to the output's receipts that kvobs does not load, or does not know."""
    ledger = Ledger()
    if is_known:
        ledger.arrive("r")
    assert ledger.close_load("r") is None
    assert ledger.take_received() == set()


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


def test_a_load_that_a_child_adds_after_a_rank_failed_is_reported_as_failed_first_and_once() -> None:
    ledger = opened(expected=2)
    ledger.record(report(ReportKind.FAILED, "r", 0, 1), 10)
    assert ledger.take_failures() == (), "the other rank has not reported"
    assert ledger.complete_load("r", 0, 20) is False
    assert ledger.incomplete.take_stuck(100, 2) == []
    assert ledger.take_failures() == ("r",)
    assert ledger.complete_load("r", 0, 30) is False
    assert ledger.take_failures() == (), "it is on its way"
    ledger.echoed("r")
    assert ledger.take_loads_in() == ["r"]
    load = ledger.close_load("r")
    assert load is not None
    assert (load.outcome, load.arrived) == ("failed", {0: 20, 1: 0})


def test_a_child_adds_its_own_asynchronous_loads_only() -> None:
    ledger, sync = opened(), opened(is_async=False)
    ledger.arrive("idle")
    for request, child in (("r", 1), ("idle", 0), ("unknown", 0)):
        assert ledger.complete_load(request, child, 5) is None
    assert sync.complete_load("r", 0, 5) is None
    for load in (ledger.load("r"), sync.load("r")):
        assert load is not None
        assert load.arrived == {}
    assert ledger.complete_load("r", 0, 5) is True


def test_a_child_adds_its_own_promised_saves_only_and_those_of_siblings_stay_open() -> None:
    ledger = Ledger()
    ledger.arrive("live")
    ledger.record(report(ReportKind.SAVED, "live", 0))
    ledger.finish("r", [(0, 2), (1, 1)])
    ledger.record(report(ReportKind.SAVED, "r", 0, 1), 10)
    for request, child in (("r", 2), ("live", 0), ("live", 1), ("unknown", 0)):
        assert ledger.complete_save(request, child, 5) is None
    assert ledger.complete_save("r", 0, 20) is False
    assert ledger.incomplete.take_stuck(100, 2) == []
    assert ledger.complete_save("r", 1, 30) is True
    closed = ledger.close_saves("r")
    assert [(child, save.arrived) for child, save in closed.items()] == [(0, {0: 20, 1: 20}), (1, {0: 30})]
    assert ledger.complete_save("r", 0, 40) is None


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


def test_a_child_withdraws_its_own_open_saves_only_and_none_that_it_has_completed_itself() -> None:
    ledger = Ledger()
    ledger.arrive("live")
    ledger.record(report(ReportKind.SAVED, "live", 0))
    ledger.finish("r", [(0, 1), (1, 1), (2, 1)])
    ledger.complete_save("r", 0, 5)
    ledger.record(report(ReportKind.SAVED, "r", 2))
    for request, child in (("r", 0), ("r", 3), ("live", 0), ("unknown", 0)):
        assert not ledger.reopen_save(request, child)
    assert ledger.reopen_save("r", 2)
    ledger.record(report(ReportKind.SAVED, "r", 1))
    assert ledger.take_saves_in() == []
    ledger.record(report(ReportKind.SAVED, "r", 2))
    assert ledger.take_saves_in() == ["r"]
    ledger.close_saves("r")
    assert not ledger.reopen_save("r", 2)
