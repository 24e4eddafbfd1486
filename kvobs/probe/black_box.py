"""Show from outside a process which call into a connector it is in, its last calls, and the exception that ended it.

Each process of an engine writes one page of shared memory with plain stores, always: others can read it while the GIL
is held, and after the process is gone. A call has two words, its begin and the begin of the last one that ended: while
they differ it is in progress. Times are ns of the monotonic clock, which all processes of a machine share.

The layer hooks, called hundreds of times per step, write their begin only. Which connector such a call is in, and
whether it has ended, is read from the stack by a thread that looks once a second. The last calls follow in a ring.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import struct
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from time import perf_counter, perf_counter_ns
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kvobs import faults
from kvobs.log import once
from kvobs.probe import ring, ring_files
from kvobs.probe.pauses import LOOK_NS, OF_PROCESS
from kvobs.vllm_api.hooks import HOOKS, Cadence
from kvobs.vllm_api.proc import start_time

BLIND_NS = 3 * LOOK_NS
"""After so long without a look the thread can't run: the GIL is held, or the process stands still."""
SCHEDULER = "scheduler"
UNKNOWN = "unknown"
SUFFIX = ".page"
SURVIVED = frozenset({"reset_cache", "shutdown", "unregister_kv_caches", "restore_kv_caches"})
"""Hooks after whose exceptions the engine goes on, since vLLM returns them to its caller, or was ending anyway."""

_MAGIC, _VERSION = b"KVOBSBOX", 3
_HEAD = struct.Struct("<8sII")  # magic, version, length of the description as JSON
_WORD = 8
_HOOKS = tuple(HOOKS)
_LAYER_HOOKS = tuple(hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER)
_NAME = 64  # bytes of an exception's class
# The words of a page.
(
    ENDED,  # 1: the process ended as vLLM asked it to
    SINCE,  # begin of a worker's step; 0: it is in none
    STEPS,  # number of steps that have ended
    LOOKED,  # when the thread looked last
    SEEN,  # the begin of the layer hook's call that it saw in progress, in seconds
    SEEN_IN,  # the connector that this call was in, from 1; 0: the call has ended
    RAISED,  # when an exception that ends the engine last ended a call
    RAISED_IN,  # position of this call's words
    RAISED_STEPS,  # number of steps that have ended once its step has, too
    RAISED_CLASS,
) = range(10)
_MARKS = RAISED_CLASS + _NAME // _WORD  # of each layer hook the begin of its last call, in seconds
_PAIRS = _MARKS + len(_LAYER_HOOKS)
_DATA_PARALLEL = re.compile(r"_dp(\d{1,9})$")


class Identity(NamedTuple):
    """Identifies one start of an engine, for its processes and for those that serve its metrics."""

    secret: bytes
    number: int
    """Of the engine in its data-parallel group."""

    @classmethod
    def of(cls, vllm_config: Any) -> Identity:
        engine_id = vllm_config.kv_transfer_config.engine_id or ""
        # For dense models vLLM has the number only there.
        suffix = _DATA_PARALLEL.search(engine_id)
        engine_id, number = (engine_id[: suffix.start()], int(suffix[1])) if suffix else (engine_id, 0)
        return cls(f"{engine_id}/{vllm_config.instance_id}".encode(), number)

    def digest(self, use: bytes) -> bytes:
        """Return a hash for one use, which does not reveal the others."""
        return blake2b(self.secret, digest_size=16, person=use).digest()

    def pages(self, number: int | None = None) -> str:
        """Return the begin of the names of its pages, or of those of another engine of its group."""
        return f"{self.digest(b'pages').hex()}-{self.number if number is None else number}"


def folder() -> Path:
    """Return the folder of this user's pages."""
    memory = "/dev/shm"
    return Path(memory if os.access(memory, os.W_OK) else tempfile.gettempdir()) / f"kvobs-{os.geteuid()}"


class BlackBox:
    """Writes the page of one process: a worker of this rank, or the scheduler's (None).

    The exceptions of the connectors at the positions ``contained`` are contained. ``memory`` is of zeros; None: memory
    that nobody else sees. ``remove`` removes the page.

    ``words`` and ``floats`` are its marks, for callers that inline the stores: a call would cost more.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int | None = None,
        contained: Collection[int] = (),
        memory: mmap.mmap | None = None,
        remove: Callable[[], None] | None = None,
    ) -> None:
        about = _about(names, rank)
        memory = memory if memory is not None else mmap.mmap(-1, _size(about, names))
        self._names, self.rank, self._contained = names, rank, contained
        self._codes: dict[CodeType, tuple[int, Mapping[int, int]]] = {}
        self._remove = weakref.finalize(self, remove) if remove is not None else None
        marks, calls = _parts(memory, about, names)
        self.words, self.floats = marks.cast("q"), marks.cast("d")
        self.ring = ring.Ring(calls)
        memory[_HEAD.size : _HEAD.size + len(about)] = about
        memory[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, len(about))

    def pair(self, child: int, hook: str) -> int:
        """Return the position of a call's two words: its begin, and the begin of the last one that ended."""
        return _PAIRS + 2 * (child * len(_HOOKS) + _HOOKS.index(hook))

    def note(self, pair: int, begin_ns: int, spent_ns: int, what: int) -> None:
        """Write the record of a call with this pair of words; then it counts as ended."""
        words, following = self.words, self.ring.next
        words[pair] = begin_ns
        at = following[0]
        following[0] = at + ring.SIZE if at < self.ring.last else 0
        ring.RECORD.pack_into(self.ring.memory, at, begin_ns, spent_ns, what)
        words[pair + 1] = begin_ns

    def raised(self, child: int, hook: str, error: BaseException) -> None:
        """Note the exception of a call if it ends the engine, and log that before vLLM gets it."""
        if not isinstance(error, Exception) or child in self._contained or hook in SURVIVED or _was_unwinding(error):
            return
        name = type(error).__qualname__
        bytes_, at = self.words.cast("B"), RAISED_CLASS * _WORD
        bytes_[at : at + _NAME] = name.encode()[:_NAME].ljust(_NAME, b"\0")
        self.words[RAISED_IN] = self.pair(child, hook)
        self.words[RAISED_STEPS] = self.words[STEPS] + bool(self.words[SINCE])
        self.words[RAISED] = perf_counter_ns()
        if self._remove is not None:
            self._remove.detach()  # the next start removes the page
        text = "connector %r raised %s in %s on %s; this ends the engine"
        once(f"ends:{child}:{hook}", logging.ERROR, text, self._names[child], name, hook, place_of(self.rank))

    @staticmethod
    def place_of_layers(hook: str) -> int:
        """Return the position of the word for the begin of a layer hook's calls, in seconds."""
        return _MARKS + _LAYER_HOOKS.index(hook)

    def watch(self, hook: str, code: CodeType, lines: Mapping[int, int]) -> None:
        """Watch the calls of a layer hook: ``code`` calls a connector in each of these ``lines``."""
        self._codes[code] = self.place_of_layers(hook), lines

    @faults.contained("record")
    def look(self) -> None:
        """Note whether a layer hook's call that began long ago is in progress, and in which connector."""
        at = max((at for at, _ in tuple(self._codes.values())), key=self.floats.__getitem__, default=_MARKS)
        mark, step = self.floats[at], self.words[SINCE] * 1e-9
        if step and step < mark < perf_counter() - LOOK_NS * 1e-9:
            self.words[SEEN_IN] = self._in_progress(at)
            self.floats[SEEN] = mark
        self.words[LOOKED] = perf_counter_ns()

    def _in_progress(self, at: int) -> int:
        """Return the connector that a thread is in by this layer hook, from 1; 0: no thread is."""
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:  # its variables are not read: that would keep alive what they hold
                place, lines = self._codes.get(frame.f_code, (0, {}))
                if place == at:
                    return lines.get(frame.f_lineno, -1) + 1
                frame = frame.f_back
        return 0

    @faults.contained("record")
    def close(self) -> None:
        """Note that the process ends as it should, and remove the page."""
        self.words[ENDED] = 1
        if self._remove is not None:
            self._remove()


def _was_unwinding(error: BaseException) -> bool:
    """Return whether a call was made while another exception was on its way: vLLM ends its step after one, too."""
    frame: FrameType | None = sys._getframe()
    callers = set()
    while frame is not None:
        callers.add(frame)
        frame = frame.f_back
    cause = error.__context__
    while cause is not None:  # those that the connector has handled were not handled by a caller of the call
        if cause.__traceback__ is not None and cause.__traceback__.tb_frame in callers:
            return True
        cause = cause.__context__
    return False


def _look(box: weakref.ref[BlackBox]) -> bool:
    """Look at the calls of a process; return whether it goes on."""
    watched = box()
    if watched is None or watched.words[ENDED]:
        return False
    watched.look()
    return True


def begin(vllm_config: Any, names: Sequence[str], rank: int | None, contained: Collection[int]) -> BlackBox:
    """Begin the page of this process, and remove those that dead processes have left.

    Where there can't be one the reason is logged: then nobody sees this process's calls.
    """
    memory = remove = None
    with ring_files.reported("calls in progress can't be shown: %s. Serving is not affected"):
        place = f"{Identity.of(vllm_config).pages()}-{file_place_of(rank)}"
        memory, remove = ring_files.create(folder(), place, _size(_about(names, rank), names), SUFFIX)
    box = BlackBox(names, rank, contained, memory, remove)
    look = partial(_look, weakref.ref(box))
    thread = Thread(target=OF_PROCESS.watch, args=(look,), name="kvobs-black-box", daemon=True)
    faults.contained("record")(thread.start)()
    return box


def place_of(rank: int | None) -> str:
    """Return the name of a process in texts."""
    return SCHEDULER if rank is None else f"rank {rank}"


def file_place_of(rank: int | None) -> str:
    """Return the name of a process in names of files."""
    return place_of(rank).replace(" ", "")


def _about(names: Sequence[str], rank: int | None) -> bytes:
    pid = os.getpid()
    return json.dumps({"pid": pid, "started": start_time(pid), "rank": rank, "connectors": list(names)}).encode()


def _first(about: bytes) -> int:
    return -(-(_HEAD.size + len(about)) // _WORD) * _WORD


def _size(about: bytes, names: Sequence[str]) -> int:
    return _first(about) + _marks(names) + ring.BYTES


def _marks(names: Sequence[str]) -> int:
    return (_PAIRS + 2 * len(names) * len(_HOOKS)) * _WORD


def _parts(memory: mmap.mmap, about: bytes, names: Sequence[str]) -> tuple[memoryview, memoryview]:
    """Return the marks and the ring of a page; ValueError if it does not end with a record."""
    words = memoryview(memory)[_first(about) :]
    marks, calls = words[: _marks(names)], words[_marks(names) :]
    if not calls or len(calls) % ring.SIZE:
        raise ValueError("it is cut off")
    return marks, calls


class Call(NamedTuple):
    """A call in progress since this monotonic time, or one that raised then an ``error`` that ends the engine."""

    connector: str
    hook: str
    rank: int | None
    since_ns: int
    error: str = ""


class Record(NamedTuple):
    """A call that has ended, or the calls of a layer hook in a step as if they had followed each other."""

    connector: str
    hook: str
    begin_ns: int
    spent_ns: int
    calls: int
    has_raised: bool


class Page:
    """Reads the page of a process, running or not.

    Raises:
        OSError: it can't be opened.
        ValueError: its process has not written it yet, or another version of kvobs has.
    """

    def __init__(self, path: Path) -> None:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(opened, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(opened)
        magic, version, length = _HEAD.unpack_from(memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ValueError("it is no page of this version of kvobs")
        about = memory[_HEAD.size : _HEAD.size + length]
        described = json.loads(about)
        self.pid: int = described["pid"]
        self._started: str | None = described["started"]
        self.rank: int | None = described["rank"]
        self._names: list[str] = described["connectors"]
        marks, self._ring = _parts(memory, about, self._names)
        self.words, self._floats = marks.cast("q"), marks.cast("d")
        self.room = len(self._ring) // ring.SIZE  # of calls, before the oldest are overwritten
        self.halted_ns = 0  # when the reader last saw that its process did not run

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self._started

    @property
    def has_ended_well(self) -> bool:
        return bool(self.words[ENDED])

    def calls(self) -> list[Call]:
        """Return the calls in progress, or those in which the process died."""
        words = self.words.tolist()
        begun = range(_PAIRS, len(words) - 1, 2)
        calls = [Call(*self._call(at), self.rank, words[at]) for at in begun if words[at] != words[at + 1]]
        return calls or list(self._layer_call(max([words[at] for at in begun], default=0)))

    def records(self) -> list[Record]:
        """Return the last calls that have ended, in the order of their begin."""
        in_progress = {call.since_ns for call in self.calls()}
        found = []
        for begin_ns, spent_ns, what in ring.read(self._ring):
            if begin_ns not in in_progress:
                at, calls, has_raised = ring.unpack(what)
                found.append(Record(*self._call(at), begin_ns, spent_ns, calls, has_raised))
        return found

    def _call(self, at: int) -> tuple[str, str]:
        child, hook = divmod((at - _PAIRS) // 2, len(_HOOKS))
        return self._names[child], _HOOKS[hook]

    def _layer_call(self, others_ns: int) -> Iterator[Call]:
        """Yield the call of a layer hook that is in progress, if it began after the other hooks' calls."""
        words, floats = self.words, self._floats
        at = max(range(_MARKS, _PAIRS), key=floats.__getitem__)
        mark = floats[at]
        since_ns, now_ns = round(mark * 1e9), perf_counter_ns()
        if not words[SINCE] or since_ns <= max(words[SINCE], others_ns) or now_ns - since_ns < LOOK_NS:
            return
        name = UNKNOWN  # the GIL is held: by this call, or by what runs after it, such as a driver that hangs
        if now_ns - words[LOOKED] < BLIND_NS or not self.is_alive:
            child = words[SEEN_IN] - 1 if floats[SEEN] == mark else -1
            if child < 0:
                return
            name = self._names[child]
        yield Call(name, _LAYER_HOOKS[at - _MARKS], self.rank, since_ns)

    def raised(self) -> Call | None:
        """Return the last exception, if it ends the engine: no call has begun since, or no step but those it ended.

        A worker's step ends with calls into all connectors, after an exception, too.
        """
        words = self.words
        begun = range(_PAIRS, len(words) - 1, 2)
        if self.rank is None:
            goes_on = any(words[at] > words[RAISED] and self._call(at)[1] not in SURVIVED for at in begun)
        else:
            goes_on = words[SINCE] > words[RAISED] or words[STEPS] > words[RAISED_STEPS]
        if not words[RAISED] or goes_on:
            return None
        name = words.cast("B")[RAISED_CLASS * _WORD :][:_NAME].tobytes().rstrip(b"\0").decode(errors="replace")
        return Call(*self._call(words[RAISED_IN]), self.rank, words[RAISED], name)


def pages(engine: str, known: Collection[str] = ()) -> Iterator[tuple[str, Page]]:
    """Yield the pages whose names begin so, except known ones, each with its name."""
    for path in sorted(folder().glob(f"{engine}-*{SUFFIX}")):
        if path.name not in known:
            with suppress(OSError, ValueError, KeyError, struct.error):  # its process has only just begun, or ended
                yield path.name, Page(path)
