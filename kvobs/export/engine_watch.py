"""Watch an engine's processes from outside: the calls that they are in, and which call the engine died in.

It reads their pages (see ``black_box``), which are on the same machine, and keeps them after the processes are gone.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import NamedTuple

from kvobs import faults
from kvobs.log import log, once
from kvobs.telemetry.timeline.black_box import UNKNOWN, Call, Page, pages, place_of
from kvobs.vllm_api.proc import exit_status

SHOWN_NS = 10**9
"""Shorter calls are not shown: they come and go between scrapes."""
HANGS_NS = 10 * 10**9
"""After this time in one call it is logged."""
LOOK_S, PAUSE_S = 1.0, 0.01
NOT_SEEN = "not seen"


class End(NamedTuple):
    """The end of an engine: the call it died in, if any, and an exception's class, a signal, or an exit code."""

    connector: str
    hook: str
    rank: int | None
    reason: str


class EngineWatch:
    """Watches the processes of one engine on this machine, from a thread.

    Args:
        engine: the begin of the names of its pages.
        ranks: number of its workers on all machines.
        logs_end: whether it logs an end in a connector's call as soon as it is seen.
    """

    def __init__(self, engine: str, ranks: int = 0, *, logs_end: bool = False) -> None:
        self._engine = engine
        self._ranks = ranks
        self._logs_end = logs_end
        self._pages: dict[str, Page] = {}
        self._opened: dict[str, int | None] = {}  # file descriptors of their processes, as long as they run
        self._first: End | None = None
        self._has_first = Event()
        self._end: End | None = None
        Thread(target=_run, args=(weakref.ref(self),), name="kvobs-watch", daemon=True).start()

    @property
    def end(self) -> End | None:
        """The engine's unexpected end; from the exception on that ends it, though vLLM may wait for minutes then."""
        return self._raised() or self._end

    def calls(self) -> list[Call]:
        """Return the calls that have been in progress for long, the oldest first."""
        self._find()
        before = time.perf_counter_ns() - SHOWN_NS
        calls = [call for page in tuple(self._pages.values()) if page.is_alive for call in page.calls()]
        return sorted((call for call in calls if call.since_ns < before), key=lambda call: call.since_ns)

    def states(self) -> dict[str, str]:
        """Return what each process is in, by its name."""
        calls = {call.rank: f"{call.hook} of {call.connector}" for call in reversed(self.calls())}
        steps = {page.rank: f"{page.steps} steps" for page in tuple(self._pages.values())}
        ranks = (None, *range(self._ranks))
        return {place_of(rank): calls.get(rank, steps.get(rank, NOT_SEEN)) for rank in ranks}

    def ended(self, wait_s: float = 2.0) -> End:
        """Return and log what the engine died of, now that it is gone without having said goodbye."""
        self._find()
        if self._raised() is None:
            self._has_first.wait(wait_s)
        self._end = self._raised() or self._first or End("", "", None, UNKNOWN)
        log.error("%s", _described(self._end))
        return self._end

    # The thread

    @faults.contained("apply")
    def look(self) -> None:
        """Look at the processes, once they have ended or after a second."""
        self._log_hanging()
        self._await(LOOK_S)

    def _find(self) -> None:
        """Find the pages of processes that have begun since."""
        for name, page in pages(self._engine, self._pages):
            self._pages.setdefault(name, page)  # another thread may have found it

    def _log_hanging(self) -> None:
        now = time.perf_counter_ns()
        for call in self.calls():
            if now - call.since_ns > HANGS_NS:
                once(
                    f"hangs:{call}",
                    logging.ERROR,
                    "connector %r has been in %s on %s for %.0f s; the engine waits for it",
                    call.connector,
                    call.hook,
                    place_of(call.rank),
                    (now - call.since_ns) / 1e9,
                )

    def _await(self, seconds: float) -> None:
        """Wait for the end of a process; note the first that did not end as it should."""
        poll = select.poll()
        for name, page in tuple(self._pages.items()):
            if name not in self._opened:
                self._opened[name] = _process(page)
            if (opened := self._opened[name]) is not None:
                poll.register(opened, select.POLLIN)
        poll.poll(seconds * 1000)
        ended = {name: page for name, page in tuple(self._pages.items()) if not page.is_alive}
        for name in ended:
            if (opened := self._opened.get(name)) is not None:
                os.close(opened)
                self._opened[name] = None
        if self._first is None and (badly := [page for page in ended.values() if not page.has_ended_well]):
            self._note(badly)

    def _note(self, ended: Sequence[Page]) -> None:
        """Note the end of processes that ended at the same time."""
        reason = _reason(exit_status(ended[0].pid))
        calls = [call for page in ended for call in page.calls()]
        # Of several the innocent ones are not known.
        is_known = len({call.connector for call in calls}) == 1
        self._first = End(*calls[0][:3], reason) if is_known else End("", "", ended[0].rank, reason)
        self._has_first.set()
        end = self._raised() or self._first
        if self._logs_end and end.connector:
            self._end = end
            log.error("%s", _described(end))

    def _raised(self) -> End | None:
        """Return the exception that ends the engine, the first of those of several ranks."""
        raised = [one for page in tuple(self._pages.values()) if (one := page.raised())]
        first = min(raised, key=lambda one: one.at_ns, default=None)
        return None if first is None else End(*first[:4])


def _run(watch: weakref.ref[EngineWatch]) -> None:
    while (watched := watch()) is not None:
        watched.look()
        del watched
        time.sleep(PAUSE_S)


def _process(page: Page) -> int | None:
    """Return a file descriptor by which the end of a process can be waited for; None if it has none."""
    with suppress(OSError):
        return os.pidfd_open(page.pid)
    return None


def _reason(status: int | None) -> str:
    """Return the name of a signal, or the exit code, from the status of an ended process."""
    if status is None:
        return UNKNOWN
    with suppress(ValueError):
        if number := status & 0x7F:
            return signal.Signals(number).name
    return f"exit {status >> 8}"


def _described(end: End) -> str:
    where = place_of(end.rank)
    if end.connector:
        return f"the engine has ended in {end.hook} of connector {end.connector!r} on {where}: {end.reason}"
    return f"the engine has ended, in no connector's call ({where}: {end.reason})"
