"""A process that has a page, and whose connector 'remote' hangs, raises, or ends it in a call."""

import ctypes
import dataclasses
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from kvobs.connectors.sub_connector import SubConnector
from kvobs.log import log as log_
from kvobs.page import writer
from kvobs.page.calls import pack
from kvobs.page.layout import SINCE
from kvobs.page.writer import PageWriter
from kvobs.probe import native
from kvobs.probe.layer_calls import ARGUMENTS, LayerCalls
from kvobs.probe.pauses import OF_PROCESS
from kvobs.probe.pure import Probe
from kvobs.probe.recorder import SUM, Recorder

NAMES = ("cpu", "remote")
REMOTE = 1


def config(engine: str) -> Any:
    """Return as much of vLLM's configuration as identifies an engine."""
    model = SimpleNamespace(served_model_name=["tiny"])
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine), instance_id="one", model_config=model)


def begin(
    engine: str, rank: int | None, names: Sequence[str] = NAMES, contained: Collection[int] = (), **info: Any
) -> PageWriter:
    """Begin the page of a process, whose engine has these connectors; ``info`` is what else describes the engine."""
    described = dataclasses.replace(writer.plain(names), **info)
    page = writer.begin(config(engine), writer.describe(described, rank), contained)
    writer.look_from_thread(page, OF_PROCESS.watch)
    return page


WRITERS: WeakKeyDictionary[PageWriter, Probe] = WeakKeyDictionary()


def note(
    box: PageWriter, index: int, hook: str, begin_ns: int, spent_ns: int, *, calls: int = 1, raised: bool = False
) -> None:
    """Write the record of a call, or of so many calls."""
    marks = box.marks(index, hook)
    probe = WRITERS.setdefault(box, native.probe(box.words, box.layout.ring, bytes(65), SUM))
    probe.note(begin_ns, spent_ns, pack(marks, calls, has_raised=raised))
    ended = box.fan_outs(hook) + 1 if hook in ARGUMENTS else marks + 1
    box.words[marks] = box.words[ended] = begin_ns


class _Slow:
    def __del__(self) -> None:
        ctypes.PyDLL(None).sleep(2)  # with the GIL held, as in all of a collection


def _collect() -> None:
    cycle: list[Any] = [_Slow()]
    cycle.append(cycle)
    del cycle
    gc.collect()


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def _raise() -> None:
    raise RuntimeError("the disk is gone")


FAULTS = {
    "hangs": lambda: time.sleep(600),
    "holds the GIL": _hold_the_gil,
    "collects": _collect,
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": _raise,
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is killed late": lambda: os.system(f"sleep 1.5; kill -9 {os.getpid()}"),  # in a call long enough to be seen
    "returns": lambda: None,
    "stays after it": lambda: None,
    "raises, and goes on": _raise,
}


class Forked:
    """A fork of the test that has begun the call."""

    def __init__(self, pid: int, log: int) -> None:
        self.pid, self._log = pid, log

    def last_words(self) -> str:
        """Return what it has logged; it must have ended."""
        return os.read(self._log, 1 << 16).decode()

    def kill(self) -> None:
        """Let the kernel end it, and wait for that as its parent."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


@contextmanager
def process(engine: str, rank: int | None, fault: str, hook: str = "start_load_kv") -> Iterator[Forked]:
    """Run one until it has begun the call of this hook; forked, since to import vLLM takes long."""
    (log, log_in), (begun, begun_in) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            log_.handlers[:] = [logging.StreamHandler(os.fdopen(log_in, "w"))]
            _call(engine, rank, fault, hook, lambda: os.write(begun_in, b"."))
        os._exit(1 if fault == "raises" else 0)
    for written in (log_in, begun_in):
        os.close(written)
    forked = Forked(pid, log)
    try:
        assert os.read(begun, 1) == b"."
        yield forked
    finally:
        forked.kill()
        for read in (log, begun):
            os.close(read)


def _call(engine: str, rank: int | None, fault: str, hook: str, begins: Callable[[], object]) -> None:
    box = begin(engine, rank)
    recorder = Recorder(len(NAMES), names=NAMES, page=box)
    box.words[SINCE] = time.perf_counter_ns()

    def call(*_: Any) -> None:
        FAULTS[fault]()

    def well(*_: Any) -> None:
        time.sleep(0)

    if hook in ARGUMENTS:
        connectors = [SimpleNamespace(**{hook: well}), SimpleNamespace(**{hook: call})]
        count = [SubConnector(i, NAMES[i], one, recorder) for i, one in enumerate(connectors)]
        recorded: Any = LayerCalls(hook, [connector.layer_target(hook) for connector in count], recorder).fan_out
        arguments: tuple[Any, ...] = (None,) * len(ARGUMENTS[hook])
    else:
        recorder.timed(0, hook, well)()
        recorded, arguments = recorder.timed(REMOTE, hook, call), ()
    if fault == "raises, and goes on":
        with suppress(RuntimeError):
            recorded(*arguments)
        recorded, arguments, fault = recorder.timed(0, "wait_for_save", well), (), "stays after it"
        box.words[SINCE] = time.perf_counter_ns()  # in its next step
    begins()
    try:
        recorded(*arguments)
        time.sleep(600 if fault == "stays after it" else 0)
    finally:
        if not isinstance(sys.exception(), Exception):
            box.close()
