"""Read the pages of processes, running or not: their numbers, spans, calls, and what ended them."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvobs.page import calls, files, layout, rows
from kvobs.page.description import ProcessInfo
from kvobs.page.layout import HEAD, HOOK_NAMES, LAYER_HOOKS, MAGIC, MARKS, SPAN_BYTES, VERSION, WORD, Layout
from kvobs.page.span_ring import SpanReader
from kvobs.schema.signals import CONNECTORS_AT_MOST
from kvobs.vllm_api.proc import exit_status, is_ending, is_stopped, pid_namespace, start_time

SURVIVED = frozenset({"reset_cache", "shutdown", "unregister_kv_caches", "restore_kv_caches"})
"""Hooks after whose exceptions the engine continues: vLLM returns them to its caller, or was ending anyway."""


class OtherVersionError(ValueError):
    """Another version of kvobs has written a page."""


class Call(NamedTuple):
    """A call in progress since this monotonic time, or one that raised then an ``error`` that crashes the engine."""

    connector: str
    hook: str
    rank: int | None
    since_ns: int
    error: str = ""


class CallRecord(NamedTuple):
    """A call that has ended, or the calls of a layer hook in a step as if they had followed each other."""

    connector: str
    hook: str
    begin_ns: int
    spent_ns: int
    calls: int
    has_raised: bool


class Page:
    """Reads the page of a process, and keeps it when the process is gone.

    Raises:
        OSError: it can't be opened.
        OtherVersionError: another version of kvobs has written it.
        ValueError: its process has not written it yet, or it is none.
    """

    def __init__(self, path: Path) -> None:
        self._file = files.open_page(path)
        weakref.finalize(self, os.close, self._file)
        memory = _map(self._file)
        description = _description_in(memory)
        self.process = _process_of(description)
        self.layout = at = Layout(len(self.process.engine.connectors), self.process.calls)
        begin = layout.first(description)
        if len(memory) != begin + at.words * WORD:
            raise ValueError(f"it has {len(memory)} bytes instead of {begin + at.words * WORD}")
        self.name = path.name
        self.words = memoryview(memory)[begin:].cast("q")
        table = np.frombuffer(memory, np.int64, at.row_count * layout.ROW, begin + at.rows * WORD)
        self._rows = rows.RowReader(table.reshape(-1, layout.ROW), at.connectors)
        self.counts: Any = np.frombuffer(memory, np.uint64, at.slots, begin + at.counts * WORD)
        """The words of the slots; sums are numbers without a sign, gauges one more than their values."""
        self._is_here = self.process.namespace == (pid_namespace() or None)
        self.halted_ns = 0  # when the reader last saw that its process did not run

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def rank(self) -> int | None:
        return self.process.rank

    @property
    def names(self) -> list[str]:
        """Return the names of the connectors."""
        return self.process.engine.names

    # The process

    @property
    def is_alive(self) -> bool:
        """Whether its process runs: in another container only its lock on the page shows that."""
        if self._is_here and self.process.started is not None:
            return start_time(self.pid) == self.process.started
        return files.is_locked(self._file)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped its process, as far as that can be seen."""
        return self._is_here and is_stopped(self.pid)

    @property
    def is_ending(self) -> bool:
        return is_ending(self.pid) if self._is_here else not self.is_alive

    @property
    def exit_status(self) -> int | None:
        """Return the status with which its process has ended, as from ``wait``; None if it is not known."""
        return exit_status(self.pid) if self._is_here else None

    def watched(self) -> int | None:
        """Return a descriptor that can be read once its process has ended; None if there is none."""
        if self._is_here and self.is_alive:
            with suppress(OSError):  # it has ended just now
                return os.pidfd_open(self.pid)
        return None

    @property
    def has_ended_well(self) -> bool:
        return bool(self.words[layout.ENDED])

    @property
    def worked_ns(self) -> int:
        """When the process was last in a call, or began the step that it is in."""
        ends = (begin_ns + spent_ns for begin_ns, spent_ns, _ in self._ring())
        return max(self.words[layout.SINCE], *ends, 0)

    # Numbers and spans

    def rows(self) -> Iterator[tuple[rows.Key, int]]:
        """Yield the open series with their counts."""
        return self._rows.read()

    def spans(self, ring: int, begin: tuple[int, int] = (0, 0)) -> SpanReader:
        """Return what reads a ring of spans, from a position on."""
        return SpanReader(self.words, self.layout.spans(ring), SPAN_BYTES[ring], begin)

    # Calls

    def _ring(self) -> list[tuple[int, int, int]]:
        return calls.read(self.words[self.layout.ring :])

    def calls(self) -> list[Call]:
        """Return the calls in progress, or the calls in which the process ended."""
        words = self.words[: self.layout.counts].tolist()
        found: dict[int, Call] = {}
        for at in range(MARKS, len(words), 2):
            name, hook = self._call(at)
            if hook not in LAYER_HOOKS:
                key, is_in_progress = at, words[at] > words[at + 1]
            else:  # of a fan-out only the call that began last is in progress
                key = Layout.fan_outs(hook)
                is_in_progress = words[at] > max(words[key + 1], found[key].since_ns if key in found else 0)
            if is_in_progress:
                found[key] = Call(name, hook, self.rank, words[at])
        return list(found.values())

    def records(self) -> list[CallRecord]:
        """Return the last calls that have ended, in the order of their start."""
        in_progress = {call.since_ns for call in self.calls()}
        found = []
        for begin_ns, spent_ns, what in self._ring():
            at, number, has_raised = calls.unpack(what)
            if begin_ns not in in_progress and self._is_call(at):
                found.append(CallRecord(*self._call(at), begin_ns, spent_ns, number, has_raised))
        return found

    def _is_call(self, at: int) -> bool:
        return MARKS <= at < self.layout.counts

    def _call(self, at: int) -> tuple[str, str]:
        index, hook = divmod((at - MARKS) // 2, len(HOOK_NAMES))
        return self.names[index], HOOK_NAMES[hook]

    def raised(self) -> Call | None:
        """Return the last exception, if it crashes the engine: no call, or no step of a worker, has begun since.

        A worker's step ends with calls into all connectors, even after an exception.
        """
        words = self.words
        begun = range(MARKS, self.layout.counts, 2)
        if self.rank is None:
            goes_on = any(words[at] > words[layout.RAISED] and self._call(at)[1] not in SURVIVED for at in begun)
        else:
            is_in_next = words[layout.SINCE] > words[layout.RAISED]
            goes_on = is_in_next or words[layout.STEPS] > words[layout.RAISED_STEPS]
        if not words[layout.RAISED] or goes_on or not self._is_call(words[layout.RAISED_IN]):
            return None
        name = words.cast("B")[layout.RAISED_CLASS * WORD :][: layout.NAME].tobytes().rstrip(b"\0")
        where = self._call(words[layout.RAISED_IN])
        return Call(*where, self.rank, words[layout.RAISED], name.decode(errors="replace"))


def _map(opened: int) -> mmap.mmap:
    try:
        return mmap.mmap(opened, 0, access=mmap.ACCESS_READ)
    except ValueError:  # it is empty
        raise ValueError("its process has not written it yet") from None


def _description_in(memory: mmap.mmap) -> bytes:
    """Return the description of who has written a page; ValueError if it is none."""
    if len(memory) < HEAD.size:
        raise ValueError("it is truncated")
    magic, version, length = HEAD.unpack_from(memory)
    if magic == bytes(len(MAGIC)):
        raise ValueError("its process has not written it yet")
    if (magic, version) != (MAGIC, VERSION):
        raise OtherVersionError("it was written by another version of kvobs")
    return memory[HEAD.size : HEAD.size + length]


def _process_of(description: bytes) -> ProcessInfo:
    process = ProcessInfo.from_json(description)
    if not (len(process.engine.connectors) <= CONNECTORS_AT_MOST and process.calls):
        raise ValueError("its description has too many connectors, or no calls")
    return process


def names_of(begin: str = "") -> list[str]:
    """Return the names of the pages that begin so, the oldest first."""
    found = [name for name in files.names() if name.startswith(begin) and name.endswith(files.SUFFIX)]
    return sorted(found, key=lambda name: name.rsplit("-", 2)[-2:])


def pages(begin: str = "", known: Collection[str] = ()) -> Iterator[tuple[str, Page]]:
    """Yield the pages whose names begin so, except known ones, each with its name."""
    for name in names_of(begin):
        if name not in known:
            with suppress(OSError, ValueError):  # its process has only just begun, or ended
                yield name, Page(files.folder() / name)
