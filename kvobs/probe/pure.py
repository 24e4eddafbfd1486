"""Time and count calls into connectors, in Python: the reference, and what runs where ``compiled`` does not.

``compiled.c`` is the same in C, and the tests run over both. All numbers are 64-bit words of one page (see
``kvobs.page.layout``). Whatever is rare, such as a slow or failed call, is handed to the ``Target``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

from kvobs.page.calls import CALLS_AT, WORDS, pack

Call = Callable[..., Any]
Clock = Callable[[], int]


class Target(NamedTuple):
    """A connector's call, and where it is counted."""

    call: Call
    begun: int
    """Position of its marks: the last start, and the latest start of a call that ended."""
    histogram: int
    noticed_ns: int
    notice: Callable[[int, int, Any], int]
    """Gets begin, duration and first argument of a call longer than ``noticed_ns``; returns the duration to count.

    What it or ``failed`` raises reaches the caller if it is not an ``Exception``: it may be a signal's."""
    failed: Callable[[int, int, BaseException, Any], None]
    """Gets begin, duration, exception and first argument of a call that raised, and counts it."""


class Wait(NamedTuple):
    """Where a connector's calls and waits are counted: positions in the page."""

    layers: int
    """The sum of its calls of a layer hook; -1: it has none."""
    step: int
    """The sum of its calls of the step hook that goes with it."""
    stalls: int
    """The histogram of the steps' waits."""
    what: int  # of the record of a step's layers in the ring


class Waits(Protocol):
    """Measures the waits of steps."""

    def close(self, is_waiting: bool, /) -> list[int]:
        """End a step, and return how long each connector's calls took in it, in ns.

        A step waits for its layers, and for the step hook if it ``is_waiting`` for that; the time is of both.
        """


class Probe(Protocol):
    """Counts in the words of one page, which ends with a ring of the last calls."""

    def note(self, begin_ns: int, spent_ns: int, what: int, /) -> None:
        """Write a call into the ring, over the oldest one."""

    def timed(self, *target: Any) -> Call:
        """Return the call of a ``Target``, timed; answers and exceptions pass untouched."""

    def fan_out(self, targets: tuple[Target, ...], fan_outs: int, /) -> Call:
        """Return a call of all targets, each timed: one reading of the clock ends a call and begins the next.

        The time that ``notice`` takes is not counted. The first of the two words at ``fan_outs`` counts the fan-outs
        that have ended. The second is when the last call ended, normally or by an exception: the call that began later
        is in progress. Keywords also pass.
        """

    def waits(self, rows: tuple[Wait, ...], fan_outs: int, buckets: bytes, total: int, /) -> Waits:
        """Return what measures the waits of steps for the layers of these fan-outs; the last two are of ``stalls``."""


class PureProbe(Probe):
    """The probe in Python.

    The ring begins at the position ``ring``. ``buckets`` has a duration's bucket in a histogram of calls by the number
    of the duration's bits, and ``total`` is the position of its sum.
    """

    def __init__(
        self, words: memoryview, ring: int, buckets: bytes, total: int, clock: Clock = perf_counter_ns, /
    ) -> None:
        self._clock = clock
        self.words, self._buckets, self._total = words, buckets, total
        self._ring, self._last, self._next = ring, len(words) - 2 * WORDS, [ring]
        self._short_ns = 2 ** (bisect_right(buckets, buckets[0]) - 1)  # the first bucket's bound
        self._short: dict[int, tuple[tuple[Target, ...], list[int], list[int]]] = {}

    def note(self, begin_ns: int, spent_ns: int, what: int, /) -> None:
        words, at = self.words, self._next[0]
        # There is no call between reading and writing the ring's position: it may change threads.
        self._next[0] = at + WORDS if at <= self._last else self._ring
        words[at], words[at + 1], words[at + 2] = begin_ns, spent_ns, what

    def observe(self, histogram: int, buckets: bytes, total: int, ns: int) -> None:
        """Add a duration to a histogram."""
        self.words[histogram + buckets[(ns - 1).bit_length()]] += 1
        self.words[histogram + total] += ns

    def timed(self, *target: Any) -> Call:
        call, begun, histogram, noticed_ns, notice, failed = Target(*target)
        words, ended, following, first, last = self.words, begun + 1, self._next, self._ring, self._last
        bucket, total, short_ns = self._buckets, histogram + self._total, min(self._short_ns, noticed_ns)
        clock, what = self._clock, pack(begun)
        latest = 0  # as words[ended], which takes longer to read

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal latest
            start = words[begun] = clock()
            try:
                try:
                    answer = call(*args, **kwargs)
                except BaseException as error:
                    failed(start, clock() - start, error, args[0] if args else None)
                    raise
                spent = clock() - start
                at = following[0]  # as in `note`, which would cost as much as all of this
                following[0] = at + WORDS if at <= last else first
                words[at] = start
                words[at + 1] = spent
                words[at + 2] = what
            finally:  # a signal may end this between any two lines
                # A call that began later, on another thread or within this one, may have ended before.
                if start > latest:
                    words[ended] = latest = start
            if spent <= short_ns:
                words[histogram] += 1
            else:
                if spent > noticed_ns:
                    spent = notice(start, spent, args[0] if args else None)
                words[histogram + bucket[(spent - 1).bit_length()]] += 1
            words[total] += spent
            return answer

        return timed

    def fan_out(self, targets: tuple[Target, ...], fan_outs: int, /) -> Call:
        words, clock, recorded = self.words, self._clock, [self.timed(*target) for target in targets]
        calls = [(i, target.begun, target.call) for i, target in enumerate(targets)]
        short_ns = min([self._short_ns, *(target.noticed_ns for target in targets)])
        ended, short = fan_outs + 1, [0] * (len(targets) + 1)  # the short ones: their times, and their number

        def general(*args: Any, **kwargs: Any) -> None:
            self.settle(fan_outs)  # the number of a slow layer is one of all before it
            try:
                for call in recorded:
                    call(*args, **kwargs)
                words[fan_outs] += 1
            finally:
                words[ended] = clock()

        def fan_out(*args: Any, **kwargs: Any) -> None:
            if kwargs or not args:
                return general(*args, **kwargs)
            times: list[int] = []
            i, first = 0, clock()
            begin = first
            try:
                for i, begun, call in calls:  # noqa: B007 - an exception ends call i
                    words[begun] = begin
                    call(*args)
                    end = clock()
                    times.append(end - begin)
                    begin = end
                words[ended] = begin
            except BaseException as error:
                try:
                    spent = clock() - first
                    self._count(fan_outs, first, times[:i], args[0])
                    ended_ns = sum(times[:i])
                    targets[i].failed(first + ended_ns, spent - ended_ns, error, args[0])
                finally:
                    words[ended] = clock()  # a signal may end that before its first line
                raise
            if begin - first > short_ns:
                self._count(fan_outs, first, times, args[0])
                words[fan_outs] += 1
            else:
                for i, ns in enumerate(times):
                    short[i] += ns
                short[-1] += 1
            return None

        self._short[fan_outs] = targets, short, short[:]
        return fan_out

    def _count(self, fan_outs: int, begin: int, times: Sequence[int], subject: object) -> None:
        """Count the calls of a fan-out that was long, or failed."""
        self.settle(fan_outs)
        for target, ns in zip(self._short[fan_outs][0], times, strict=False):
            counted = target.notice(begin, ns, subject) if ns > target.noticed_ns else ns
            self.observe(target.histogram, self._buckets, self._total, counted)
            begin += ns

    def settle(self, fan_outs: int) -> None:
        """Count the short fan-outs: a list's element takes less time than a page's word."""
        if fan_outs not in self._short:
            return
        targets, short, before = self._short[fan_outs]
        *times, n = map(int.__sub__, now := short[:], before)
        before[:] = now
        if n:
            self.words[fan_outs] += n
            for target, ns in zip(targets, times, strict=True):
                self.words[target.histogram] += n
                self.words[target.histogram + self._total] += ns

    def waits(self, rows: tuple[Wait, ...], fan_outs: int, buckets: bytes, total: int, /) -> Waits:
        return PureWaits(self, rows, fan_outs, buckets, total)


class PureWaits(Waits):
    """The waits of steps, measured in Python."""

    def __init__(self, probe: PureProbe, rows: tuple[Wait, ...], fan_outs: int, buckets: bytes, total: int) -> None:
        self._probe, self._rows, self._fan_outs, self._buckets, self._total = probe, rows, fan_outs, buckets, total
        self._read = [fan_outs, *(row.step for row in rows), *(row.layers for row in rows if row.layers >= 0)]
        self._before = [probe.words[at] for at in self._read]

    def close(self, is_waiting: bool, /) -> list[int]:
        probe, words = self._probe, self._probe.words
        probe.settle(self._fan_outs)
        now = [words[at] for at in self._read]
        fan_outs, *times = map(int.__sub__, now, self._before)
        self._before, steps, layers = now, times[: len(self._rows)], iter(times[len(self._rows) :])
        for i, row in enumerate(self._rows):
            in_layers = next(layers) if row.layers >= 0 else 0
            if fan_outs and row.layers >= 0:
                probe.note(words[self._fan_outs + 1] - in_layers, in_layers, fan_outs << CALLS_AT | row.what)
            if stall := in_layers + (steps[i] if is_waiting else 0):
                probe.observe(row.stalls, self._buckets, self._total, stall)
            steps[i] += in_layers
        return steps
