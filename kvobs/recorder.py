"""The hot path: time every call into a child, count it, notice that it was slow or failed; hand out differences.

All numbers are cumulative and belong to one process. What ``take`` hands out is what was added since the last time, so
that a peer only ever adds. A fault in here is contained: it never reaches the child, the caller, or vLLM.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from time import perf_counter_ns
from typing import Any, NamedTuple

from kvobs import faults, signals
from kvobs.hooks import HOOKS, Cadence
from kvobs.notices import once
from kvobs.signals import CHILD_WIDTH, PROCESS_WIDTH, Signal

Call = Callable[..., Any]

# Durations of one hook of one child: item k counts those in (2**(k-1), 2**k] ns; then their sum in ns.
SUM = 64
Durations = list[int]

# A wall clock that never jumps: what other processes compare with is fixed once, at start.
_WALL_OFFSET = time.time_ns() - perf_counter_ns()

ERROR_TYPES_AT_MOST = 64  # different (child, hook, error type); the ones after that are counted as OTHER_ERROR
OTHER_ERROR = "_OTHER"  # OpenTelemetry's word for it
_NAME_AT_MOST = 64


def wall_ns() -> int:
    """Return the time in ns since the epoch, monotonic within this process."""
    return perf_counter_ns() + _WALL_OFFSET


class Taken(NamedTuple):
    """What was added since the last time: plain builtins, ready for the wire."""

    counts: dict[int, int]  # slot -> how much was added
    opened: list[list[Any]]  # [signal, child, label values..., how much was added], for open sets of label values
    gauges: dict[int, int]  # slot -> value, of gauges that changed


class Recorder:
    """The numbers of one process.

    Args:
        children: how many there are.
        slow_ns: a call that takes longer is counted as slow; hooks called once or on demand are exempt.
        names: the children's names, for the log.
    """

    def __init__(self, children: int, slow_ns: float = float("inf"), names: tuple[str, ...] = ()) -> None:
        width = PROCESS_WIDTH + CHILD_WIDTH * children
        self._counts = [0] * width
        self._shipped = [0] * width
        self._durations: dict[tuple[int, str], tuple[int, Durations, Durations]] = {}  # first slot, now, shipped
        self._opened: dict[tuple[str | int, ...], int] = {}
        self._gauges: dict[int, int] = {}
        self._changed_gauges: dict[int, int] = {}
        self._slow_ns = slow_ns
        self._names = names or tuple(map(str, range(children)))

    # Counting

    def count(self, child: int, slot: int, n: int = 1) -> None:
        """Add ``n`` to a slot (see ``signals.slot``) of the child at this position."""
        try:
            self._counts[PROCESS_WIDTH + child * CHILD_WIDTH + slot] += n
        except Exception:
            faults.contain("record")

    def observe(self, child: int, signal: Signal, ns: int, *values: str) -> None:
        """Add a duration to a histogram of this child."""
        try:
            first = PROCESS_WIDTH + child * CHILD_WIDTH + signals.slot(signal, *values)
            ns = max(0, ns)
            self._counts[first + _bucket(signal, ns)] += 1
            self._counts[first + len(signal.bounds) + 1] += ns
        except Exception:
            faults.contain("record")

    def set_gauge(self, child: int, slot: int, value: int) -> None:
        """Set a gauge of this child; it is shipped when it differs from what was shipped before."""
        try:
            place = PROCESS_WIDTH + child * CHILD_WIDTH + slot
            if self._gauges.get(place, 0) != value:
                self._gauges[place] = self._changed_gauges[place] = value
        except Exception:
            faults.contain("record")

    def count_open(self, child: int, signal: Signal, *values: str) -> None:
        """Add 1 to a series whose label values are known at run time only."""
        try:
            key: tuple[str | int, ...] = (signal.name, child, *values)
            self._opened[key] = self._opened.get(key, 0) + 1
        except Exception:
            faults.contain("record")

    # Calls

    def durations(self, child: int, hook: str) -> Durations:
        """Return where the durations of this hook's calls into this child are added up."""
        label = signals.hook_label(hook)
        if (child, label) not in self._durations:
            first = PROCESS_WIDTH + child * CHILD_WIDTH + signals.slot(signals.CALL_DURATION, label)
            self._durations[child, label] = (first, [0] * (SUM + 1), [0] * (SUM + 1))
        return self._durations[child, label][1]

    def slow_ns(self, hook: str) -> float:
        """Return from which duration on a call of this hook is slow."""
        return float("inf") if HOOKS[hook].cadence is Cadence.ONCE else self._slow_ns

    def timed(self, child: int, hook: str, call: Call) -> Call:
        """Return ``call`` with every call timed and its errors counted; answers and errors pass untouched."""
        durations, slow_ns = self.durations(child, hook), self.slow_ns(hook)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                answer = call(*args, **kwargs)
            except BaseException as error:
                self.failed(child, hook, perf_counter_ns() - start, error)
                raise
            try:
                spent = perf_counter_ns() - start
                durations[(spent - 1).bit_length()] += 1
                durations[SUM] += spent
                if spent > slow_ns:
                    self.slow(child, hook, spent)
            except Exception:
                faults.contain("record")
            return answer

        return recorded

    def slow(self, child: int, hook: str, spent: int) -> None:
        """Count a slow call, and log the first of this hook."""
        self.count(child, signals.slot(signals.SLOW_CALLS, signals.hook_label(hook)))
        once(
            f"slow:{child}:{hook}",
            logging.WARNING,
            "connector %r: %s took %.0f ms, more than slow_call_ms (%g). Further ones are counted in "
            "kvobs_slow_calls_total only",
            self._names[child],
            hook,
            spent / 1e6,
            self._slow_ns / 1e6,
        )

    def failed(self, child: int, hook: str, spent: int, error: BaseException) -> None:
        """Count a call that ended with an exception."""
        try:
            durations = self.durations(child, hook)
            durations[(spent - 1).bit_length()] += 1
            durations[SUM] += spent
            kind = type(error).__qualname__[:_NAME_AT_MOST]
            key = (signals.CALL_ERRORS.name, child, hook, kind)
            known = [other for other in self._opened if other[0] == signals.CALL_ERRORS.name]
            if key not in known and len(known) >= ERROR_TYPES_AT_MOST:
                kind = OTHER_ERROR
            self.count_open(child, signals.CALL_ERRORS, hook, kind)
        except Exception:
            faults.contain("record")

    # Shipping

    def take(self) -> Taken:
        """Return what was added since the last call."""
        begin = perf_counter_ns()
        calls = self._fold_durations()
        self._counts[_RECORD] += int(calls * cost_of_recording())
        counts = {}
        for place, (now, before) in enumerate(zip(self._counts, self._shipped, strict=True)):
            if now != before:
                counts[place] = now - before
                self._shipped[place] = now
        opened = [[*key, n] for key, n in self._opened.items()]
        self._opened = dict.fromkeys(self._opened, 0)
        gauges, self._changed_gauges = self._changed_gauges, {}
        self._counts[_FLUSH] += perf_counter_ns() - begin  # ships with the next
        return Taken(counts, [row for row in opened if row[-1]], gauges)

    def _fold_durations(self) -> int:
        """Add the calls' durations to the exposed buckets; return how many calls there were since the last time."""
        calls = 0
        for first, now, shipped in self._durations.values():
            if now == shipped:
                continue
            for k, (after, before) in enumerate(zip(now, shipped, strict=True)):
                if after != before:
                    self._counts[first + _FOLD[k]] += after - before
                    shipped[k] = after
                    calls += after - before if k != SUM else 0
        return calls


_RECORD, _FLUSH = (signals.slot(signals.SELF_SECONDS, where) for where in ("record", "flush"))
# Where each of a hook's 64 durations, and their sum, is exposed.
_FOLD = [bisect_left(signals.CALL_DURATION.bounds, k) for k in range(SUM)] + [len(signals.CALL_DURATION.bounds) + 1]


def _bucket(signal: Signal, ns: int) -> int:
    """Return the first bucket whose bound is not below ``ns``."""
    return bisect_left(signal.bounds, (ns - 1).bit_length() if ns > 0 else 0)


@cache
def cost_of_recording(calls: int = 1000) -> float:
    """Measure once what timing a call costs beyond the call itself, in ns."""

    def nothing() -> None:
        """Stand for a child's hook."""

    recorded = Recorder(1).timed(0, "wait_for_save", nothing)
    times = []
    for call in (nothing, recorded):
        begin = perf_counter_ns()
        for _ in range(calls):
            call()
        times.append(perf_counter_ns() - begin)
    return max(0, times[1] - times[0]) / calls
