"""Count which ranks have reported each request: one tally for loads, one for saves.

A request can have several rounds, as a preempted one loads again. The first report opens a round, the last expected one
completes it; a rank counts once per round. Reporters are bits of an int: bit ``i`` is rank ``i``, the bits above the
ranks are reporters of unknown rank. The rounds are bounded by number and age.
"""

import logging
import math
from collections.abc import Container, Sequence
from itertools import islice, takewhile
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


class Rounds(dict[str, Round]):
    """Open rounds by request, the oldest first."""

    _stuck_before = -math.inf  # the rounds that opened by then have been returned as stuck

    def count(self, request: str, reporter: int, step: RoundStart) -> None:
        """Add a reporter that does not complete the round."""
        opened, reported = self.get(request, (step, 0))
        self[request] = Round(opened, reported | reporter)

    def find_stuck(self, before: float) -> list[tuple[str, Round]]:
        """Return the rounds opened by this time; each is returned once."""
        after, self._stuck_before = self._stuck_before, before
        return [(request, round_) for request, round_ in self.items() if after < round_.opened.now <= before]

    def next_stuck(self, after: float) -> float | None:
        """Return when the next round will be stuck."""
        opened = (round_.opened.now for round_ in self.values())
        return next((at + after for at in opened if at > self._stuck_before), None)

    def forget(self, before: float, but: Container[str] = ()) -> None:
        """Forget the rounds that were opened by this time."""
        old = takewhile(lambda item: item[1].opened.now <= before, self.items())
        for request in [request for request, _ in old if request not in but]:
            del self[request]

    def trim(self, but: Container[str] = ()) -> None:
        """Forget the oldest rounds above the limit."""
        if (excess := len(self) - MOST) <= 0:
            return
        for request in list(islice((request for request in self if request not in but), excess)):
            del self[request]
        message = "more than %d transfers have been reported by only some of the ranks; the oldest are dropped"
        once("tallies", logging.WARNING, message, MOST)


class Tally:
    """The rounds of one kind of report."""

    def __init__(self) -> None:
        self.open = Rounds()
        # Completed by fewer reporters than ranks: the next reports of the others belong to the same round.
        self.completed = Rounds()

    def count(self, reports: Reports, step: RoundStart) -> set[str]:
        """Process the reports of one step, each reporter's at most once; return the complete requests."""
        if not reports:
            return set()
        first = reports[0][1]
        others = [requests for _, requests in reports[1:]]
        # Requests that all report, usually all of them, are processed in bulk.
        common = first if all(requests == first for requests in others) else first.intersection(*others)
        everyone = sum(reporter for reporter, _ in reports)
        unknown = set(common)
        for book in (self.open, self.completed):
            if book:
                unknown -= {*filter(book.__contains__, unknown)}
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
        self.completed.forget(before)

    def _open(self, requests: set[str], round_: Round) -> set[str]:
        """Open a round for new requests; return those that it completes: all or none."""
        reports = round_.reported.bit_count()
        if reports < round_.opened.expected:
            self.open.update(dict.fromkeys(requests, round_))
            return set()
        if reports < round_.opened.ranks:
            self.completed.update(dict.fromkeys(requests, round_))
        return requests

    def _continue(self, reporters: dict[str, int], step: RoundStart) -> set[str]:
        """Add the reporters of each request, with or without an open round; return the complete requests."""
        finished = set()
        nothing = Round(step, 0)
        for request, reports in reporters.items():
            new = reports
            if request in self.completed:
                new = self._absorb(request, reports)
                if not new:
                    continue
            opened, reported = self.open.get(request, nothing)
            if opened.expected > opened.ranks:  # ranks report more than once: only the number counts
                reported = (1 << reported.bit_count() + new.bit_count()) - 1
            else:
                reported |= new
            if reported.bit_count() < opened.expected:
                self.open[request] = Round(opened, reported)
                continue
            finished.add(request)
            self.open.pop(request, None)
            self.completed.pop(request, None)
            if reported.bit_count() < opened.ranks:
                self.completed[request] = Round(step, reported)
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
