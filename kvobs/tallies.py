"""Which requests all ranks have reported: one tally of the reports about loads, one of those about saves.

A request goes through rounds, as a preempted one loads again. The first report opens a round, the last one expected
completes it; a rank counts once in it. Reporters are bits of an int: bit ``i`` is rank ``i``, the bits above the ranks
are reporters whose rank is unknown. What is remembered is bounded by number and age.
"""

import logging
from collections.abc import Container, Sequence
from itertools import chain, islice
from typing import NamedTuple

from kvobs.notices import once

MOST = 10_000
"""How many rounds are kept open, and how many completed ones are remembered."""

FORGET_AFTER = 10
"""How old a round gets, in multiples of the time after which it is stuck."""

Reports = Sequence[tuple[int, set[str]]]
"""What was reported in one step: (reporter's bit, requests)."""


class Step(NamedTuple):
    """When reports came in, how many complete a round that they open, and the number of ranks there are."""

    now: float
    expected: int
    ranks: int


class Round(NamedTuple):
    """Who has reported; requests of which the same is known share one."""

    opened: Step
    heard: int

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not reported; none when it is unknown which ones will."""
        if self.opened.expected != self.opened.ranks:
            return ()
        return tuple(rank for rank in range(self.opened.ranks) if not self.heard >> rank & 1)


class Rounds:
    """Open rounds by request, the oldest first; those that were found to be stuck are kept apart."""

    def __init__(self) -> None:
        self.fresh: dict[str, Round] = {}
        self.stuck: dict[str, Round] = {}

    def __len__(self) -> int:
        return len(self.fresh) + len(self.stuck)

    def __contains__(self, request: object) -> bool:
        return request in self.fresh or request in self.stuck

    def pop(self, request: str) -> Round | None:
        return self.fresh.pop(request, None) or self.stuck.pop(request, None)

    def hear(self, request: str, reporter: int, step: Step) -> None:
        """Note that a reporter was heard, which completes nothing."""
        book = self.stuck if request in self.stuck else self.fresh
        opened, heard = book.get(request, (step, 0))
        book[request] = Round(opened, heard | reporter)

    def find_stuck(self, before: float) -> list[tuple[str, Round]]:
        """Return the rounds that were opened before this time; each is found once."""
        found = []
        for request, round_ in self.fresh.items():
            if round_.opened.now > before:
                break
            found.append((request, round_))
        for request, _ in found:
            del self.fresh[request]
        self.stuck.update(found)
        return found

    def forget(self, before: float, but: Container[str] = ()) -> None:
        """Forget the rounds that were opened before this time."""
        old = [request for request, round_ in self.stuck.items() if round_.opened.now <= before and request not in but]
        for request in old:
            del self.stuck[request]

    def trim(self, but: Container[str] = ()) -> None:
        """Forget the oldest of too many."""
        if (excess := len(self) - MOST) <= 0:
            return
        oldest = (request for request in chain(self.stuck, self.fresh) if request not in but)
        for request in list(islice(oldest, excess)):
            self.pop(request)
        message = "over %d transfers are reported by some ranks and not by others: the oldest are forgotten"
        once("tallies", logging.WARNING, message, MOST)

    def next_stuck(self, after: float) -> float | None:
        """Return when the next round will be stuck."""
        return next((round_.opened.now + after for round_ in self.fresh.values()), None)


class Tally:
    """The rounds of one kind of report."""

    def __init__(self) -> None:
        self.open = Rounds()
        # Completed by fewer reporters than there are ranks: what the others say next belongs to the same round.
        self.completed: dict[str, Round] = {}

    def __len__(self) -> int:
        return len(self.open) + len(self.completed)

    def hear(self, reports: Reports, step: Step) -> set[str]:
        """Take in the reports of one step, each reporter's at most once; return the requests that are complete."""
        if not reports:
            return set()
        first = reports[0][1]
        others = [requests for _, requests in reports[1:]]
        # What all say, as a rule everything, is dealt with in bulk.
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
        """Open a round for requests of which nothing is known; return those that it completes: all or none."""
        said = round_.heard.bit_count()
        if said < round_.opened.expected:
            self.open.fresh.update(dict.fromkeys(requests, round_))
            return set()
        if said < round_.opened.ranks:
            self.completed.update(dict.fromkeys(requests, round_))
        return requests

    def _continue(self, reporters: dict[str, int], step: Step) -> set[str]:
        """Take in who reported each request, of which something may be known; return those that are complete."""
        finished = set()
        fresh, stuck, completed = self.open.fresh, self.open.stuck, self.completed
        nothing = Round(step, 0)
        for request, said in reporters.items():
            new = said
            if request in completed:
                new = self._absorb(request, said)
                if not new:
                    continue
            book = stuck if request in stuck else fresh
            opened, heard = book.get(request, nothing)
            if opened.expected > opened.ranks:  # ranks report more than once: what counts is the number
                heard = (1 << heard.bit_count() + new.bit_count()) - 1
            else:
                heard |= new
            if heard.bit_count() < opened.expected:
                book[request] = Round(opened, heard)
                continue
            finished.add(request)
            book.pop(request, None)
            completed.pop(request, None)
            if heard.bit_count() < opened.ranks:
                completed[request] = Round(step, heard)
        return finished

    def _absorb(self, request: str, said: int) -> int:
        """Take late reports into the completed round that they belong to; return the reporters that are not late."""
        opened, heard = self.completed[request]
        everyone = heard | said
        if everyone.bit_count() < opened.ranks:
            self.completed[request] = Round(opened, everyone)
        else:
            del self.completed[request]
        return said & heard
