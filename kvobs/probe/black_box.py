"""Show from outside a process which call into a connector it is in, its last calls, and the exception that ended it.

Each process of an engine writes one page of shared memory with plain stores, always: others can read it while the GIL
is held, and after the process is gone. It has single words, two marks for each call, the process's counts, and a ring
of the last calls. Times are ns of the monotonic clock, which all processes of a machine share.

A call's marks are the last begin, and the latest begin of a call that ended: it is in progress while the first is
later. Of calls that overlap, on two threads or within each other, the one that began last is seen. The layer hooks,
called hundreds of times per step, mark their begin only, and the end of the last layer.
"""

from __future__ import annotations

import atexit
import json
import logging
import mmap
import os
import re
import struct
import sys
import tempfile
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from threading import Thread
from time import perf_counter_ns
from types import FrameType
from typing import Any, NamedTuple

from kvobs import faults
from kvobs.log import once
from kvobs.probe import ring, ring_files
from kvobs.probe.pauses import OF_PROCESS
from kvobs.schema.signals import TABLE_DIGEST, place
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, Cadence
from kvobs.vllm_api.proc import served_port, start_time

SCHEDULER = "scheduler"
SUFFIX = ".page"
SURVIVED = frozenset({"reset_cache", "shutdown", "unregister_kv_caches", "restore_kv_caches"})
"""Hooks after whose exceptions the engine goes on, since vLLM returns them to its caller, or was ending anyway."""
STOPS = (SystemExit, KeyboardInterrupt)
"""What handlers of signals raise, and ``sys.exit``: the process was asked to end. Others may be no ``Exception``."""

_HEAD = struct.Struct("<8sII")  # magic, version, length of the description as JSON
_WORD = 8
_HOOKS = tuple(HOOKS)
_LAYER_HOOKS = tuple(hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER)
_MAGIC = b"KVOBSBOX"
_VERSION = zlib.crc32(repr((4, TABLE_DIGEST, _HOOKS)).encode())  # of the positions of its words
_NAME = 64  # bytes of an exception's class
# The words of a page.
(
    ENDED,  # 1: the process ended as vLLM asked it to
    SINCE,  # begin of a worker's step; 0: it is in none
    STEPS,  # number of steps that have ended
    LOOKED,  # when the thread looked last
    RAISED,  # when an exception that ends the engine last ended a call
    RAISED_IN,  # position of this call's marks
    RAISED_STEPS,  # number of steps that have ended once its step has, too
    RAISED_CLASS,
) = range(8)
_FAN_OUTS = RAISED_CLASS + _NAME // _WORD  # of each layer hook their number, and the end of the last one
_MARKS = _FAN_OUTS + 2 * len(_LAYER_HOOKS)
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
    that nobody else sees. ``remove`` removes the page. ``serves`` is what the scheduler's page says of its engine.

    ``words`` are the page's, from ``ring`` on those of the last calls.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int | None = None,
        contained: Collection[int] = (),
        memory: mmap.mmap | None = None,
        remove: Callable[[], None] | None = None,
        *,
        serves: Mapping[str, Any] | None = None,
    ) -> None:
        about = _about(names, rank, serves)
        memory = memory if memory is not None else mmap.mmap(-1, _size(about, names))
        self._names, self.rank, self._contained = names, rank, contained
        self.words = _words(memory, about, names)
        self.leave = partial(_leave, self.words, remove)
        """Removes the page; it outlives this."""
        self.ring = _ring(names)
        memory[_HEAD.size : _HEAD.size + len(about)] = about
        memory[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, len(about))

    @staticmethod
    def marks(child: int, hook: str) -> int:
        """Return the position of a call's two marks."""
        return _MARKS + 2 * (child * len(_HOOKS) + _HOOKS.index(hook))

    @staticmethod
    def fan_outs(hook: str) -> int:
        """Return the position of the two words of a layer hook: its fan-outs, and the end of the last one."""
        return _FAN_OUTS + 2 * _LAYER_HOOKS.index(hook)

    @property
    def counts(self) -> int:
        """Return the position of the process's counts: those of the slots from 0 on."""
        return _counts(self._names)

    def raised(self, child: int, hook: str, error: BaseException) -> None:
        """Note the exception of a call if it ends the engine, and log that before vLLM gets it."""
        if isinstance(error, STOPS) or child in self._contained or hook in SURVIVED or _was_unwinding(error):
            return
        name = type(error).__qualname__
        bytes_, at = self.words.cast("B"), RAISED_CLASS * _WORD
        bytes_[at : at + _NAME] = name.encode()[:_NAME].ljust(_NAME, b"\0")
        self.words[RAISED_IN] = self.marks(child, hook)
        self.words[RAISED_STEPS] = self.words[STEPS] + bool(self.words[SINCE])
        self.words[RAISED] = perf_counter_ns()
        text = "connector %r raised %s in %s on %s; this ends the engine"
        once(f"ends:{child}:{hook}", logging.ERROR, text, self._names[child], name, hook, place_of(self.rank))

    @faults.contained("record")
    def close(self) -> None:
        """Note that the process ends as it should, and remove the page."""
        self.words[ENDED] = 1
        self.leave()


def _was_unwinding(error: BaseException) -> bool:
    """Return whether a call was made while another exception was on its way: vLLM ends its step after one, too."""
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
    """Remove the page, unless it names what ended the engine: then the next start removes it."""
    if remove is not None and not words[RAISED]:
        remove()


def _look(box: weakref.ref[BlackBox], leave: Callable[[], None]) -> bool:
    """Note that the thread runs: it can't while the GIL is held. Return whether the process goes on.

    If it was forgotten its page is removed here: what the end of an object runs swallows exceptions, also a signal's.
    """
    watched = box()
    if watched is not None and not watched.words[ENDED]:
        watched.words[LOOKED] = perf_counter_ns()
        return True
    leave()
    atexit.unregister(leave)
    return False


def begin(vllm_config: Any, names: Sequence[str], rank: int | None, contained: Collection[int]) -> BlackBox:
    """Begin the page of this process, and remove those that dead processes have left.

    Where there can't be one the reason is logged: then nobody sees this process's calls.
    """
    memory = remove = None
    serves = _serves(vllm_config) if rank is None else None
    with ring_files.reported("calls in progress can't be shown: %s. Serving is not affected"):
        place = f"{Identity.of(vllm_config).pages()}-{file_place_of(rank)}"
        memory, remove = ring_files.create(folder(), place, _size(_about(names, rank, serves), names), SUFFIX)
    box = BlackBox(names, rank, contained, memory, remove, serves=serves)
    atexit.register(box.leave)
    look = partial(_look, weakref.ref(box), box.leave)
    thread = Thread(target=OF_PROCESS.watch, args=(look,), name="kvobs-black-box", daemon=True)
    faults.contained("record")(thread.start)()
    return box


def place_of(rank: int | None) -> str:
    """Return the name of a process in texts."""
    return SCHEDULER if rank is None else f"rank {rank}"


def file_place_of(rank: int | None) -> str:
    """Return the name of a process in names of files."""
    return place_of(rank).replace(" ", "")


@faults.contained("record")
def _serves(vllm_config: Any) -> dict[str, Any]:
    """Return the model of this engine, and the port of its server if that is known: people know it by these."""
    return {"model": versions.model_name(vllm_config), "port": served_port(os.getppid())}


def _about(names: Sequence[str], rank: int | None, serves: Mapping[str, Any] | None) -> bytes:
    pid = os.getpid()
    about = {"pid": pid, "started": start_time(pid), "rank": rank, "connectors": list(names), "serves": serves or {}}
    return json.dumps(about).encode()


def _first(about: bytes) -> int:
    return -(-(_HEAD.size + len(about)) // _WORD) * _WORD


def _counts(names: Sequence[str]) -> int:
    return _MARKS + 2 * len(names) * len(_HOOKS)


def _ring(names: Sequence[str]) -> int:
    return _counts(names) + place(len(names), 0)


def _size(about: bytes, names: Sequence[str]) -> int:
    return _first(about) + _ring(names) * _WORD + ring.BYTES


def _words(memory: mmap.mmap, about: bytes, names: Sequence[str]) -> memoryview:
    """Return the words of a page; ValueError if it does not end with a record."""
    words = memoryview(memory)[_first(about) :].cast("q")
    if len(words) <= _ring(names) or (len(words) - _ring(names)) % ring.WORDS:
        raise ValueError("it is cut off")
    return words


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
        self.serves: dict[str, Any] = described.get("serves", {})
        self._names: list[str] = described["connectors"]
        self.words = _words(memory, about, self._names)
        self._ring = self.words[_ring(self._names) :]
        self.room = len(self._ring) // ring.WORDS  # of calls, before the oldest are overwritten
        self.halted_ns = 0  # when the reader last saw that its process did not run

    @property
    def is_alive(self) -> bool:
        return start_time(self.pid) == self._started

    @property
    def has_ended_well(self) -> bool:
        return bool(self.words[ENDED])

    @property
    def worked_ns(self) -> int:
        """When the process was last in a call, or began the step that it is in."""
        ends = (begin_ns + spent_ns for begin_ns, spent_ns, _ in ring.read(self._ring))
        return max(self.words[SINCE], *ends, 0)

    def calls(self) -> list[Call]:
        """Return the calls in progress, or those in which the process died."""
        words = self.words[: _counts(self._names)].tolist()
        found: dict[int, Call] = {}
        for at in range(_MARKS, len(words), 2):
            name, hook = self._call(at)
            if hook not in _LAYER_HOOKS:
                key, is_in_progress = at, words[at] > words[at + 1]
            else:  # of a fan-out only the call that began last is in progress
                key = BlackBox.fan_outs(hook)
                is_in_progress = words[at] > max(words[key + 1], found[key].since_ns if key in found else 0)
            if is_in_progress:
                found[key] = Call(name, hook, self.rank, words[at])
        return list(found.values())

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
        child, hook = divmod((at - _MARKS) // 2, len(_HOOKS))
        return self._names[child], _HOOKS[hook]

    def raised(self) -> Call | None:
        """Return the last exception, if it ends the engine: no call has begun since, or no step but those it ended.

        A worker's step ends with calls into all connectors, after an exception, too.
        """
        words = self.words
        begun = range(_MARKS, _counts(self._names), 2)
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
