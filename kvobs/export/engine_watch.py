"""Watch an engine's processes from outside: the calls that they are in, and which call the engine died in.

It reads their pages (see ``black_box``), which are on the same machine, and keeps them after the processes are gone.
The end is left in a file beside the pages, for the engine's next life.
"""

from __future__ import annotations

import json
import logging
import os
import select
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import Event, Thread
from typing import NamedTuple

from kvobs import faults
from kvobs.log import line, log, once
from kvobs.probe import ring_files
from kvobs.probe.black_box import STEPS, Call, Page, folder, pages, place_of
from kvobs.telemetry.payload.wire import EngineInfo
from kvobs.vllm_api.hooks import HOOKS
from kvobs.vllm_api.proc import exit_status, is_ending, is_stopped, name_of

SHOWN_NS = 10**9
"""Shorter calls are not shown: they come and go between scrapes."""
HANGS_NS = UNWATCHED_NS = 10 * 10**9
"""After this time in one call it is logged; after this time without a look, ages of calls begin again."""
LOOK_S, PAUSE_S = 1.0, 0.01
IDLE_NS = 5 * 10**9
"""vLLM hands the ranks of a host without EngineCore no step for 9 s before it kills them, to stop them."""
AT_ONCE_S = 0.05
"""When stopped, vLLM kills an engine's processes within 1 ms; after one ended by itself, 186 ms later or more."""
NOT_SEEN, STOPPED, UNKNOWN = "not seen", "stopped", "unknown"
PREVIOUS_S = 15 * 60.0
"""How long the end of the previous life is shown, and how old it is at most at the start."""
_BYTES = 1 << 12  # of the file with an end


class End(NamedTuple):
    """The end of an engine: the call it died in, if any, and an exception's class, a signal, or an exit code."""

    connector: str
    hook: str
    rank: int | None
    reason: str


class EngineWatch:
    """Watches an engine's processes on this machine, from a thread; with ``logs_end`` it logs their end in a call."""

    def __init__(self, engine: EngineInfo, *, logs_end: bool = False) -> None:
        self._engine = engine.pages
        self._expected = (*([None] if engine.has_core else []), *engine.ranks)
        self._parent = engine.parent
        self._logs_end = logs_end
        self._looked_ns = time.perf_counter_ns()
        self._stopped: dict[int | None, int] = {}  # rank -> when it was first seen to be stopped
        place = blake2b(f"{engine.model}/{engine.index}/{engine.port}/{engine.launch}".encode(), digest_size=16)
        self._file = f"{place.hexdigest()}.end"
        self.previous = self._read_previous()
        """The unexpected end of the engine's previous life, for the first minutes of this one."""
        self._previous_until = time.monotonic() + PREVIOUS_S
        self._pages: dict[str, Page] = {}
        self._first: End | None = None
        self._has_noted = Event()
        self._end: End | None = None
        Thread(target=_run, args=(weakref.ref(self),), name="kvobs-watch", daemon=True).start()

    @property
    def end(self) -> End | None:
        """The engine's unexpected end; from the exception on that ends it, though vLLM may wait for minutes then."""
        return self._raised() or self._end

    @property
    def halted_ns(self) -> int:
        """When a process was last seen to be stopped, or this watch did not run; 0: never."""
        return max((page.halted_ns for page in tuple(self._pages.values())), default=0)

    def calls(self) -> list[Call]:
        """Return the calls that have been in progress for long, the oldest first.

        They are in progress since their process was last stopped, or this watch itself did not run.
        """
        self._find()
        now = time.perf_counter_ns()
        was_unwatched, self._looked_ns = now - self._looked_ns > UNWATCHED_NS, now
        running = [page for page in tuple(self._pages.values()) if page.is_alive]
        self._stopped = {page.rank: self._stopped.get(page.rank, now) for page in running if is_stopped(page.pid)}
        for page in running:
            if was_unwatched or page.rank in self._stopped:
                page.halted_ns = now
        calls = [c._replace(since_ns=max(c.since_ns, page.halted_ns)) for page in running for c in page.calls()]
        return sorted((call for call in calls if call.since_ns < now - SHOWN_NS), key=lambda call: call.since_ns)

    def states(self) -> dict[str, str]:
        """Return what each process is in, by its name."""
        calls = {call.rank: f"{call.hook} of {call.connector}" for call in reversed(self.calls())}
        steps = {page.rank: f"{page.words[STEPS]} steps" for page in tuple(self._pages.values())}
        states = {**dict.fromkeys(self._expected, NOT_SEEN), **steps, **calls}
        states |= dict.fromkeys(self._stopped, STOPPED)
        return {place_of(rank): state for rank, state in states.items()}

    def ended(self, wait_s: float = 2.0) -> End | None:
        """Log and return what the engine died of, now that it is gone; None: as far as is known, vLLM stopped it."""
        self._find()
        if self._raised() is None:
            self._has_noted.wait(wait_s)
        if (end := self._raised() or self._first) is not None:
            self._log_end(end)
        return end

    def _log_end(self, end: End) -> None:
        """Show and log an end, and leave it for the next life."""
        self._end = end
        log.error("the engine has ended%s", _described(end))
        with ring_files.reported("an engine's end is not kept for its next life: %s"):
            ring_files.write(folder(), self._file, json.dumps(end).encode())

    def _read_previous(self) -> End | None:
        """Return and log the end that the previous life has left, if it is new."""
        with ring_files.reported("the last end of the engine can't be read: %s"), suppress(FileNotFoundError):
            text, at_s = ring_files.take(folder(), self._file, _BYTES)
            match json.loads(text):
                case [str(connector), str(hook), None | int() as rank, str(reason)] if hook in ("", *HOOKS):
                    end, age_s = End(line(connector), hook, rank, line(reason)), time.time() - at_s
                    if 0 <= age_s < PREVIOUS_S:
                        log.warning("the previous engine ended%s, %.0f s ago", _described(end), age_s)
                        return end
                case _:
                    raise ValueError(f"found {text!r}")
        return None

    @faults.contained("apply")
    def look(self) -> None:
        """Look at the processes, once they have ended or after a second."""
        self._log_hanging()
        self._await(LOOK_S)
        if time.monotonic() > self._previous_until:
            self.previous = None

    def _find(self) -> None:
        """Find the pages of processes that have begun since."""
        for name, page in pages(self._engine, self._pages):
            self._pages.setdefault(name, page)  # another thread may have found it

    def _log_hanging(self) -> None:
        calls, now = self.calls(), time.perf_counter_ns()
        for rank, since_ns in self._stopped.items():
            if now - since_ns > HANGS_NS:
                message = "%s is stopped (SIGSTOP, or a debugger); the engine waits for it"
                once(f"stopped:{rank}", logging.ERROR, message, place_of(rank))
        for call in calls:
            if now - call.since_ns > HANGS_NS:
                age_s = (now - call.since_ns) / 1e9
                message = "connector %r has been in %s on %s for %.0f s; the engine waits for it"
                once(f"hangs:{call}", logging.ERROR, message, *call[:2], place_of(call.rank), age_s)

    def _await(self, seconds: float) -> None:
        """Wait for the end of a process; note the first that did not end as it should."""
        known, opened, poll = tuple(self._pages.values()), list[int](), select.poll()
        for page in known:
            with suppress(OSError):  # it has ended just now
                if page.is_alive:
                    opened.append(os.pidfd_open(page.pid))
                    poll.register(opened[-1], select.POLLIN)
        poll.poll(seconds * 1000)
        for process in opened:
            os.close(process)
        badly = [page for page in known if not page.is_alive and not page.has_ended_well]
        if badly and not self._has_noted.is_set():
            self._note(badly)
            self._has_noted.set()

    def _note(self, ended: Sequence[Page]) -> None:
        """Note the end of processes that ended at the same time, unless vLLM stopped the engine."""
        status, now = exit_status(ended[0].pid), time.perf_counter_ns()
        reason = UNKNOWN if status is None else name_of(status)
        calls = [call for page in ended for call in page.calls()]
        # By default vLLM kills an engine's processes, all at once, when its server gets SIGTERM.
        if reason in ("SIGKILL", UNKNOWN) and self._are_stopped(ended, now):
            calls = [call for page in tuple(self._pages.values()) for call in page.calls()]
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
        if self._parent and any(page.worked_ns > now_ns - IDLE_NS for page in ended):
            return is_ending(self._parent)
        return not any(page.is_alive and not is_ending(page.pid) for page in tuple(self._pages.values()))

    def _raised(self) -> End | None:
        """Return the exception that ends the engine, the first of those of several ranks."""
        raised = [call for page in tuple(self._pages.values()) if (call := page.raised())]
        first = min(raised, key=lambda call: call.since_ns, default=None)
        return None if first is None else End(*first[:3], first.error)


def _run(watch: weakref.ref[EngineWatch]) -> None:
    while (watched := watch()) is not None:
        watched.look()
        del watched
        time.sleep(PAUSE_S)


def _described(end: End) -> str:
    where = place_of(end.rank)
    if end.connector:
        return f" in {end.hook} of connector {end.connector!r} on {where}: {end.reason}"
    return f", in no connector's call ({where}: {end.reason})"
