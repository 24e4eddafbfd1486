"""The ledger against a naive model: random lookups, allocations, reports on any rank in any order, aborts, resumes."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs.ledger import Ledger
from kvobs.reports import Kind, Report
from kvobs.transfers import Stuck

REQUESTS = ("r0", "r1", "r2")
CHILDREN = (0, 1)
RANKS = (0, 1)

requests = st.sampled_from(REQUESTS)
children = st.sampled_from(CHILDREN)
ranks = st.sampled_from(RANKS)


def report(kind: Kind, request: str, child: int, rank: int = 0) -> Report:
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
    finished: bool = False
    held: bool = False
    awaited: bool = False

    def load_is_over(self) -> bool:
        if self.load is None:
            return True
        arrived = len(self.arrived) >= self.load[2]
        return arrived and (not self.failed or self.echo == "done")

    def saves_are_over(self) -> bool:
        return all(len(self.saved.get(child, ())) >= n for child, n in self.promised.items())


class LedgerAgainstModel(RuleBasedStateMachine):
    """Each rule does the same to the ledger and to the model; ``settle`` compares what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.told: dict[str, Told] = {}
        self.foreign = 0

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

    @rule(request=requests, child=children, rank=ranks, kind=st.sampled_from([Kind.RECEIVED, Kind.FAILED]))
    def report_load(self, request: str, child: int, rank: int, kind: Kind) -> None:
        told = self.told.get(request)
        foreign = self.ledger.hear(report(kind, request, child, rank))
        owns = told is not None and told.load is not None and told.load[:2] == (child, True)
        assert (foreign is None) == owns
        if told is not None and owns and not told.load_is_over() and told.echo == "none":
            told.arrived.add(rank)
            told.failed |= kind is Kind.FAILED

    @rule(request=requests, child=children, rank=ranks)
    def report_sync(self, request: str, child: int, rank: int) -> None:
        assert self.ledger.hear(report(Kind.SYNC_DONE, request, child, rank)) is None
        told = self.told.get(request)
        if told is not None and told.load is not None and told.load[:2] == (child, False):
            told.arrived.add(rank)

    @rule(request=requests, child=children, rank=ranks)
    def report_save(self, request: str, child: int, rank: int) -> None:
        told = self.told.get(request)
        foreign = self.ledger.hear(report(Kind.SAVED, request, child, rank))
        if told is None or (told.finished and child not in told.promised):
            assert foreign is not None
        if told is not None and (not told.finished or child in told.promised):
            told.saved.setdefault(child, set()).add(rank)

    @rule(request=requests, promises=st.dictionaries(children, st.sampled_from([1, 2])))
    def finish(self, request: str, promises: dict[int, int]) -> None:
        told = self.told.setdefault(request, Told())
        if told.finished:
            return
        finished = self.ledger.finish(request, promises.items())
        told.finished, told.promised = True, promises
        told.held = not told.saves_are_over()
        told.awaited = told.held or (told.load is not None and told.load[1])
        assert finished.holds == told.held
        assert {f.child for f in finished.foreign} == set(told.saved) - set(promises)
        assert set(finished.early) == {c for c, n in promises.items() if len(told.saved.get(c, ())) >= n}

    @rule()
    def settle(self) -> None:
        """Do what the scheduler's side does with each step's output, and compare with the model."""
        expected_received: set[str] = set()
        expected_sent: set[str] = set()
        self._settle_once(expected_received, expected_sent)
        assert self.ledger.take_received() == expected_received
        assert self.ledger.take_sent() == expected_sent

    def _settle_once(self, received: set[str], sent: set[str]) -> None:
        echoes = self.ledger.take_failures()
        assert set(echoes) == {r for r, t in self.told.items() if t.load and t.failed and t.echo == "none" and _in(t)}
        for request in echoes:
            self.told[request].echo = "done"
            self.ledger.echoed(request)
        for child in CHILDREN:
            for request in self.ledger.take_loads_in(child):
                assert self.told[request].load_is_over(), "closed before its owner finished on every rank"
                assert self.ledger.close_load(request) is not None
            for request in self.ledger.take_saves_in(child):
                assert self.ledger.close_save(request, child) is not None
        for request, told in list(self.told.items()):
            load_is_over = told.load_is_over()
            if told.load is not None and load_is_over:
                if told.load[1] and not told.finished:
                    received.add(request)
                told.load = None
            if told.finished and load_is_over and told.saves_are_over():
                if told.awaited:
                    (sent if told.held else received).add(request)
                del self.told[request]

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
                    self.report_load(request, told.load[0], rank, Kind.RECEIVED)
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
            if 0 < len(told.saved.get(child, ())) < expected
        }
        assert set(self.ledger.halves._since) == halves


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
    ledger.hear(report(Kind.RECEIVED, "r", 0, 0))
    ledger.hear(report(Kind.RECEIVED, "r", 0, 0))
    assert ledger.take_loads_in(0) == []
    ledger.hear(report(Kind.RECEIVED, "r", 0, 1))
    assert ledger.take_loads_in(0) == ["r"]


def test_bad_blocks_fail_a_load_without_counting_as_its_arrival() -> None:
    ledger = opened(expected=1)
    ledger.hear(report(Kind.SPOILED, "r", 0))
    assert ledger.take_failures() == ()
    ledger.hear(report(Kind.RECEIVED, "r", 0))
    assert ledger.take_failures() == ("r",)
    assert ledger.take_loads_in(0) == []


def test_bad_blocks_that_vllm_knows_of_need_no_echo() -> None:
    ledger = opened(expected=1)
    ledger.hear(report(Kind.HOLED, "r", 0))
    ledger.hear(report(Kind.RECEIVED, "r", 0))
    assert ledger.take_failures() == ()
    assert ledger.take_loads_in(0) == ["r"]
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


def test_a_sync_load_outlives_its_request_by_its_last_report_and_releases_nothing() -> None:
    ledger = opened(is_async=False)
    assert ledger.finish("r", []).holds is False
    ledger.hear(report(Kind.SYNC_DONE, "r", 0, 0))
    ledger.hear(report(Kind.SYNC_DONE, "r", 0, 1))
    (request,) = ledger.take_loads_in(0)
    load = ledger.close_load(request)
    assert load is not None
    assert not load.aborted
    assert len(ledger) == 0
    assert ledger.take_received() == ledger.take_sent() == set()


def test_a_save_that_is_closed_by_force_counts_once() -> None:
    """A child may complete a save that not every rank has reported."""
    ledger = Ledger()
    ledger.finish("r", [(0, 2)])
    assert ledger.close_save("r", 1) is None
    assert ledger.close_save("r", 0) is not None
    assert ledger.close_save("r", 0) is None
    assert ledger.take_sent() == {"r"}


def test_what_was_stuck_is_not_stuck_again_when_another_rank_reports() -> None:
    ledger = opened(expected=3)
    for rank, now in ((2, 10), (0, 20)):
        ledger.hear(report(Kind.RECEIVED, "r", 0, rank), now)
    assert ledger.halves.take_stuck(9, 3) == []
    assert ledger.halves.take_stuck(10, 3) == [(0, Stuck("load", "r", (1,)))], "since the first report"
    ledger.hear(report(Kind.RECEIVED, "r", 0, 0), 30)
    assert ledger.halves.take_stuck(40, 3) == []
    ledger.hear(report(Kind.RECEIVED, "r", 0, 1), 50)
    assert ledger.take_loads_in(0) == ["r"], "late is not lost"


def test_a_save_that_was_half_reported_before_its_promise_waits_since_the_promise() -> None:
    ledger = opened()
    ledger.hear(report(Kind.SAVED, "r", 1, 0), 10)
    assert ledger.halves.take_stuck(90, 2) == []
    ledger.finish("r", [(1, 2)], 20)
    assert ledger.halves.take_stuck(19, 2) == []
    assert ledger.halves.take_stuck(20, 2) == [(1, Stuck("save", "r", (1,)))]


def test_partial_tails_are_known_until_the_request_ends() -> None:
    ledger = Ledger()
    assert ledger.tails("r") == frozenset()
    ledger.accept_tail("r", 1)
    assert ledger.tails("r") == {1}
    ledger.finish("r", [])
    assert ledger.tails("r") == frozenset()
