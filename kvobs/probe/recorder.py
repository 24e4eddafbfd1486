"""Time and count every call into a connector, and detect slow and failed calls: the hot path.

All numbers are words of the process's page, where others read them. An error in here is contained: it never reaches the
connector, the caller, or vLLM.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cache, partial
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kvobs import faults
from kvobs.clock import WALL_OFFSET
from kvobs.faults import contained
from kvobs.log import once
from kvobs.page.calls import pack
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.probe import native
from kvobs.probe.pauses import Pauses
from kvobs.probe.pure import Call, Target
from kvobs.schema import signals
from kvobs.schema.signals import CALL_DURATION, Signal, word
from kvobs.vllm_api.hooks import Cadence

SUM = CALL_DURATION.sum_offset


@cache
def buckets(signal: Signal) -> bytes:
    """Return the bucket of a duration by the number of its bits: bounds are powers of two."""
    return bytes([bisect_left(signal.bounds, 2**bits) for bits in range(65)])


_CALLS = {name: signals.slot(CALL_DURATION, signals.hook_label(name)) for name in signals.TIMED}

NEVER = 2**63 - 1  # ns

ERROR_TYPES_AT_MOST = 64  # different (connector, hook, error type); the ones after that are counted as OTHER_VALUE
_NAME_AT_MOST = 64


class CallEvent(NamedTuple):
    """One slow, failed or traced call.

    Times are ns since the epoch. ``subject`` is the call's first argument; ``error`` the exception's class; ``more``
    further span attributes. With ``is_many`` it summarizes several calls.
    """

    connector_index: int
    hook: str
    start_ns: int
    spent_ns: int
    is_slow: bool
    error: str = ""
    subject: Any = None
    more: Mapping[str, int | float] = MappingProxyType({})
    is_many: bool = False


class CallListener(Protocol):
    """Receives slow and failed calls; all of them with ``traces_all``."""

    traces_all: bool

    def note(self, event: CallEvent) -> None:
        """Receive a call that has ended."""


class Recorder:
    """The numbers of one process.

    A call longer than ``slow_ns``, without the process's ``pauses``, is counted as slow; hooks called once or on demand
    are exempt. ``page`` has the numbers, the call in progress and the last ones.
    """

    def __init__(
        self,
        connectors: int,
        slow_ns: int = NEVER,
        names: tuple[str, ...] = (),
        *,
        listener: CallListener | None = None,
        page: PageWriter | None = None,
    ) -> None:
        self.slow_ns = {
            name: NEVER if hook.cadence is Cadence.ONCE else slow_ns for name, hook in signals.TIMED.items()
        }
        """The duration above which a call is slow, by hook."""
        self.pauses = Pauses()  # none, until this process is watched
        self.listener = listener
        self.traces_all = listener is not None and listener.traces_all
        self.connectors = connectors
        self._names = names or tuple(map(str, range(connectors)))
        self.page = page if page is not None else PageWriter(describe(plain(self._names), 0))
        self.words, first = self.page.words, self.page.layout.counts
        self.probe = native.probe(self.words, self.page.layout.ring, buckets(CALL_DURATION), SUM)
        # Positions of the slots from 0 on, by connector; None: of the process.
        self._firsts: dict[int | None, int] = {None: first}
        self._firsts.update((index, first + word(index, 0)) for index in range(connectors))

    def count(self, index: int | None, slot: int, n: int = 1) -> None:
        """Add ``n`` to a slot (see ``signals.slot``) of the connector at this position, or of this process."""
        try:
            self.page.add_at(self._firsts[index] + slot, n)
        except Exception:
            faults.contain("record")

    def count_all(self, index: int, *counts: tuple[int, int]) -> None:
        """Add to several slots of this connector, each with its number, as ``count`` does to one."""
        try:
            first, add_at = self._firsts[index], self.page.add_at
            for slot, n in counts:
                add_at(first + slot, n)
        except Exception:
            faults.contain("record")

    @contained("record")
    def observe(self, index: int, signal: Signal, ns: int, *values: str) -> None:
        """Add a duration to a histogram of this connector."""
        ns, first = max(0, ns), self._firsts[index] + signals.slot(signal, *values)
        self.page.add_at(first + signal.bucket(ns), 1)
        self.page.add_at(first + signal.sum_offset, ns)

    @contained("record")
    def count_dynamic(self, index: int, signal: Signal, *values: str, n: int = 1) -> None:
        """Add to a series whose label values are known at run time only."""
        self.page.rows.add(signal, index, values, n)

    @contained("record")
    def set_gauge(self, index: int | None, slot: int, value: int) -> None:
        """Set a gauge of this connector, or of this process; an age's to its start, 0 for none."""
        self.page.set_gauge(slot if index is None else word(index, slot), value)

    def calls(self, index: int, hook: str) -> int:
        """Return the position of the histogram of this hook's calls into this connector."""
        return self._firsts[index] + _CALLS[hook]

    def histogram(self, index: int, signal: Signal) -> int:
        """Return the position of a histogram of this connector."""
        return self._firsts[index] + signals.slot(signal)

    def target(self, index: int, hook: str, call: Call, notice: Callable[[int, int, Any], int] | None = None) -> Target:
        """Return ``call`` with what counts it; ``notice`` replaces the usual one."""
        marks, histogram = self.page.marks(index, hook), self._firsts[index] + _CALLS[hook]
        noticed_ns = -1 if self.traces_all else self.slow_ns[hook]
        notice = notice if notice is not None else partial(self.notice, index, hook)
        return Target(call, marks, histogram, noticed_ns, notice, partial(self.failed, index, hook))

    def timed(self, index: int, hook: str, call: Call) -> Call:
        """Return ``call`` with every call timed and its errors counted; answers and errors pass untouched."""
        return self.probe.timed(*self.target(index, hook, call))

    def notice(self, index: int, hook: str, start: int, spent: int, subject: Any = None) -> int:
        """Count a call if it is slow, pass it to the listener, and return its time as ``count_slow`` does."""
        try:
            ran, is_slow = self.count_slow(index, hook, start, spent)
            if self.listener is not None:
                self.listener.note(CallEvent(index, hook, start + WALL_OFFSET, spent, is_slow, subject=subject))
        except Exception:
            faults.contain("record")
            return spent
        return ran

    def count_slow(self, index: int, hook: str, start: int, spent: int) -> tuple[int, bool]:
        """Count a call if it is slow; return its time, and whether it is.

        Pauses of the process are left out of the time of a call that would be slow with them.
        """
        slow_ns = self.slow_ns[hook]
        ran = self.pauses.ran_ns(start, spent) if spent > slow_ns else spent
        if is_slow := ran > slow_ns:
            self._slow(index, hook, start, ran)
        return ran, is_slow

    def add_call(self, index: int, hook: str, start: int, spent: int) -> None:
        """Count a call."""
        ran, _ = self.count_slow(index, hook, start, spent)
        self.observe(index, CALL_DURATION, ran, signals.hook_label(hook))

    def _slow(self, index: int, hook: str, start: int, spent: int) -> None:
        """Count a slow call; log the first of this hook that is not explained by waiting for a core."""
        self.count(index, signals.slot(signals.SLOW_CALLS, signals.hook_label(hook)))
        level, key, more = logging.WARNING, "slow", ". Further slow calls are only counted (kvobs_slow_calls_total)"
        if spent - self.pauses.waited_ns(start, spent) <= self.slow_ns[hook]:
            level, key, more = logging.INFO, "starved", ", possibly because the host was short of CPU"
        text = f"connector %r: %s took %.0f ms, more than slow_call_ms (%g){more}"
        once(f"{key}:{index}:{hook}", level, text, self._names[index], hook, spent / 1e6, self.slow_ns[hook] / 1e6)

    @contained("record")
    def failed(  # noqa: PLR0917 - the probe passes them by position
        self, index: int, hook: str, start: int, spent: int, error: BaseException, subject: Any = None
    ) -> None:
        """Count a call that ended with an exception."""
        self.page.raised(index, hook, error)
        self.probe.note(start, spent, pack(self.page.marks(index, hook), has_raised=True))
        self.add_call(index, hook, start, spent)
        self.count_error(index, hook, start, spent, error, subject)

    @contained("record")
    def count_error(self, index: int, hook: str, start: int, spent: int, error: BaseException, *subject: Any) -> None:
        """Count the exception only, and pass it to the listener."""
        kind, label = type(error).__qualname__[:_NAME_AT_MOST], signals.hook_label(hook)
        rows, values = self.page.rows, (label, kind)
        if (signals.CALL_ERRORS, index, values) not in rows and rows.known(signals.CALL_ERRORS) >= ERROR_TYPES_AT_MOST:
            kind = signals.OTHER_VALUE
        self.count_dynamic(index, signals.CALL_ERRORS, label, kind)
        if self.listener is not None:
            self.listener.note(CallEvent(index, hook, start + WALL_OFFSET, spent, False, kind, *subject))


@cache
def cost_of_recording(calls: int = 200, rounds: int = 5) -> float:
    """Measure once the overhead of timing a call, in ns."""

    def nothing() -> None:
        """Do nothing: a stand-in for a connector's hook."""

    recorded = Recorder(1).timed(0, "wait_for_save", nothing)

    def shortest(call: Call) -> int:
        times = []
        for _ in range(rounds):
            begin = perf_counter_ns()
            for _ in range(calls):
                call()
            times.append(perf_counter_ns() - begin)
        return min(times)

    return max(0, shortest(recorded) - shortest(nothing)) / calls
