"""Count which ranks have reported each request: one tally for loads, one for saves.

A request can have several rounds, as a preempted one loads again. The first report opens a round, the last expected one
completes it; a rank counts once per round. Reporters are bits of an int: bit ``i`` is rank ``i``, the bits above the
ranks are reporters of unknown rank. The rounds are bounded by number and age.
"""

import logging
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from kvobs.log import once

MOST = 10_000
"""Maximum number of open rounds, and of remembered completed rounds."""

FORGET_AFTER = 10
"""Maximum age of a round, in multiples of the time after which it is stuck."""

Reports = Sequence[tuple[int, set[str]]]
"""The reports of one step: (reporter's bit, requests)."""


class RoundStart(NamedTuple):
    """The conditions of a round that reports open: their time, how many complete it, and the number of ranks."""

    now: float
    expected: int
    ranks: int


class Round(NamedTuple):
    """The reporters of a round; requests with the same reporters share one object."""

    opened: RoundStart
    reported: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not reported; none if it is unknown which ones will."""
        if self.opened.expected != self.opened.ranks:
            return ()
        return tuple(rank for rank in range(self.opened.ranks) if not self.reported >> rank & 1)


class Rounds:
    """Open rounds by request, the oldest first; stuck ones are kept separately."""

    def __init__(self) -> None:
        self.fresh: dict[str, Round] = {}
        self.stuck: dict[str, Round] = {}

    def __len__(self) -> int:
        return len(self.fresh) + len(self.stuck)

    def __contains__(self, request: object) -> bool:
        return request in self.fresh or request in self.stuck

    def pop(self, request: str) -> Round | None:
        return self.fresh.pop(request, None) or self.stuck.pop(request, None)

    def count(self, request: str, reporter: int, step: RoundStart) -> None:
        """Add a reporter that does not complete the round."""
        book = self.stuck if request in self.stuck else self.fresh
        opened, reported = book.get(request, (step, 0))
        book[request] = Round(opened, reported | reporter)

    def find_stuck(self, before: float) -> list[tuple[str, Round]]:
        """Return the rounds opened before this time; each is returned once."""
        stuck = list(takewhile(lambda item: item[1].opened.now <= before, self.fresh.items()))
        for request, _ in stuck:
            del self.fresh[request]
        self.stuck.update(stuck)
        return stuck

    def forget(self, before: float, but: Container[str] = ()) -> None:
        """Forget the rounds that were opened before this time."""
        old = [request for request, round_ in self.stuck.items() if round_.opened.now <= before and request not in but]
        for request in old:
            del self.stuck[request]

    def trim(self, but: Container[str] = ()) -> None:
        """Forget the oldest rounds above the limit."""
        if (excess := len(self) - MOST) <= 0:
            return
        oldest = (request for request in chain(self.stuck, self.fresh) if request not in but)
        for request in list(islice(oldest, excess)):
            self.pop(request)
        message = "more than %d transfers are reported by some ranks only: the oldest are dropped"
        once("tallies", logging.WARNING, message, MOST)

    def next_stuck(self, after: float) -> float | None:
        """Return when the next round will be stuck."""
        return next((round_.opened.now + after for round_ in self.fresh.values()), None)


class Tally:
    """The rounds of one kind of report."""

    def __init__(self) -> None:
        self.open = Rounds()
        # Completed by fewer reporters than ranks: the next reports of the others belong to the same round.
        self.completed: dict[str, Round] = {}

    def __len__(self) -> int:
        return len(self.open) + len(self.completed)

    def count(self, reports: Reports, step: RoundStart) -> set[str]:
        """Process the reports of one step, each reporter's at most once; return the complete requests."""
        if not reports:
            return set()
        first = reports[0][1]
        others = [requests for _, requests in reports[1:]]
        # Requests that all report, usually all of them, are processed in bulk.
        common = first if all(requests == first for requests in others) else first.intersection(*others)
        everyone = sum(reporter for reporter, _ in reports)
        unknown = common.difference(self.open.fresh)
        for book in (self.open.stuck, self.completed):
            if book:
                unknown = unknown.difference(book)
        finished = self._open(unknown, Round(step, everyone))
        reporters = {} if len(unknown) == len(common) else dict.fromkeys(common - unknown, everyone)
        for reporter, requests in reports:
            if len(requests) > len(common):
                for request in requests - common:
                    reporters[request] = reporters.get(request, 0) | reporter
        if reporters:
            finished |= self._continue(reporters, step)
        self.open.trim()
        if (excess := len(self.completed) - MOST) > 0:
            for request in list(islice(self.completed, excess)):
                del self.completed[request]
        return finished

    def forget(self, before: float) -> None:
        """Forget the rounds, open and completed, that were opened or completed before this time."""
        self.open.forget(before)
        while self.completed:
            request = next(iter(self.completed))
            if self.completed[request].opened.now > before:
                return
            del self.completed[request]

    def _open(self, requests: set[str], round_: Round) -> set[str]:
        """Open a round for new requests; return those that it completes: all or none."""
        reports = round_.reported.bit_count()
        if reports < round_.opened.expected:
            self.open.fresh.update(dict.fromkeys(requests, round_))
            return set()
        if reports < round_.opened.ranks:
            self.completed.update(dict.fromkeys(requests, round_))
        return requests

    def _continue(self, reporters: dict[str, int], step: RoundStart) -> set[str]:
        """Add the reporters of each request, with or without an open round; return the complete requests."""
        finished = set()
        fresh, stuck, completed = self.open.fresh, self.open.stuck, self.completed
        nothing = Round(step, 0)
        for request, reports in reporters.items():
            new = reports
            if request in completed:
                new = self._absorb(request, reports)
                if not new:
                    continue
            book = stuck if request in stuck else fresh
            opened, reported = book.get(request, nothing)
            if opened.expected > opened.ranks:  # ranks report more than once: only the number counts
                reported = (1 << reported.bit_count() + new.bit_count()) - 1
            else:
                reported |= new
            if reported.bit_count() < opened.expected:
                book[request] = Round(opened, reported)
                continue
            finished.add(request)
            book.pop(request, None)
            completed.pop(request, None)
            if reported.bit_count() < opened.ranks:
                completed[request] = Round(step, reported)
        return finished

    def _absorb(self, request: str, reports: int) -> int:
        """Add late reports to their completed round; return the reporters that are not late."""
        opened, reported = self.completed[request]
        everyone = reported | reports
        if everyone.bit_count() < opened.ranks:
            self.completed[request] = Round(opened, everyone)
        else:
            del self.completed[request]
        return reports & reported


class Remaining(Mapping[str, int]):
    """Request -> number of missing reports, as in vLLM's aggregator."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def __getitem__(self, request: str) -> int:
        rounds = self._tally.open
        opened, reported = rounds.stuck[request] if request in rounds.stuck else rounds.fresh[request]
        return opened.expected - reported.bit_count()

    def __iter__(self) -> Iterator[str]:
        return chain(self._tally.open.stuck, self._tally.open.fresh)

    def __len__(self) -> int:
        return len(self._tally.open)
