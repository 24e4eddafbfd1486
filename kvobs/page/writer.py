"""Write the page of one process: marks of calls, numbers, spans, and the exception that crashes the engine."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import Thread
from time import perf_counter_ns, time_ns
from types import FrameType
from typing import Any

from kvobs import faults
from kvobs.log import once
from kvobs.page import files, layout, previous
from kvobs.page.description import ConnectorInfo, EngineInfo, Identity, ProcessInfo, process_name
from kvobs.page.layout import HEAD, MAGIC, SPAN_BYTES, VERSION, WORD, Layout
from kvobs.page.reader import SURVIVED
from kvobs.page.rows import Rows
from kvobs.page.span_ring import SpanRing
from kvobs.schema import signals
from kvobs.vllm_api.proc import pid_namespace, start_time

STOPS = (SystemExit, KeyboardInterrupt)
"""What handlers of signals raise, and ``sys.exit``: the process was asked to end. Others may be no ``Exception``."""
_FAULTS = signals.slots(signals.INTERNAL_ERRORS)


class PageWriter:
    """Writes the page of one process, of a worker or the scheduler's, described by ``process``.

    The exceptions of the connectors at the positions ``contained`` are contained. ``memory`` is of zeros; None: memory
    that no other process sees. ``remove`` removes the page.

    ``words`` are the page's. Adding to a word changes no threads, so that no lock is needed.
    """

    def __init__(
        self,
        process: ProcessInfo,
        contained: Collection[int] = (),
        memory: mmap.mmap | None = None,
        remove: Callable[[], None] | None = None,
    ) -> None:
        description = process.to_json()
        self.process, self._contained = process, contained
        self.layout = at = Layout(len(process.engine.connectors), process.calls)
        memory = memory if memory is not None else mmap.mmap(-1, size_of(process))
        self.words = memoryview(memory)[layout.first(description) :].cast("q")[: at.words]
        self.marks, self.fan_outs = at.marks, at.fan_outs
        self.rows = Rows(self.words, at)
        self.spans = [SpanRing(self.words, at.spans(i), size) for i, size in enumerate(SPAN_BYTES)]
        """The rings of ordinary spans, and of slow and failed ones."""
        self.grown: list[tuple[int, Callable[[], int]]] = []
        """Slots, each with what returns how much more there is to add: it is asked once a second, and at the end."""
        self.leave = partial(_leave, self.words, remove)
        """Removes the page; it outlives this."""
        memory[HEAD.size : HEAD.size + len(description)] = description
        memory[len(MAGIC) : HEAD.size] = HEAD.pack(MAGIC, VERSION, len(description))[len(MAGIC) :]
        memory[: len(MAGIC)] = MAGIC  # last, in one store: who finds it finds the rest

    @property
    def rank(self) -> int | None:
        return self.process.rank

    def add(self, slot: int, n: int) -> None:
        """Add to a slot (see ``signals.word``)."""
        self.add_at(self.layout.counts + slot, n)

    def add_at(self, at: int, n: int) -> None:
        """Add to the word at this position."""
        try:
            self.words[at] += n
        except ValueError:  # a sum of ns wraps around: readers take it as a number without a sign
            self.words[at] = (self.words[at] + n + 2**63) % 2**64 - 2**63

    def set_gauge(self, slot: int, value: int) -> None:
        """Set a gauge; for an age, set the time of its start. A word of 0 is a gauge that was never set."""
        self.words[self.layout.counts + slot] = value + 1

    def raised(self, index: int, hook: str, error: BaseException) -> None:
        """Note the exception of a call if it crashes the engine, and log that before vLLM gets it."""
        if isinstance(error, STOPS) or index in self._contained or hook in SURVIVED or _was_unwinding(error):
            return
        name, words = type(error).__qualname__, self.words
        bytes_, at = words.cast("B"), layout.RAISED_CLASS * WORD
        bytes_[at : at + layout.NAME] = name.encode(errors="replace")[: layout.NAME].ljust(layout.NAME, b"\0")
        words[layout.RAISED_IN] = self.marks(index, hook)
        words[layout.RAISED_STEPS] = words[layout.STEPS] + bool(words[layout.SINCE])
        words[layout.RAISED] = perf_counter_ns()
        text = "connector %r raised %s in %s on %s; this crashes the engine"
        connector = self.process.engine.connectors[index].name
        once(f"ends:{index}:{hook}", logging.ERROR, text, connector, name, hook, process_name(self.rank))

    @faults.contained("record")
    def catch_up(self) -> None:
        """Add what has grown, and the contained errors of this process."""
        for slot, more in self.grown:
            self.add(slot, more())
        for where, n in faults.take().items():
            self.add(_FAULTS[where], n)

    @faults.contained("record")
    def close(self) -> None:
        """Note that the process ends as it should, and remove the page; of a fork of it nothing is noted."""
        if os.getpid() != self.process.pid:
            return
        self.catch_up()
        self.words[layout.ENDED] = 1
        self.leave()


def size_of(process: ProcessInfo) -> int:
    """Return the size of the page of a process, in bytes."""
    return layout.first(process.to_json()) + WORD * Layout(len(process.engine.connectors), process.calls).words


def _was_unwinding(error: BaseException) -> bool:
    """Return whether a call was made while another exception was propagating: vLLM still ends its step then."""
    frame: FrameType | None = sys._getframe()
    callers = set()
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    seen, cause = {id(error)}, error.__context__
    while cause is not None and id(cause) not in seen:  # a connector's own exceptions may go round in a circle
        # Those that the connector has handled were not handled by a caller of the call.
        if cause.__traceback__ is not None and cause.__traceback__.tb_frame in callers:
            return True
        seen.add(id(cause))
        cause = cause.__context__
    return False


def _leave(words: memoryview, remove: Callable[[], None] | None) -> None:
    """Remove the page, unless it names what ended the engine: then a later start removes it."""
    if remove is not None and not words[layout.RAISED]:
        remove()


def describe(engine: EngineInfo, rank: int | None, *, is_native: bool = False, cost_ns: float = 0.0) -> ProcessInfo:
    """Describe this process: a worker of this rank, or the scheduler's (None)."""
    pid = os.getpid()
    return ProcessInfo(
        engine,
        pid,
        start_time(pid),
        pid_namespace(),
        time_ns(),
        layout.CALLS,
        rank=rank,
        parent=os.getppid(),
        is_native=is_native,
        cost_ns=cost_ns,
    )


def plain(names: Sequence[str]) -> EngineInfo:
    """Return an engine with only the names of its connectors."""
    return EngineInfo(tuple(map(ConnectorInfo, names)))


def begin(vllm_config: Any, process: ProcessInfo, contained: Collection[int] = ()) -> PageWriter:
    """Begin the page of this process, and remove what dead processes have left.

    Where there can't be one the reason is logged: then no one sees this process's numbers.
    """
    memory = remove = None
    identity = Identity.of(vllm_config)
    with files.reported("kvobs's metrics can't be exported: %s. Serving is not affected"):
        path = files.folder()
        if process.rank is None:
            process = previous.noted(process, identity.server) or process
        files.clean(path, identity.server, *(previous.sought(process) or ()))
        place = process_name(process.rank).replace(" ", "")
        name = f"{identity.server}-{identity.number}-{place}"
        memory, remove = files.create(path, name, size_of(process))
    page = PageWriter(process, contained, memory, remove)
    atexit.register(page.leave)
    return page


def look_from_thread(page: PageWriter, watch: Callable[[Callable[[], bool]], None]) -> None:
    """Let a thread look after a page once a second: ``watch`` is called with what is to be done each time."""
    look = partial(_look, weakref.ref(page), page.leave)
    thread = Thread(target=watch, args=(look,), name="kvobs-page", daemon=True)
    faults.contained("record")(thread.start)()


def _look(box: weakref.ref[PageWriter], leave: Callable[[], None]) -> bool:
    """Note that the thread runs: it can't while the GIL is held. Return whether the process continues.

    If the page was forgotten its file is removed here: what the end of an object runs swallows exceptions, even a
    signal's.
    """
    page = box()
    if page is not None and not page.words[layout.ENDED]:
        page.words[layout.LOOKED] = perf_counter_ns()
        page.catch_up()
        return True
    leave()
    atexit.unregister(leave)
    return False
