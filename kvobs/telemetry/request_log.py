"""Write finished requests as JSON lines to a file or to stderr: by a thread, never within a step.

Nothing that happens to the file reaches the engine. While it can't be written, lines wait; what does not fit is
dropped, and counted. The file is opened to append, and anew when it was renamed or removed, as by logrotate. Each write
has whole lines and at most as many bytes as Linux writes to a pipe in one piece, so that engines may share it.
"""

from __future__ import annotations

import json
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread, get_native_id
from typing import Any, Protocol

from kvobs import signals
from kvobs.faults import contained
from kvobs.log import line, log, once
from kvobs.proc import cores_of_parent
from kvobs.telemetry.recorder import Recorder

STDERR = "stderr"
WAITING_AT_MOST = 4096
"""Lines."""
EVERY_S = 0.1
"""Between writes; vLLM may kill an engine that it ends."""
CLOSING_S = 1.0
_DROPPED = signals.slot(signals.REQUEST_LOG_DROPPED)
_MODE = 0o640

Shutdown = Callable[[], None]


class Output(Protocol):
    """Where the lines go."""

    name: str

    def refresh(self) -> bool:
        """Open it, if it is not open or no longer what has its name; return whether it is another one than before."""

    def write(self, data: bytes) -> int:
        """Return how many bytes were written; OSError if none can be."""

    def close(self) -> None:
        """Close it, if it is open."""


class LogFile:
    """A file, or a named pipe, by its path."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._opened: int | None = None

    def refresh(self) -> bool:
        if self._opened is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(self.name), os.fstat(self._opened)):
                    return False
            self.close()
        # O_NONBLOCK: a pipe that nobody reads is an error, and nothing to wait for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        self._opened = os.open(self.name, flags, _MODE)
        return True

    def write(self, data: bytes) -> int:
        return os.write(self._opened if self._opened is not None else -1, data)

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            os.close(opened)


class Stderr:
    """This process's standard error, past Python's own and what vLLM puts before each of its lines."""

    name = STDERR
    _FD = 2

    def refresh(self) -> bool:
        return False

    def write(self, data: bytes) -> int:
        return os.write(self._FD, data)

    def close(self) -> None:
        """Leave it open: it is not the log's own."""


class Unlogged:
    """No request is logged."""

    def wants(self, request_id: str) -> bool:
        """Return whether this request is logged."""
        return False

    def put(self, fields: Mapping[str, Any]) -> None:
        """Hand over the fields of a line, which the caller must not change any more; this never waits."""

    def ended_by(self, shutdown: Shutdown) -> Shutdown:
        """Return vLLM's hook ``shutdown`` with the end of this log after it."""
        return shutdown


class RequestLog(Unlogged):
    """Writes the lines.

    Args:
        output: where they go.
        recorder: counts dropped lines.
    """

    def __init__(self, output: Output, recorder: Recorder) -> None:
        self._output = output
        self._recorder = recorder
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._rest = b""  # of a write
        self._torn = 0  # lines that only a part of was written; counted by the thread, and passed on by `put`
        self._counted_torn = 0
        self._is_over = Event()
        self._cores = cores_of_parent()
        self._thread = Thread(target=self._run, name="kvobs-request-log", daemon=True)
        self._thread.start()

    def wants(self, request_id: str) -> bool:
        return True

    def put(self, fields: Mapping[str, Any]) -> None:
        torn = self._torn
        dropped, self._counted_torn = torn - self._counted_torn, torn
        if len(self._waiting) < WAITING_AT_MOST:
            self._waiting.append(fields)
        else:
            dropped += 1
        self._recorder.count_own(_DROPPED, dropped)

    @contained("flush")
    def close(self) -> None:
        """Write what waits; for a second at most."""
        self._is_over.set()
        self._thread.join(CLOSING_S)
        if self._waiting:
            log.warning("%d lines of the request log %s were not written", len(self._waiting), self._output.name)

    def ended_by(self, shutdown: Shutdown) -> Shutdown:
        def shut_down() -> None:
            try:
                shutdown()
            finally:
                self.close()

        return shut_down

    # The thread

    def _run(self) -> None:
        with suppress(OSError):  # EngineCore's worker may have bound this process to the cores of the model
            os.sched_setaffinity(get_native_id(), self._cores)
        while not self._is_over.wait(EVERY_S):
            self._write()
        self._write()
        self._output.close()

    @contained("flush")
    def _write(self) -> None:
        """Write what waits, as far as that is possible now."""
        try:
            if self._output.refresh():
                self._drop_torn()
            while self._rest or self._waiting:
                self._rest = self._rest or self._next()
                self._rest = self._rest[self._output.write(self._rest) :]
        except OSError as error:
            once(
                f"request_log:{error.errno}",
                logging.WARNING,
                "the request log %s can't be written: %s. Serving is not affected; up to %d lines wait, further ones "
                "are dropped (kvobs_request_log_dropped_total)",
                line(self._output.name),
                error.strerror,
                WAITING_AT_MOST,
            )

    def _next(self) -> bytes:
        """Return the next lines for one write."""
        lines = b""
        while self._waiting:
            fields = self._waiting.popleft()  # first: one that can't be encoded must not come again
            encoded = json.dumps(fields).encode() + b"\n"
            if lines and len(lines) + len(encoded) > select.PIPE_BUF:
                self._waiting.appendleft(fields)
                break
            lines += encoded
        return lines

    def _drop_torn(self) -> None:
        """Drop the end of a line whose beginning is in the file before."""
        if self._rest:
            self._rest = self._rest.partition(b"\n")[2]
            self._torn += 1
