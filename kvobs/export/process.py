"""Run the exporter: serve the metrics of a server's engines on this host from their pages, and export their spans.

After engines that ended as they should the last numbers are served for one more scrape; after one that was killed or
crashed for ``LINGER_S``, so that its last seconds are seen.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from kvobs import faults
from kvobs.export import web_config
from kvobs.export.destinations import exporter_url
from kvobs.export.engine import Engine, Positions, engines_of, servers
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.http_server import Server
from kvobs.export.listening import LESS_OPEN, OPEN_TO_ALL, holder, is_reached_from_elsewhere
from kvobs.export.otlp_metrics import MetricsPush
from kvobs.export.span_export import make_converter
from kvobs.export.span_reading import SpanReading
from kvobs.export.status_page import StatusPage
from kvobs.export.totals import Exposition, Point, Totals
from kvobs.log import log, once
from kvobs.page import files
from kvobs.page.description import EngineInfo
from kvobs.page.layout import VERSION
from kvobs.schema import __version__, signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.signals import SIGNALS, Signal
from kvobs.telemetry.tracing.trace_context import is_disabled

TICK_S, BETWEEN_SPANS_S = 1.0, 0.25
PORT_RETRY_S = 0.5
LINGER_S = 15.0
"""How long the last numbers are served after an engine that did not end as it should."""
AFTER_SIGTERM_S = 5.0
"""How long an exporter that is asked to end waits for its engines to end, which are mostly asked at the same time."""
_ERRORS = signals.slots(signals.INTERNAL_ERRORS)


class Served(NamedTuple):
    """An engine whose metrics are served."""

    engine: Engine
    watch: EngineWatch
    totals: Totals


@dataclass(frozen=True)
class State:
    """What an exporter leaves for the next one of the same engines, in the file of its lock."""

    version: int = VERSION
    pid: int = 0
    url: str | None = None
    positions: Positions = field(default_factory=dict)
    counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Its own, by an engine's name and slot."""

    @classmethod
    def read(cls, lock: files.Lock) -> State:
        """Return what an earlier exporter has left; nothing if that was cut off, or is of another version."""
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            state = msgspec.json.decode(lock.read(), type=cls)
            slots = range(signals.PROCESS_WIDTH)
            if state.version == VERSION and all(slot in slots for own in state.counts.values() for slot in own):
                return state
        return cls()


class Exporter:
    """The exporter of the engines of a server on this host, whose ``lock`` it has.

    One that ``outlives`` the engine which started it closes that engine's stderr with it.
    """

    def __init__(self, server: str, options: ExporterOptions, lock: files.Lock, *, outlives: bool = False) -> None:
        self._server, self._options, self._lock, self._outlives = server, options, lock, outlives
        self._served: dict[str, Served] = {}
        self._ended: set[str] = set()  # of these, those that have ended
        self._exposition = Exposition(self._totals, self._refresh)
        self._status = StatusPage(self._totals, options)
        self._dropped = 0
        self._spans: SpanReading | None = None
        self._push: MetricsPush | None = None
        self._http: Server | None = None
        self._began, self._bind_at = time.monotonic(), 0.0
        self._scrapes: tuple[float, ...] = ()  # when the last were; replaced as a whole, by the thread that serves
        self._before = self._kept = State.read(lock)
        self._counted = deque[tuple[Totals, int, int]]()  # what is not shown yet, by any thread
        self._end_at: float | None = None

    def run(self) -> bool:
        """Serve until the engines are gone, or it is asked to end; return whether they are gone."""
        ticked = -TICK_S
        while True:
            if time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self._tick()
                if self._is_over() or not self._has_engine():
                    break
            self._export_spans()
            time.sleep(BETWEEN_SPANS_S)
        is_gone = not self._has_engine()
        self._note_ends()  # of those that have ended since the last look
        self._close(lingers=is_gone)
        return is_gone

    def ask_to_end(self, *_: Any) -> None:
        """End soon, after the engines if they end: a handler of signals."""
        self._end_at = time.monotonic() + AFTER_SIGTERM_S

    @property
    def is_asked_to_end(self) -> bool:
        return self._end_at is not None

    def _is_over(self) -> bool:
        return self._end_at is not None and time.monotonic() >= self._end_at

    def _has_engine(self) -> bool:
        return any(served.engine.is_alive for served in self._served.values())

    def _totals(self) -> Iterable[Totals]:
        return [served.totals for served in tuple(self._served.values())]

    # What is due

    @faults.contained("read")
    def _tick(self) -> None:
        self._find()
        self._status.sample()
        self._note_ends()
        if self._http is None and self._options.port is not None and time.monotonic() >= self._bind_at:
            self._bind(self._options.port)
        if self._push is None and self._options.otlp_metrics and self._served and not is_disabled():
            self._begin_push()
        for where, n in faults.take().items():
            self._count(_ERRORS[where], n)
        self._keep()

    def _url(self) -> str | None:
        options = self._options
        return exporter_url(options.host, options.port, options.web_config) if options.port is not None else None

    def _find(self) -> None:
        """Find the engines that have begun since, and their processes."""
        for name in engines_of(self._server):
            if name not in self._served:
                engine = Engine(name, self._before.positions)
                engine.find()
                if engine.info is not None:
                    watch = EngineWatch(engine)
                    totals = Totals(engine, watch, own=self._before.counts.get(name))
                    self._served[name] = Served(engine, watch, totals)
                    self._trace(engine.info)
        for served in self._served.values():
            served.engine.find()

    @faults.contained("read")
    def _note_ends(self) -> None:
        """Note why the engines that have ended since then ended: others may continue."""
        for served in self._served.values():
            if served.engine.name not in self._ended and not served.engine.is_alive:
                self._ended.add(served.engine.name)
                self._exposition.forget()  # its text shows that the engine is up
                if not served.engine.has_ended_well:
                    served.watch.ended()

    @faults.contained("export")
    def _trace(self, info: EngineInfo) -> None:
        """Begin to export spans, if the engine is traced."""
        if self._spans is None and info.has_spans:
            converter = make_converter(info.endpoint, info.model, self._drop_spans)
            self._spans = SpanReading(converter, self._count_for, self._keep)

    def _begin_push(self) -> None:
        heads = [served.engine.head for served in self._served.values()]
        began_ns = min(head.began_ns for head in heads if head is not None)
        try:
            self._push = MetricsPush(self._series, began_ns)
        except Exception as error:
            once("otlp", logging.ERROR, "the metrics are not sent by OTLP: %s", error)
            return
        if self._before.positions:
            self._push.take_as_sent()
        self._push.start()

    def _series(self) -> Iterator[tuple[Signal, list[Point]]]:
        self._refresh()
        engines = [dict(totals.series()) for totals in self._totals()]
        return ((metric, [point for points in engines for point in points[metric]]) for metric in SIGNALS)

    @faults.contained("export")
    def _export_spans(self, *, is_last: bool = False) -> None:
        if self._spans is not None:
            export = self._spans.finish if is_last else self._spans.go_on
            others = [served.engine for served in self._served.values() if not self._exports(served.engine)]
            for engine in others:
                engine.skip_spans()  # not to be sent again if the API server ends first
            export([served.totals for served in self._served.values() if served.engine not in others])

    def _exports(self, engine: Engine) -> bool:
        """Return whether the spans of an engine are exported here, and not by vLLM's API server."""
        if engine.info is None or not engine.info.has_spans:
            return False
        return not files.is_held(files.folder(), engine.name.removesuffix("-") + files.COLLECTOR)

    def _drop_spans(self, where: str, n: int) -> None:
        self._dropped += n
        self._count(signals.slot(signals.SPANS_DROPPED, where), n)

    def _count(self, slot: int, n: int) -> None:
        """Count what is of no engine alone for the first one."""
        for totals in self._totals():
            self._count_for(totals, slot, n)
            break

    def _count_for(self, totals: Totals, slot: int, n: int) -> None:
        self._counted.append((totals, slot, n))

    def _keep(self) -> None:
        """Write down which spans were read and what was counted here, and show it then: no count falls after a kill."""
        counted = [self._counted.popleft() for _ in range(len(self._counted))]
        own = {served.engine.name: served.totals.own for served in self._served.values()}
        for totals, slot, n in counted:
            own[totals.engine.name][slot] += n
        positions = {name: at for served in self._served.values() for name, at in served.engine.positions().items()}
        state = State(pid=os.getpid(), url=self._url(), positions=positions, counts=own)
        if state != self._kept:
            self._kept = state
            text = "the exporter can't save how far it has read: %s. After a restart it sends some spans twice"
            with files.reported(text):
                self._lock.write(msgspec.json.encode(state))
        for totals, slot, n in counted:
            totals.count(slot, n)

    def _bind(self, port: int) -> None:
        options = self._options
        tls = partial(web_config.context, options.web_config) if options.web_config is not None else None
        try:
            self._http = Server(options.host, port, self._text, self._health, tls, status=self._status.html)
        except OSError as error:
            now = time.monotonic()
            self._bind_at = now + PORT_RETRY_S
            found, fix = error.strerror or str(error), "correct this in kvobs.exporter"
            if error.errno == errno.EADDRINUSE:
                if now < self._began + LINGER_S:
                    return  # the exporter of engines that are gone may have it, and ends soon
                found, fix = f"{found}, held by {holder(port)}", "set kvobs.exporter.port to a free one"
            text = (
                "the exporter can't listen on %s:%d: %s. Serving is not affected, but kvobs's metrics are missing "
                "until it can. Fix: %s"
            )
            once("port", logging.WARNING, text, options.host, port, found, fix)
            self._bind_at += 10 * PORT_RETRY_S
            return
        log.info("kvobs's metrics are at %s", self._url())
        if options.web_config is None and is_reached_from_elsewhere(options.host):
            log.warning("kvobs's metrics are open at port %d: %s. Fix: %s", port, OPEN_TO_ALL, LESS_OPEN)

    # What is served

    def _text(self, accept: str) -> tuple[str, bytes]:
        self._scrapes = (*self._scrapes[-7:], time.monotonic())
        if any(not served.engine.is_alive for name, served in tuple(self._served.items()) if name not in self._ended):
            self._exposition.forget()  # the text of a moment ago shows an engine that has ended since
        return self._exposition.text(accept)

    def _refresh(self) -> None:
        """Bring the exporter's own gauges up to date."""
        for served in tuple(self._served.values()):
            served.totals.set_gauge(signals.ENGINE_UP, int(served.engine.is_alive))
            if self._spans is not None and served.engine.has_core:
                served.totals.set_gauge(signals.SPANS_QUEUED, self._spans.converter.queued)

    def _health(self) -> tuple[bool, dict[str, Any]]:
        engines = [
            {
                "engine": info.index,
                "state": "alive" if served.engine.is_alive else "gone",
                "pid": head.pid,
                "processes": served.watch.states(),
            }
            for served in tuple(self._served.values())
            if (head := served.engine.head) is not None and (info := head.engine)
        ]
        is_up = any(engine["state"] == "alive" for engine in engines)
        queued = self._spans.converter.queued if self._spans is not None else 0
        state = {"engines": engines, "spans_queued": queued, "spans_dropped": self._dropped, "version": __version__}
        return is_up, state

    # The end

    def _close(self, *, lingers: bool) -> None:
        """Export what is left, serve the last numbers for a while, and end."""
        is_well = all(served.engine.has_ended_well for served in self._served.values())
        ended = time.monotonic()
        self._export_spans(is_last=lingers)
        if self._spans is not None:
            self._spans.converter.close()
        self._keep()
        if self._push is not None:
            self._push.close()
        if self._outlives:
            _let_go_of_stderr()
        if self._http is None:
            return
        gap = self._longest_gap()
        wanted = LINGER_S if not is_well else min(LINGER_S, gap * 1.5)
        readers = sum(at > ended - gap * 1.1 for at in self._scrapes)  # more than one may scrape it
        while lingers and time.monotonic() - ended < wanted and not self._is_over():
            if is_well and 0 < readers <= sum(at > ended for at in self._scrapes):
                time.sleep(0.1)  # for the answer to get out
                break
            time.sleep(0.05)
        self._http.close()

    def _longest_gap(self) -> float:
        """Return the longest time between the last scrapes, as far as it is known."""
        gaps = [after - before for before, after in pairwise(self._scrapes)]
        return max(gaps, default=LINGER_S if self._scrapes else 0.0)


def lock_of(server: str) -> files.Lock:
    """Return the lock of a server's exporter, which another process may have."""
    return files.Lock(files.folder(), f"{server}{files.EXPORTER}")


def serve(server: str, options: ExporterOptions, lock: files.Lock, *, outlives: bool = False) -> bool:
    """Serve a server's engines until they are gone; return False if it was asked to end before."""
    exporter = Exporter(server, options, lock, outlives=outlives)
    signal.signal(signal.SIGTERM, exporter.ask_to_end)
    are_gone = exporter.run()
    lock.release(remove=are_gone)  # else the next exporter reads there what this one has exported
    return not exporter.is_asked_to_end


def await_server() -> tuple[str, files.Lock]:
    """Return the server that began last of those that no exporter serves, once one has an engine that runs."""
    while True:
        for server in reversed(servers()):
            engines = [Engine(name) for name in engines_of(server)]
            for engine in engines:
                engine.find()
            if any(engine.is_alive for engine in engines):
                lock = lock_of(server)
                if lock.is_mine:
                    return server, lock
                lock.release()
                text = (
                    "another exporter already serves the engines of a server; this one takes over when that one exits"
                )
                once(f"taken:{server}", logging.WARNING, text)
        time.sleep(TICK_S)


def _let_go_of_stderr() -> None:
    """Close the engine's stderr, so that its reader sees EOF when the engine exits."""
    if sys.stderr is None:  # the engine had none
        return
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())
