"""Know when this process did not run, so that its connectors are not blamed for that time.

Collections of Python's garbage collector are noted as they happen, by C functions only. The handler of a signal that
comes during a collection runs in the first Python code after it: if that were a callback of the collector, which
swallows exceptions, the SystemExit of vLLM's SIGTERM would be lost.

A thread that wakes once a second notes when the kernel woke it late: the process was stopped, or got no core. It also
notes how long the main thread, from which vLLM calls connectors, has waited for a core. A call is compared with this
only if it took too long.
"""

import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock, get_native_id, main_thread
from time import CLOCK_MONOTONIC, perf_counter_ns, sleep

from kvobs.faults import contained
from kvobs.vllm_api.proc import run_delay_ns

AT_MOST = 64  # pauses that are kept
UNREAD_AT_MOST = 1 << 14  # collections within a second
SHORT_NS = 10**6  # shorter collections are only counted
LOOK_NS, LATE_NS = 10**9, 10**9 // 2
NOTED_WITHIN = 10  # hundredths of a second, in which the thread gets a core again
# A timer's seconds and ns: once after LOOK_NS, and then after every LATE_NS in which the thread has not woken.
_TIMES = (ctypes.c_long * 4)(0, LATE_NS, 1, 0)


def _noting(ended: deque[tuple[int, int]]) -> Callable[[str, object], None]:
    """Return a callback of Python's collector that notes start and end of collections, and runs no Python code.

    It reads an attribute of the phase's name, a property that takes the next item of an iterator: that reads the clock.
    """
    began = deque([0], maxlen=1)  # 0: before the callback was there
    begins = map(began.append, iter(perf_counter_ns, None))
    last, now = iter(partial(began.__getitem__, 0), None), iter(perf_counter_ns, None)
    ends = map(ended.append, zip(last, now, strict=False))
    phases = {"start": property(partial(next, begins)), "stop": property(partial(next, ends))}
    return partial(getattr, type("Phases", (), phases)())


class Pauses:
    """The pauses of one process; times are by ``perf_counter_ns``.

    ``collects`` notes a collection: a callback of Python's collector.
    """

    def __init__(self) -> None:
        self._last: deque[tuple[int, int]] = deque(maxlen=AT_MOST)  # start and end
        self._unread: deque[tuple[int, int]] = deque(maxlen=UNREAD_AT_MOST)  # collections
        self.collects = _noting(self._unread)
        self._collected_ns = self._looked_ns = 0
        self._lock = RLock()  # a signal's handler may call into a connector while its thread holds this
        self._delays: deque[tuple[int, int]] = deque(maxlen=AT_MOST)  # when it was looked, and the delay until then

    def ran_ns(self, begin_ns: int, spent_ns: int) -> int:
        """Return the part of a call's time in which this process ran, as far as it is known."""
        end_ns = begin_ns + spent_ns
        looked_ns, waits = self._looked_ns, NOTED_WITHIN
        while 0 < looked_ns < end_ns - LOOK_NS - LATE_NS and self._looked_ns == looked_ns and waits:
            sleep(0.01)  # it may have been stopped until just now: the thread has to note that first
            waits -= 1
        with self._lock:
            self._read()
            last = sorted(self._last)
        for begin, end in last:  # some overlap: two engines' threads note the same stop
            spent_ns -= max(0, min(end_ns, end) - max(begin_ns, begin))
            begin_ns = max(begin_ns, end)
        return spent_ns

    def waited_ns(self, begin_ns: int, spent_ns: int) -> int:
        """Return how much of a call's time this thread may have waited for a core: at most so much.

        The thread's delays are known once a second: some may be of the time before the call.
        """
        before = next((delay for at, delay in reversed(tuple(self._delays)) if at <= begin_ns), None)
        if before is None or get_native_id() != main_thread().native_id:
            return 0
        return min(spent_ns, run_delay_ns(get_native_id()) - before)

    @contained("record")
    def watch(self, look: Callable[[], bool]) -> None:
        """Note the pauses of this process, and call ``look`` once a second, until it returns False."""
        libc = ctypes.PyDLL(None)  # one that keeps the GIL
        timer = libc.timerfd_create(CLOCK_MONOTONIC, os.O_CLOEXEC)
        try:
            while look():
                if self.collects not in gc.callbacks:  # at first, or after another engine of this process
                    gc.callbacks.append(self.collects)
                self._delays.append((perf_counter_ns(), run_delay_ns(main_thread().native_id or 0)))
                looked_ns = perf_counter_ns()
                libc.timerfd_settime(timer, 0, _TIMES, None)
                # From here until it waits in the kernel this thread gives the GIL to no other one: a stop after this
                # line is seen, and a wait for the GIL is not taken for one.
                self._looked_ns = looked_ns
                if int.from_bytes(os.read(timer, 8), sys.byteorder) > 1:
                    self.note(looked_ns, perf_counter_ns())
                self._read()
        finally:  # also without a timer, where no file descriptor was left: else each slow call would wait for this
            self._looked_ns = 0
            if self.collects in gc.callbacks:
                gc.callbacks.remove(self.collects)
            if timer >= 0:
                os.close(timer)

    def note(self, begin_ns: int, end_ns: int) -> None:
        """Note a pause."""
        self._last.append((begin_ns, end_ns))

    def take_collected_ns(self) -> int:
        """Return the time of the collections since the last call."""
        with self._lock:
            self._read()
            collected, self._collected_ns = self._collected_ns, 0
        return collected

    def _read(self) -> None:
        """Add up the collections that have ended, and note the long ones."""
        with self._lock:
            while self._unread:
                begin_ns, end_ns = self._unread.popleft()
                self._collected_ns += end_ns - begin_ns if begin_ns else 0
                if begin_ns and end_ns - begin_ns >= SHORT_NS:
                    self.note(begin_ns, end_ns)


OF_PROCESS = Pauses()
