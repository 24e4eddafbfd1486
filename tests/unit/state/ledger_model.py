"""A naive model of the ledger: random lookups, allocations, reports on any rank in any order, aborts, resumes."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Report, ReportKind

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
        assert set(self.ledger.incomplete.since) == halves


def _in(told: Told) -> bool:
    return told.load is not None and len(told.arrived) >= told.load[2]
