"""Write finished requests as JSON lines to a file or to stderr: by a thread, never within a step.

Nothing that happens to the file reaches the engine. While a write blocks, lines wait; what does not fit, and what can't
be written, is dropped and counted. The file is opened to append, and anew when it was renamed or removed, as by
logrotate. Each line is one write, so that engines may share a file.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from io import FileIO, TextIOWrapper
from logging.handlers import WatchedFileHandler
from queue import SimpleQueue
from threading import Thread
from typing import Any

from kvobs.faults import contained
from kvobs.log import Outage, line, log
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.vllm_api.proc import cores_of_parent

STDERR = "stderr"
WAITING_AT_MOST = 4096  # lines
EVERY_S = 0.1  # between looks at what waits; vLLM may kill an engine that it ends
CLOSING_S = 1.0
_DROPPED = signals.slot(signals.REQUEST_LOG_DROPPED)


class Whole(FileIO):
    """A file without a buffer; the rest of a line for which there was no space comes before the next line."""

    _rest = b""

    def write(self, data: Any, /) -> int:
        lines = self._rest + data
        written = super().write(lines)
        if written is None:  # it was not ours to make it wait
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self._rest = lines[written:]
        return len(data)


class _NoLock(nullcontext[None]):
    """Stands for a handler's lock: one thread writes, and what ends the process must not wait for it."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class _Lines(logging.Handler):
    """Writes mappings as JSON; the lines that can't be written are counted."""

    output = STDERR
    lost = 0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.outage = Outage()

    def createLock(self) -> None:  # noqa: N802 - the base class's name
        self.lock = _NoLock()  # type: ignore[assignment] # has all that logging calls

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.msg)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        self.lost += 1
        error = sys.exception()
        self.outage.begins(
            logging.WARNING,
            "the request log %s can't be written: %s. Serving is not affected, but lines are dropped until it can be "
            "written again (kvobs_request_log_dropped_total)",
            line(self.output),
            line(error),
        )


class LogFile(_Lines, WatchedFileHandler):
    """A file, or a named pipe, by its path."""

    def __init__(self, path: str) -> None:
        self.output = path
        super().__init__(path, delay=True)

    def _open(self) -> TextIOWrapper:
        file = Whole(self.baseFilename, "a", opener=_opened)
        status = os.fstat(file.fileno())  # else the second line would open it again, and a pipe's reader see its end
        self.dev, self.ino = status.st_dev, status.st_ino
        return TextIOWrapper(file, write_through=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # of opening it
            self.handleError(record)


class Stderr(_Lines, logging.StreamHandler[TextIOWrapper]):
    """This process's standard error, without the prefix that vLLM puts before each line."""

    def __init__(self) -> None:
        super().__init__(TextIOWrapper(Whole(2, "w", closefd=False), write_through=True))


def _opened(path: str, flags: int) -> int:
    """Open a file that is not a link: a user who may write to its folder can't redirect the writes."""
    return os.open(path, flags | os.O_NOFOLLOW, mode=0o640)


class RequestLog:
    """Writes the lines, and counts dropped ones."""

    def __init__(self, handler: LogFile | Stderr, recorder: Recorder) -> None:
        self._handler = handler
        self._recorder = recorder
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._thread: Thread | None = Thread(target=self._run, name="kvobs-request-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Write the lines, ten times a second."""
        with suppress(OSError):  # EngineCore's worker may have bound this process to the cores of the model
            os.sched_setaffinity(0, cores_of_parent())
        while True:
            while self._queue.empty():
                time.sleep(EVERY_S)
            if (fields := self._queue.get()) is None:
                return
            lost = self._handler.lost
            self._handler.handle(logging.makeLogRecord({"msg": fields}))
            if self._handler.lost > lost:
                self._recorder.count(None, _DROPPED)
            else:
                text = "the request log %s is written again; %d lines have been dropped since the start"
                self._handler.outage.ends(text, line(self._handler.output), lost)

    def put(self, fields: Mapping[str, Any]) -> None:
        """Hand over the fields of a line, which the caller must not change any more; this never waits."""
        if self._queue.qsize() < WAITING_AT_MOST:
            self._queue.put(fields)
        else:
            self._recorder.count(None, _DROPPED)

    @contained("record")
    def close(self) -> None:
        """Write what waits; for a second at most."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put(None)
        thread.join(CLOSING_S)
        if not thread.is_alive():
            self._handler.close()
        elif left := self._queue.qsize():  # the line that is being written counts in place of the mark of the end
            self._recorder.count(None, _DROPPED, left)
            log.warning("%d lines of the request log %s were not written", left, self._handler.output)
