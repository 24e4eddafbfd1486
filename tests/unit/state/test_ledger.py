"""The ledger against a naive model, and case by case: what opens, completes, fails, closes and releases.

The model sees random lookups, allocations, reports on any rank in any order, aborts and resumes.
"""

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Load, Report, ReportKind, Stuck, UnexpectedReport
from tests.support.reports import report as of_one

REQUESTS = ("r0", "r1", "r2")
CONNECTORS = (0, 1)
RANKS = (0, 1)
LOAD_ENDS_SAVE = (0,)  # this connector does as FlexKV
TOKENS, HELD = 16, 24
LOAD_KINDS = [ReportKind.RECEIVED, ReportKind.FAILED, ReportKind.UNMAPPED_BAD_BLOCKS, ReportKind.BAD_BLOCKS]

requests = st.sampled_from(REQUESTS)
connectors = st.sampled_from(CONNECTORS)
ranks = st.sampled_from(RANKS)


def report(kind: ReportKind, request: str, index: int, rank: int = 0) -> Report:
    return of_one(rank, kind, request, index)


@dataclass
class Noted:
    """What the test itself knows of one live request: only what was said, nothing derived."""

    candidate: tuple[int, bool] | None = None
    owner: int | None = None
    load: tuple[int, bool, int] | None = None  # connector, is_async, ranks expected
    arrived: set[int] = field(default_factory=set)
    failed: bool = False  # vLLM must be told
    holed: bool = False  # bad blocks that vLLM knows of
    echo: str = "none"  # none, ordered, done
    resuming: int | None = None  # the connector whose load is in, and the request not allocated since
    saved: dict[int, set[int]] = field(default_factory=dict)
    promised: dict[int, int] = field(default_factory=dict)  # connector -> ranks expected
    done: set[int] = field(default_factory=set)  # connectors whose promise is settled
    tails: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)  # connectors that completed their save on the scheduler's side
    load_added: bool = False  # its connector said on the scheduler's side that the load is in
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
        return all(self.save_is_over(index) for index in self.promised)

    def save_is_over(self, index: int) -> bool:
        return index in self.done or len(self.saved.get(index, ())) >= self.promised[index]


class LedgerAgainstModel(RuleBasedStateMachine):
    """Each rule does the same to the ledger and to the model; ``settle`` compares what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LOAD_ENDS_SAVE)
        self.noted: dict[str, Noted] = {}
        self.unexpected = 0

    @rule(request=requests, candidate=st.none() | st.tuples(connectors, st.booleans()))
    def look_up(self, request: str, candidate: tuple[int, bool] | None) -> None:
        noted = self.noted.setdefault(request, Noted())
        if noted.finished:
            return
        self.ledger.propose(request, candidate)
        noted.candidate = candidate

    @rule(request=requests, tokens=st.sampled_from([0, TOKENS]), expected=st.sampled_from([1, 2]))
    def allocate(self, request: str, tokens: int, expected: int) -> None:
        noted = self.noted.get(request)
        if noted is None or noted.finished or noted.load is not None:
            return  # vLLM allocates for a load only after the one before is over
        load: Any = self.ledger.admit(request, tokens, expected)
        noted.resuming = None
        if tokens and noted.candidate:
            index, is_async = noted.candidate
            assert (load.connector_index, load.is_async, load.tokens) == (index, is_async, tokens)
            noted.load, noted.arrived, noted.owner = (index, is_async, expected), set(), index
            noted.failed, noted.holed, noted.echo = False, False, "none"
        else:
            assert load is None
        noted.candidate = None

    @rule(request=requests, index=connectors, rank=ranks, kind=st.sampled_from(LOAD_KINDS))
    def report_load(self, request: str, index: int, rank: int, kind: ReportKind) -> None:
        noted = self.noted.get(request)
        if noted is not None and noted.load_added:
            return  # the same step's output closes it
        unexpected = self.ledger.record(report(kind, request, index, rank))
        owner, is_async = noted.load[:2] if noted is not None and noted.load is not None else (index, False)
        owns = index == owner and is_async
        blames = index != owner and (kind is ReportKind.BAD_BLOCKS or (is_async and kind is not ReportKind.RECEIVED))
        name = "load" if kind is ReportKind.RECEIVED else "failure"
        if blames and kind is not ReportKind.FAILED:
            name = "blocks"
        assert unexpected == ([] if owns else [UnexpectedReport(index, name, request)])
        if noted is not None and (owns or blames) and noted.echo == "none":
            noted.failed |= kind in (ReportKind.FAILED, ReportKind.UNMAPPED_BAD_BLOCKS)
            noted.holed |= kind is ReportKind.BAD_BLOCKS
            # Bad blocks, and a failure of another connector than the owner, are no arrival.
            if owns and kind in (ReportKind.RECEIVED, ReportKind.FAILED):
                noted.arrived.add(rank)

    @rule(request=requests)
    def give_up(self, request: str) -> None:
        noted = self.noted.get(request)
        if noted is None or noted.load is None or not noted.load[1]:
            assert not self.ledger.fail(request, 1)
        elif not _in(noted):
            assert self.ledger.fail(request, 1)
            noted.failed = True
            noted.arrived.update(range(noted.load[2]))

    @rule(request=requests, index=connectors, rank=ranks)
    def report_sync(self, request: str, index: int, rank: int) -> None:
        assert self.ledger.record(report(ReportKind.SYNC_DONE, request, index, rank)) == []
        noted = self.noted.get(request)
        if noted is not None and noted.load is not None and noted.load[:2] == (index, False):
            noted.arrived.add(rank)

    @rule(request=requests, index=connectors, rank=ranks)
    def report_save(self, request: str, index: int, rank: int) -> None:
        noted = self.noted.get(request)
        unexpected = self.ledger.record(report(ReportKind.SAVED, request, index, rank))
        if noted is None or (noted.finished and index not in noted.promised):
            assert unexpected == [UnexpectedReport(index, "save", request)]
        if noted is not None and (not noted.finished or index in noted.promised):
            noted.saved.setdefault(index, set()).add(rank)

    # The same, aimed at what is open: at random too few loads complete.

    @rule(request=requests, index=connectors, is_async=st.booleans(), expected=st.sampled_from([1, 2]))
    def start_load(self, request: str, index: int, is_async: bool, expected: int) -> None:
        self.look_up(request, (index, is_async))
        if request in self.noted:
            self.allocate(request, TOKENS, expected)

    @precondition(lambda self: any(noted.load for noted in self.noted.values()))
    @rule(data=st.data(), rank=ranks, kind=st.sampled_from(LOAD_KINDS))
    def report_open_load(self, data: st.DataObject, rank: int, kind: ReportKind) -> None:
        request = data.draw(st.sampled_from(sorted(r for r, noted in self.noted.items() if noted.load)))
        index, is_async, _ = self.noted[request].load or (0, True, 0)
        if is_async:
            self.report_load(request, index, rank, kind)
        else:
            self.report_sync(request, index, rank)

    @precondition(lambda self: any(noted.promised for noted in self.noted.values()))
    @rule(data=st.data(), rank=ranks)
    def report_promised_save(self, data: st.DataObject, rank: int) -> None:
        request = data.draw(st.sampled_from(sorted(r for r, noted in self.noted.items() if noted.promised)))
        self.report_save(request, data.draw(st.sampled_from(sorted(self.noted[request].promised))), rank)

    @rule(request=requests, index=connectors)
    def accept_tail(self, request: str, index: int) -> None:
        noted = self.noted.setdefault(request, Noted())
        if noted.finished:
            return
        self.ledger.accept_tail(request, index)
        assert index in self.ledger.tails(request)
        noted.tails.add(index)
        noted.saved.pop(index, None)  # not about that block

    @rule(request=requests, index=connectors)
    def add_load(self, request: str, index: int) -> None:
        """Let a connector's scheduler side say that its load is in: that counts for all ranks."""
        noted = self.noted.get(request)
        if noted is not None and noted.load is not None and len(noted.arrived) >= noted.load[2]:
            return  # it has been shown so
        is_in = self.ledger.complete_load(request, index, 1)
        if noted is None or noted.load is None or noted.load[:2] != (index, True):
            assert is_in is None
            return
        assert is_in is not noted.failed
        noted.arrived.update(range(noted.load[2]))
        noted.load_added = is_in is True

    @rule(request=requests, index=connectors)
    def add_save(self, request: str, index: int) -> None:
        noted = self.noted.get(request)
        are_in = self.ledger.complete_save(request, index, 1)
        if noted is None or not noted.finished or index not in noted.promised or index in noted.done:
            assert are_in is None
            return
        if not noted.save_is_over(index):
            noted.saved.setdefault(index, set()).update(range(noted.promised[index]))
        noted.given_up.add(index)
        assert are_in is noted.saves_are_over()
        noted.saves_added |= are_in

    @rule(request=requests, promises=st.dictionaries(connectors, st.sampled_from([1, 2])))
    def finish(self, request: str, promises: dict[int, int]) -> None:
        noted = self.noted.setdefault(request, Noted())
        if noted.finished:
            return
        promises = {**dict.fromkeys(noted.tails, 2), **promises}
        assert self.ledger.tails(request) == noted.tails
        finished = self.ledger.finish(request, promises.items(), 0, HELD)
        noted.finished, noted.promised, noted.resuming = True, promises, None
        noted.held = not noted.saves_are_over()
        noted.awaited = noted.held or (noted.load is not None and noted.load[1])
        assert finished.holds == noted.held
        assert {f.connector_index for f in finished.unexpected} == set(noted.saved) - set(promises)
        noted.done = {c for c, n in promises.items() if len(noted.saved.get(c, ())) >= n}
        assert set(finished.early) == noted.done

    @rule(withdraws=st.none() | st.tuples(requests, connectors), reads=st.none() | requests)
    def settle(self, withdraws: tuple[str, int] | None = None, reads: str | None = None) -> None:
        """Do what the scheduler's side does with each step's output, and compare with the model."""
        received: set[str] = set()
        sent: set[str] = set()
        loads, saves, unexpected = self.ledger.settle((), self._read_failures(reads))
        assert unexpected == []
        for request in saves:
            assert self.noted[request].saves_are_over(), "handed out before all promises are met"
        loads += [request for request, noted in self.noted.items() if noted.load_added and request not in loads]
        saves += [request for request, noted in self.noted.items() if noted.saves_added and request not in saves]
        if withdraws is not None and withdraws[0] in saves:
            self._withdraw(*withdraws)
            saves = [request for request in saves if self.noted[request].saves_are_over()]
        for request in loads:
            assert self.noted[request].load_is_over(), "closed before its owner finished on every rank"
        closed = self.ledger.close(loads, saves)
        assert [request for request, _ in closed.loads] == loads
        received.update(request for request, load in closed.loads if self._close_load(request, load))
        for request, index, save in closed.saves:
            noted = self.noted[request]
            assert noted.saves_are_over()
            assert save.done
            assert index in noted.promised.keys() - noted.done
            noted.done.add(index)
        for request in saves:
            noted = self.noted[request]
            noted.saves_added = False
            assert noted.done >= set(noted.promised)
        for request, noted in list(self.noted.items()):
            assert not (noted.load is not None and noted.load_is_over()), "a load that is in was not handed out"
            if noted.finished and noted.load is None and noted.done >= set(noted.promised):
                if noted.awaited:
                    (sent if noted.held else received).add(request)
                del self.noted[request]
        assert self.ledger.settle((), ()) == ([], [], [])
        assert not self.ledger.has_ended
        assert closed.received == received
        assert closed.sent == sent
        echoes = self.ledger.take_failures()
        assert set(echoes) == {r for r, t in self.noted.items() if t.failed and t.echo == "none" and _in(t)}
        for request in echoes:
            self.noted[request].echo = "ordered"

    def _read_failures(self, reads: str | None) -> list[str]:
        """Return what vLLM reads: those ordered, and one that has not been yet, or is of an earlier load."""
        read = []
        for request, noted in self.noted.items():
            is_known = noted.failed and _in(noted)
            if request == reads and not is_known:
                read.append(request)
            if noted.echo == "ordered" or (request == reads and is_known and noted.echo == "none"):
                noted.echo = "done"
                read.append(request)
        return read

    def _close_load(self, request: str, load: Load) -> bool:
        """Note a load that was closed; return whether vLLM goes on with its request."""
        noted = self.noted[request]
        assert noted.load is not None
        assert load.failed >= (noted.failed or noted.holed)
        assert load.aborted is (noted.finished and load.is_async)
        index, is_async, _ = noted.load
        noted.load, noted.load_added = None, False
        is_settled = not noted.finished or index not in noted.promised or noted.save_is_over(index)
        if is_async and index in LOAD_ENDS_SAVE and not is_settled:
            noted.saved[index] = set(RANKS)
            noted.given_up.add(index)
        is_resuming = is_async and not noted.finished
        noted.resuming = index if is_resuming and not load.failed else None
        return is_resuming

    def _withdraw(self, request: str, index: int) -> None:
        """Let a connector say that its save is not in after all; ranks may report it again."""
        noted = self.noted[request]
        has_one = index in noted.promised and index not in noted.done and index not in noted.given_up
        assert self.ledger.reopen_save(request, index) is has_one
        if has_one:
            noted.saved[index] = set()
            noted.saves_added = False

    @precondition(lambda self: self.noted)
    @rule()
    def everything_is_reported(self) -> None:
        """Let every open load and promise complete, end every request: nothing may be left."""
        for request, noted in list(self.noted.items()):
            if not noted.finished:
                self.finish(request, {})
        for request, noted in list(self.noted.items()):
            for rank in RANKS:
                if noted.load is not None and noted.load[1]:
                    self.report_load(request, noted.load[0], rank, ReportKind.RECEIVED)
                elif noted.load is not None:
                    self.report_sync(request, noted.load[0], rank)
                for index in noted.promised:
                    self.report_save(request, index, rank)
        self.settle()
        self.settle()  # with the failures that were ordered
        assert self.noted == {}
        assert set(self.ledger) == set()

    @invariant()
    def knows_the_choice_and_the_saves_of_live_requests_only(self) -> None:
        assert set(self.ledger) <= set(self.noted)
        for request, noted in self.noted.items():
            if request in self.ledger:
                choice = noted.owner if noted.candidate is None or noted.finished else noted.candidate[0]
                assert (self.ledger.choice(request), self.ledger._entries[request].owner) == (choice, noted.owner)
            if request in self.ledger and noted.finished:
                for rank in RANKS:
                    saved = [rank in noted.saved.get(c, ()) or noted.save_is_over(c) for c in noted.promised]
                    assert self.ledger.is_saved_on(rank, request) is all(saved)

    @invariant()
    def knows_what_each_connector_has_open(self) -> None:
        for index in CONNECTORS:
            loads, resumes, saves = self.ledger.in_flight[index].values()
            loaded = [request for request, noted in self.noted.items() if noted.resuming == index]
            assert (sorted(resumes.begun_before(0)), resumes.tokens) == (sorted(loaded), TOKENS * len(loaded))
            open_loads = [request for request, noted in self.noted.items() if noted.load and noted.load[0] == index]
            assert sorted(loads.begun_before(0)) == sorted(open_loads)
            assert loads.tokens == TOKENS * len(open_loads)
            # One that is in waits for nothing, though its request may wait for another connector.
            open_saves = [
                request
                for request, noted in self.noted.items()
                if index in noted.promised and not noted.save_is_over(index)
            ]
            assert sorted(saves.begun_before(0)) == sorted(open_saves)
            assert saves.tokens == HELD * len(open_saves)

    @invariant()
    def knows_what_some_ranks_have_reported_and_others_not(self) -> None:
        halves = {
            ("load", noted.load[0], request)
            for request, noted in self.noted.items()
            if noted.load is not None and 0 < len(noted.arrived) < noted.load[2]
        }
        halves |= {
            ("save", index, request)
            for request, noted in self.noted.items()
            for index, expected in noted.promised.items()
            if index not in noted.done and 0 < len(noted.saved.get(index, ())) < expected
        }
        assert set(self.ledger.incomplete.recent) == halves


def _in(noted: Noted) -> bool:
    return noted.load is not None and len(noted.arrived) >= noted.load[2]


LedgerAgainstModel.TestCase.settings = settings(max_examples=600, stateful_step_count=40, deadline=None)
TestLedger = LedgerAgainstModel.TestCase


def opened(is_async: bool = True, expected: int = 2, ends_save: bool = False) -> Ledger:
    ledger = Ledger([0] * ends_save)
    ledger.propose("r", (0, is_async))
    assert ledger.admit("r", 16, expected) is not None
    return ledger


def test_a_load_that_its_connector_withdrew_can_still_fail() -> None:
    """Nobody reports it any more: whoever gives it up must be able to end it."""
    ledger = opened(expected=1)
    ledger.record(report(ReportKind.RECEIVED, "r", 0))
    assert ledger.settle((), ()).loads == ["r"]
    assert ledger.fail("r", 5)
    assert not ledger.fail("r", 6), "it has failed already"
    assert ledger.take_failures() == ("r",)
    ((_, load),) = ledger.close(ledger.settle((), ["r"]).loads, []).loads
    assert load.failed


@pytest.mark.parametrize("index", [0, 1])
def test_bad_blocks_of_a_withdrawn_load_fail_it(index: int) -> None:
    """It is complete, so no receipt orders the workers to report its failure: without one it would never end."""
    ledger = opened(expected=1)
    assert ledger.settle([report(ReportKind.RECEIVED, "r", 0)], ()).loads == ["r"]
    assert ledger.settle([report(ReportKind.UNMAPPED_BAD_BLOCKS, "r", index)], ()).loads == []
    assert ledger.complete_load("r", 0, 5) is False, "the workers must report the failure first"
    assert ledger.take_failures() == ("r",)
    ((_, load),) = ledger.close(ledger.settle((), ["r"]).loads, []).loads
    assert load.failed


def test_an_abort_between_receipts_holds_blocks_until_the_last() -> None:
    """The second rank is still writing into them."""
    ledger = opened()
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0))
    assert ledger.finish("r", []).aborted is ledger.load("r")
    assert ledger.settle((), ()).loads == []
    assert ledger.settle([report(ReportKind.RECEIVED, "r", 0, 1)], ()).loads == ["r"]
    assert ledger.close(["r"], []).received == {"r"}
    assert (list(ledger), len(ledger.incomplete)) == ([], 0)


def test_a_failure_that_is_read_twice_ends_one_load() -> None:
    """The workers were ordered to report it when the last rank's report was on its way: vLLM reads both."""
    ledger = opened()
    ledger.record(report(ReportKind.FAILED, "r", 0))
    assert ledger.fail("r", 5)
    assert ledger.take_failures() == ("r",)
    assert ledger.settle((), ["r"]).loads == ["r"]
    assert ledger.close(["r"], []).loads
    ledger.propose("r", (1, True))
    ledger.admit("r", 16, 2)
    assert ledger.settle((), ["r"]).loads == []


@pytest.mark.parametrize("sibling_is_first", [True, False])
def test_a_loads_end_is_at_its_promise_if_no_other_is_reported(sibling_is_first: bool) -> None:
    """FlexKV promises at an abort, and reports no more than the end of the load."""
    ledger = opened(ends_save=True)
    ledger.finish("r", [(0, 2), (1, 1)], 10, 16)
    ledger.record(report(ReportKind.SAVED, "r", 0, 1), 20)
    if sibling_is_first:
        ledger.record(report(ReportKind.SAVED, "r", 1), 20)
    for rank in (0, 1):
        ledger.record(report(ReportKind.RECEIVED, "r", 0, rank), 30)
    closed = ledger.close(["r"], [], 40)
    assert ledger.take_stuck(100, 2) == []
    assert bool(closed.saves) is sibling_is_first
    if not sibling_is_first:
        assert ledger.settle([report(ReportKind.SAVED, "r", 1)], (), 50).saves == ["r"]
        closed = ledger.close([], ["r"], 60)
    (_, index, save), (_, sibling, _) = closed.saves
    assert (index, sibling, save.arrived, save.arrived_ns) == (0, 1, {1: (0, 0, 0), 0: None}, 40)
    assert closed.sent == {"r"}
    assert list(ledger) == []
    assert [len(each) for index in (0, 1) for each in ledger.in_flight[index].values()] == [0] * 6


def test_saves_of_a_live_request_are_not_closed() -> None:
    """Its id may be that of one that has ended before."""
    ledger = Ledger()
    ledger.arrive("r")
    ledger.record(report(ReportKind.SAVED, "r", 0))
    assert ledger.close([], ["r", "unknown"]) == ([], [], set(), set())
    assert ledger.finish("r", [(0, 1)]).early


def test_abandoned_transfer_completes_once() -> None:
    ledger = opened(expected=1)
    ledger.finish("s", [(0, 2)], 10)
    assert ledger.give_up(0, 9, 20) == (1, 0), "the save began later"
    assert ledger.give_up(0, 10, 20) == (0, 1)
    assert ledger.take_failures() == ("r",)
    assert ledger.settle((), ()).saves == ["s"]
    ((_, _, save),) = ledger.close([], ["s"]).saves
    assert save.is_abandoned
    assert save.outcome == "abandoned"


def test_stuck_transfer_is_not_stuck_again_when_a_rank_reports() -> None:
    ledger = opened(expected=3)
    for rank, now in ((2, 10), (0, 20)):
        ledger.record(report(ReportKind.RECEIVED, "r", 0, rank), now)
    assert ledger.take_stuck(9, 3) == []
    assert ledger.take_stuck(10, 3) == [(0, Stuck("load", "r", (1,)))], "since the first report"
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0), 30)
    assert ledger.take_stuck(40, 3) == []
    assert ledger.settle([report(ReportKind.RECEIVED, "r", 0, 1)], (), 50).loads == ["r"], "late is not lost"


def test_a_half_reported_save_waits_since_its_promise() -> None:
    ledger = opened()
    ledger.record(report(ReportKind.SAVED, "r", 1, 0), 10)
    assert ledger.take_stuck(90, 2) == []
    ledger.finish("r", [(1, 2)], 20)
    assert ledger.take_stuck(19, 2) == []
    assert ledger.take_stuck(20, 2) == [(1, Stuck("save", "r", (1,)))]


def test_a_half_reported_load_given_up_is_not_stuck_later() -> None:
    """Its failure is known: no rank is waited for any more."""
    ledger = opened(expected=2)
    ledger.record(report(ReportKind.RECEIVED, "r", 0, 0), 10)
    assert ledger.fail("r", 20)
    assert ledger.take_stuck(100, 2) == []


def test_only_an_open_asynchronous_load_can_be_given_up() -> None:
    """A synchronous one ends with its step, and vLLM has read its end."""
    ledger = opened(is_async=False)
    ledger.arrive("idle")
    for request in ("r", "idle", "unknown"):
        assert not ledger.fail(request, 5)
    assert ledger.take_failures() == ()
    load: Any = ledger.load("r")
    assert (load.failed, load.arrived) == (False, {})


def test_a_save_that_is_in_waits_for_no_other_connector() -> None:
    """An offloading connector stores in no time; NIXL holds the blocks until a decode engine has read them."""
    ledger = Ledger()
    ledger.finish("r", [(0, 2), (1, 1)], 10, 16)
    for rank in (0, 1):
        ledger.record(report(ReportKind.SAVED, "r", 0, rank), 20)
    stored, held = (ledger.in_flight[index]["save"] for index in (0, 1))
    assert (len(stored), stored.tokens, stored.oldest_ns) == (0, 0, 0)
    assert (len(held), held.tokens, held.oldest_ns) == (1, 16, 10)
    assert ledger.give_up(0, 50, 60) == (0, 0), "it has reported"
    assert ledger.give_up(1, 50, 60) == (0, 1)
    assert ledger.give_up(1, 50, 60) == (0, 0), "once"
    closed = ledger.close([], ledger.settle((), ()).saves, 70)
    assert [(index, save.outcome) for _, index, save in closed.saves] == [(0, "ok"), (1, "abandoned")]


def test_an_abandoned_save_is_not_stuck_when_a_rank_reports() -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 2), (1, 1)], 10)
    ledger.give_up(0, 10, 20)
    ledger.record(report(ReportKind.SAVED, "r", 0, 0), 30)
    assert ledger.take_stuck(100, 2) == []
    ledger.settle([report(ReportKind.SAVED, "r", 1)], (), 40)
    assert [save.outcome for *_, save in ledger.close([], ["r"], 50).saves] == ["abandoned", "ok"]
    assert (list(ledger), len(ledger.incomplete)) == ([], 0)


# What a connector's scheduler side adds to the workers' reports, or withdraws


def test_a_withdrawn_save_waits_since_its_promise() -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 1)], 10, 16)
    ledger.finish("s", [(0, 1)], 20, 24)
    assert ledger.settle([report(ReportKind.SAVED, "r", 0)], (), 30).saves == ["r"]
    saves = ledger.in_flight[0]["save"]
    assert saves.oldest_ns == 20
    assert ledger.reopen_save("r", 0)
    assert (len(saves), saves.tokens, saves.oldest_ns) == (2, 40, 10)
    assert saves.begun_before(10) == ["r"]


def test_a_withdrawn_save_waits_for_new_reports_even_if_given_up() -> None:
    ledger = Ledger()
    ledger.finish("r", [(0, 1)], 10)
    assert ledger.give_up(0, 10, 20) == (0, 1)
    assert ledger.settle((), ()).saves == ["r"]
    assert ledger.reopen_save("r", 0)
    assert ledger.settle([report(ReportKind.SAVED, "r", 0)], ()).saves == ["r"]
    ((_, _, save),) = ledger.close([], ["r"]).saves
    assert save.outcome == "ok"
