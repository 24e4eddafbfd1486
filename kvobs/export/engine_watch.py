"""Watch an engine's processes from outside: the calls that they are in, and the call in which the engine ended.

It reads their pages, and keeps them after the processes are gone.
"""

from __future__ import annotations

import logging
import os
import select
import time
import weakref
from collections.abc import Sequence
from threading import Event, Thread

from kvobs import faults
from kvobs.export.engine import Engine
from kvobs.log import log, once
from kvobs.page.description import End, process_name
from kvobs.page.layout import STEPS
from kvobs.page.previous import SHOWN_S, UNKNOWN, described
from kvobs.page.reader import Call, Page
from kvobs.vllm_api.proc import is_ending, name_of

SHOWN_NS = 10**9
"""Shorter calls are not shown: they come and go between scrapes."""
HANGS_NS = UNWATCHED_NS = 10 * 10**9
"""After this time in one call it is logged; after this time without a look, ages of calls begin again."""
LOOK_S, PAUSE_S = 1.0, 0.01
IDLE_NS = 5 * 10**9
"""vLLM hands the ranks of a host without EngineCore no step for 9 s before it kills them, to stop them."""
AT_ONCE_S = 0.05
"""When stopped, vLLM kills an engine's processes within 1 ms; after one ended unasked, 186 ms later or more."""
NOT_SEEN, STOPPED = "not seen", "stopped"


class EngineWatch:
    """Watches an engine's processes on this machine, from a thread; with ``logs_end`` it logs their end in a call."""

    def __init__(self, engine: Engine, *, logs_end: bool = False) -> None:
        self._engine = engine
        self._logs_end = logs_end
        self._looked_ns = time.perf_counter_ns()
        self._stopped: dict[int | None, int] = {}  # rank -> when it was first seen to be stopped
        self._first: End | None = None
        self._has_noted = Event()
        self._end: End | None = None
        Thread(target=_run, args=(weakref.ref(self),), name="kvobs-watch", daemon=True).start()

    @property
    def previous(self) -> End | None:
        """Return the unexpected end of the engine's previous life, for the first minutes of this one."""
        head = self._engine.head
        if head is None or head.previous is None:
            return None
        ago_s = head.previous_ago_s + time.time() - head.began_ns / 1e9
        return head.previous if ago_s < SHOWN_S else None

    @property
    def end(self) -> End | None:
        """The engine's unexpected end; from the exception on that ends it, though vLLM may wait for minutes then."""
        return self._raised() or self._end

    @property
    def halted_ns(self) -> int:
        """When a process was last seen to be stopped, or this watch did not run; 0: never."""
        return max((page.halted_ns for page in self._engine.all()), default=0)

    def calls(self) -> list[Call]:
        """Return the calls that have been in progress for long, the oldest first.

        They are in progress since their process was last stopped, or this watch itself did not run.
        """
        self._engine.find()
        now = time.perf_counter_ns()
        was_unwatched, self._looked_ns = now - self._looked_ns > UNWATCHED_NS, now
        running = [page for page in self._engine.all() if page.is_alive]
        self._stopped = {page.rank: self._stopped.get(page.rank, now) for page in running if page.is_stopped}
        for page in running:
            if was_unwatched or page.rank in self._stopped:
                page.halted_ns = now
        calls = [c._replace(since_ns=max(c.since_ns, page.halted_ns)) for page in running for c in page.calls()]
        return sorted((call for call in calls if call.since_ns < now - SHOWN_NS), key=lambda call: call.since_ns)

    def states(self) -> dict[str, str]:
        """Return what each process is in, by its name."""
        calls = {call.rank: f"{call.hook} of {call.connector}" for call in reversed(self.calls())}
        steps = {page.rank: f"{page.words[STEPS]} steps" for page in self._engine.all()}
        info = self._engine.info
        expected = (None, *range(info.ranks)) if info is not None and self._engine.has_core else ()
        states = {**dict.fromkeys(expected, NOT_SEEN), **steps, **calls}
        states |= dict.fromkeys(self._stopped, STOPPED)
        return {process_name(rank): state for rank, state in states.items()}

    def ended(self, wait_s: float = 2.0) -> End | None:
        """Log and return why the engine ended, now that it is gone; None: as far as is known, vLLM stopped it."""
        self._engine.find()
        if self._raised() is None:
            self._has_noted.wait(wait_s)
        if (end := self._raised() or self._first) is not None:
            self._log_end(end)
        return end

    def _log_end(self, end: End) -> None:
        """Show and log an end."""
        self._end = end
        log.error("the engine has ended%s", described(end))

    @faults.contained("read")
    def look(self) -> None:
        """Look at the processes, once they have ended or after a second."""
        self._log_hanging()
        self._await(LOOK_S)

    def _log_hanging(self) -> None:
        calls, now = self.calls(), time.perf_counter_ns()
        for rank, since_ns in self._stopped.items():
            if now - since_ns > HANGS_NS:
                message = "%s is stopped (SIGSTOP, or a debugger); the engine waits for it"
                once(f"stopped:{rank}", logging.ERROR, message, process_name(rank))
        for call in calls:
            if now - call.since_ns > HANGS_NS:
                age_s = (now - call.since_ns) / 1e9
                message = "connector %r has been in %s on %s for %.0f s; the engine waits for it"
                once(f"hangs:{call}", logging.ERROR, message, *call[:2], process_name(call.rank), age_s)

    def _await(self, seconds: float) -> None:
        """Wait for the end of a process; note the first that did not end as it should."""
        known, opened, poll = self._engine.all(), list[int](), select.poll()
        for page in known:
            if (process := page.watched()) is not None:
                opened.append(process)
                poll.register(process, select.POLLIN)
        poll.poll(seconds * 1000)
        for process in opened:
            os.close(process)
        badly = [page for page in known if not page.is_alive and not page.has_ended_well]
        if badly and not self._has_noted.is_set():
            self._note(badly)
            self._has_noted.set()

    def _note(self, ended: Sequence[Page]) -> None:
        """Note the end of processes that ended at the same time, unless vLLM stopped the engine."""
        status, now = ended[0].exit_status, time.perf_counter_ns()
        reason = UNKNOWN if status is None else name_of(status)
        calls = [call for page in ended for call in page.calls()]
        # By default vLLM kills an engine's processes, all at once, when its server gets SIGTERM.
        if reason in ("SIGKILL", UNKNOWN) and self._are_stopped(ended, now):
            calls = [call for page in self._engine.all() for call in page.calls()]
            calls = [call for call in calls if now - call.since_ns > SHOWN_NS]
            if not calls:
                return
        # Of several the innocent ones are not known.
        is_known = len({call.connector for call in calls}) == 1
        self._first = End(*calls[0][:3], reason) if is_known else End("", "", ended[0].rank, reason)
        end = self._raised() or self._first
        if self._logs_end and end.connector:
            self._log_end(end)

    def _are_stopped(self, ended: Sequence[Page], now_ns: int) -> bool:
        """Return whether vLLM stopped them: all end at once, and without EngineCore none that worked lately did."""
        time.sleep(AT_ONCE_S)
        if not self._engine.has_core and any(page.worked_ns > now_ns - IDLE_NS for page in ended):
            return is_ending(ended[0].process.parent)
        return not any(page.is_alive and not page.is_ending for page in self._engine.all())

    def _raised(self) -> End | None:
        """Return the exception that crashed the engine, the first one if several ranks raised."""
        raised = [call for page in self._engine.all() if (call := page.raised())]
        first = min(raised, key=lambda call: call.since_ns, default=None)
        return None if first is None else End(*first[:3], first.error)


def _run(watch: weakref.ref[EngineWatch]) -> None:
    while (watched := watch()) is not None:
        watched.look()
        del watched
        time.sleep(PAUSE_S)
