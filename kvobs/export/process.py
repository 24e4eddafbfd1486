"""Run the exporter: read the engine's messages until it ends, serve their totals, export their spans.

The engine's end is the end of the socket, or of its process: a child that it forked keeps the socket open. After an
engine that said goodbye the last numbers are served for one more scrape; after one that was killed or crashed, for
``linger_s``, so that its last seconds are seen.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from kvobs import faults
from kvobs.export import web_config
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.http_server import LESS_OPEN, OPEN_TO_ALL, Server, holder, is_reached_from_elsewhere
from kvobs.export.otlp_metrics import MetricsPush
from kvobs.export.span_export import make_cutter
from kvobs.export.totals import Exposition, Totals
from kvobs.log import log, once
from kvobs.probe.increments import Increments
from kvobs.schema import __version__, signals
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import EngineInfo, exporter_url
from kvobs.telemetry.tracing.trace_context import is_disabled
from kvobs.vllm_api.proc import start_time

TICK_S = 1.0
"""Time between two calls of ``_tick`` while the engine sends nothing."""
PORT_RETRY_S = 0.5
AFTER_SIGTERM_S = 5.0
"""How long an exporter that is asked to end waits for its engine to end, which is asked at the same time mostly."""
READ = 1 << 16  # bytes
FIRST_LINES = 3
"""The engine, its totals, and what it has counted since it sent them: without these the counters would be low."""


class Exporter:
    """The exporter of one engine, whose first message came over this ``channel``."""

    def __init__(self, channel: socket.socket, engine: EngineInfo) -> None:
        self._channel = channel
        self._engine = engine
        self._started = start_time(engine.pid)
        self._watch = EngineWatch(engine)
        self._totals = Totals(engine, self._watch)
        self._exposition = Exposition(self._totals, self._refresh)
        self._counts = Counter[int]()  # slot -> what was counted here since it was sent to the engine
        self._dropped = Counter[str]()
        self._dropped_sum = 0
        make = faults.contained("cut")(make_cutter)
        self._cutter = make(engine.endpoint, engine.model, self._drop_spans) if engine.has_spans else None
        self._push = self._make_push() if engine.otlp_metrics and not is_disabled() else None
        self._server: Server | None = None
        self._began, self._bind_at = time.monotonic(), 0.0
        self._scrapes: tuple[float, ...] = ()  # when the last were; replaced as a whole, by the thread that serves
        self._last_payload_s = engine.began_ns / 1e9
        self._is_up = True
        self._said_goodbye = False
        self._end_at: float | None = None

    def _make_push(self) -> MetricsPush | None:
        try:
            return MetricsPush(self._totals, self._refresh, self._engine.began_ns)
        except Exception as error:
            log.error("the metrics are not sent by OTLP: %s", error)
            return None

    def _drop_spans(self, where: str, n: int) -> None:
        self._dropped[where] += n
        self._dropped_sum += n

    def run(self, rest: bytes) -> None:
        """Serve until the engine is gone; ``rest`` is what came after its first line."""
        signal.signal(signal.SIGTERM, self._asked_to_end)
        if self._push is not None:
            self._push.start()
        with suppress(OSError):  # the engine has ended: its lines are there all the same
            self._channel.sendall(wire.to_line({"pid": os.getpid()}))
        for line in lines(self._channel, rest, self._tick):
            self._apply(line)
            if self._said_goodbye:
                break
        if self._is_over() and not self._said_goodbye and self._engine_runs():
            self._channel.close()  # upon which the engine starts another one
            self._close(lingers=False)
            return
        self._is_up = False
        self._close()

    def _engine_runs(self) -> bool:
        return self._started in (None, start_time(self._engine.pid))

    def _is_over(self) -> bool:
        return self._said_goodbye or (self._end_at is not None and time.monotonic() >= self._end_at)

    def _asked_to_end(self, *_: Any) -> None:
        self._end_at = time.monotonic() + AFTER_SIGTERM_S

    @faults.contained("apply")
    def _apply(self, line: bytes) -> None:
        message = wire.from_line(line)
        if message.get("bye"):
            self._said_goodbye = True
            return
        begin = time.perf_counter_ns()
        if not wire.is_ours(message):
            once("version", logging.ERROR, "the engine runs another version of kvobs: its numbers are not recorded")
            self._count(signals.INTERNAL_ERRORS, "version", 1)
            return
        taken = wire.read(message)
        self._totals.add(taken)
        if message.get("is_total") and self._push is not None:
            self._push.take_as_sent()
        applied = time.perf_counter_ns()
        if self._cutter is not None and taken.spans:
            for record in self._cutter.cut(taken.spans, self._engine.index):
                self._totals.mark(record, time.time())
            self._count(signals.SELF_SECONDS, "cut", time.perf_counter_ns() - applied)
        # An equal one is what was counted here; an earlier one comes after the clock was put back.
        if (payload_s := message.get("payload_s", 0.0)) not in (0.0, self._last_payload_s):
            self._last_payload_s = payload_s
            self._count(signals.SELF_SECONDS, "apply", applied - begin)

    def _tick(self) -> bool:
        """Do all that is due; return whether to go on reading."""
        if self._server is None and self._engine.port is not None and time.monotonic() >= self._bind_at:
            self._bind(self._engine, self._engine.port)
        self._send_counts()
        return not self._is_over() and self._engine_runs()

    # What the exporter counts itself goes to the engine, and comes back with its numbers

    def _count(self, signal_: signals.Signal, where: str, n: int) -> None:
        self._counts[signals.slot(signal_, where)] += n

    def _send_counts(self) -> None:
        for where in list(self._dropped):
            self._count(signals.SPANS_DROPPED, where, self._dropped.pop(where))
        for where, n in faults.take().items():
            self._count(signals.INTERNAL_ERRORS, where, n)
        if not self._counts:
            return
        # A new line, whatever got out before.
        line = b"\n" + wire.to_line(wire.message(Increments(self._counts, [], {})))
        with suppress(OSError):
            if self._channel.send(line, socket.MSG_DONTWAIT) == len(line):
                self._counts.clear()
            # Part of a line is of no use to the engine, which leaves it out with the next one.

    def _bind(self, engine: EngineInfo, port: int) -> None:
        tls = partial(web_config.context, engine.web_config) if engine.web_config is not None else None
        try:
            self._server = Server(engine.host, port, self._text, self._health, tls)
        except OSError as error:
            now = time.monotonic()
            self._bind_at = now + PORT_RETRY_S
            found, fix = error.strerror or str(error), "correct this in kvobs.exporter"
            if error.errno == errno.EADDRINUSE:
                if now < self._began + engine.linger_s:
                    return  # the exporter of an engine that is gone may have it, which ends by itself
                found, fix = f"{found}, held by {holder(port)}", "set kvobs.exporter.port to a free one"
            text = (
                "the exporter can't listen on %s:%d: %s. The engine serves, without kvobs's metrics until it can. "
                "Fix: %s"
            )
            once("port", logging.WARNING, text, engine.host, port, found, fix)
            self._bind_at += 10 * PORT_RETRY_S
            return
        log.info("kvobs's metrics are at %s", exporter_url(engine.host, port, engine.web_config))
        if engine.web_config is None and is_reached_from_elsewhere(engine.host):
            log.warning("kvobs's metrics at port %d: %s. Fix: %s", port, OPEN_TO_ALL, LESS_OPEN)

    def _text(self, accept: str) -> tuple[str, bytes]:
        self._scrapes = (*self._scrapes[-7:], time.monotonic())
        return self._exposition.text(accept)

    def _refresh(self) -> None:
        """Bring the exporter's own gauges up to date."""
        self._totals.set_exporter_gauge(signals.ENGINE_UP, int(self._is_up))
        if self._engine.has_core:
            self._totals.set_exporter_gauge(signals.LAST_PAYLOAD, self._last_payload_s)
            if self._engine.has_spans:  # without it nothing is traced
                self._totals.set_exporter_gauge(signals.SPANS_QUEUED, self._queued)

    @property
    def _queued(self) -> int:
        return self._cutter.queued if self._cutter is not None else 0

    def _health(self) -> tuple[bool, dict[str, Any]]:
        state: dict[str, Any] = {
            "engine": "alive" if self._is_up else "gone",
            "engine_pid": self._engine.pid,
            "processes": self._watch.states(),
            "version": __version__,
        }
        if self._engine.has_core:
            state |= {
                "seconds_since_last_payload": round(time.time() - self._last_payload_s, 3),
                "spans_queued": self._queued,
                "spans_dropped": self._dropped_sum,
            }
        return self._is_up, state

    # The end

    def _close(self, *, lingers: bool = True) -> None:
        """Send what waits, serve the last numbers for a while, and end."""
        self._exposition.forget()  # it says that the engine is up
        if not self._is_over():
            self._watch.ended()
        ended = time.monotonic()
        if self._cutter is not None:
            self._cutter.close()
        if self._push is not None:
            self._push.close()
        _let_go_of_stderr()
        if self._server is None:
            return
        gap = self._longest_gap()
        wanted = self._engine.linger_s if not self._said_goodbye else min(self._engine.linger_s, gap * 1.5)
        readers = sum(at > ended - gap * 1.1 for at in self._scrapes)  # more than one may scrape it
        while lingers and time.monotonic() - ended < wanted:
            if self._said_goodbye and 0 < readers <= sum(at > ended for at in self._scrapes):
                time.sleep(0.1)  # for the answer to get out
                break
            time.sleep(0.05)
        self._server.close()

    def _longest_gap(self) -> float:
        """Return the longest time between the last scrapes, as far as it is known."""
        gaps = [after - before for before, after in pairwise(self._scrapes)]
        return max(gaps, default=self._engine.linger_s if self._scrapes else 0.0)


def lines(channel: socket.socket, rest: bytes, tick: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the lines of a socket to its end, and call ``tick`` after the first ones and then about once a second.

    When it returns False, only what has come already is still read.
    """
    channel.settimeout(TICK_S)
    unread, ticked = rest, -TICK_S
    while True:
        *whole, unread = unread.split(b"\n")
        yield from whole
        if time.monotonic() - ticked >= TICK_S:
            ticked = time.monotonic()
            if not tick():
                channel.setblocking(False)
        try:
            data = channel.recv(READ)
        except TimeoutError:
            continue
        except OSError:
            return
        if not data:
            return
        unread += data


def first_lines(channel: socket.socket) -> tuple[EngineInfo, bytes]:
    """Read the engine's first lines; return the engine, and what came after the line that introduces it.

    Raises:
        ValueError: the engine has ended, or sent other lines.
    """
    data = b""
    while data.count(b"\n") < FIRST_LINES:
        if not (more := channel.recv(READ)):
            raise ValueError("the engine ended before its first lines")
        data += more
    line, _, rest = data.partition(b"\n")
    return msgspec.convert(wire.from_line(line), EngineInfo), rest


def _let_go_of_stderr() -> None:
    """Close the engine's stderr, so that its reader sees EOF when the engine exits."""
    if sys.stderr is None:  # the engine had none
        return
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())
