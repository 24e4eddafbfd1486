"""Feed the exporter from EngineCore, and keep it running: payloads go out by a thread, never within a step.

The thread keeps the totals of all numbers sent. An exporter that ended is started again after a back-off, and gets them
first, so that no counter falls. While it does not read, numbers are added up; spans are limited, and lost ones counted.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread, get_native_id
from typing import TYPE_CHECKING

import vllm

from kvobs import faults
from kvobs.export import destinations
from kvobs.log import log
from kvobs.probe.black_box import Identity
from kvobs.probe.increments import Group, Increments
from kvobs.probe.native import choice
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions, Options
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.wire import ConnectorInfo, EngineInfo
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.vllm_api import versions
from kvobs.vllm_api.proc import cores_of_parent, launch, name_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.connectors.specs import ChildSpec

SPANS_WAITING = 2048
"""Groups of span records that wait for an exporter that does not read."""
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
WELL_AFTER_S = 120.0
"""An exporter that has run so long is started again without delay."""
IDLE_S, BUSY_S = 1.0, 0.05
"""Between looks at the exporter: while there is nothing to send, and while it does not take what there is."""
CLOSING_S = 1.0
START_S = 60.0
READ = 1 << 16  # bytes

_DROPPED = signals.slot(signals.SPANS_DROPPED, "queue")


def describe_engine(vllm_config: VllmConfig, specs: Sequence[ChildSpec], options: Options, server: int) -> EngineInfo:
    """Return what an engine's metrics say about it; ``server`` is the process id of its API server."""
    return EngineInfo(
        pid=os.getpid(),
        began_ns=time.time_ns(),
        model=versions.model_name(vllm_config),
        index=versions.engine_place(vllm_config).number,
        connectors=tuple(
            ConnectorInfo(
                spec.name,
                spec.connector_class.__name__,
                str(spec.transfer_config.kv_role),
                options.link_gbps.get(spec.name),
            )
            for spec in specs
        ),
        load_policy=options.load_policy,
        failure_policy=str(getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", None) or ""),
        vllm_version=vllm.__version__,
        is_native=choice().is_native,
        pages=Identity.of(vllm_config).pages(),
        ranks=tuple(range(vllm_config.parallel_config.world_size)),
        launch=launch(server),
    )


def with_exporter(
    engine: EngineInfo, vllm_config: VllmConfig, exporter: ExporterOptions, tracing: TracingSettings | None
) -> EngineInfo:
    """Return the engine with what its exporter is to do."""
    return replace(
        engine,
        host=exporter.host,
        port=None if exporter.port is None else exporter.port + versions.engine_place(vllm_config).on_host,
        web_config=exporter.web_config,
        otlp_metrics=exporter.otlp_metrics,
        has_spans=tracing is not None,
        endpoint=tracing.endpoint if tracing is not None else None,
    )


def feed_of(
    vllm_config: VllmConfig, specs: Sequence[ChildSpec], options: Options, tracing: TracingSettings | None
) -> Feed | None:
    """Return the way to the exporter; None if it does not run, or can't be made. Log where the metrics are."""
    try:
        setup = destinations.Setup.of_engine(options, vllm_config)
        describe = partial(describe_engine, vllm_config, specs, options, os.getppid())
        return feed_to(setup, vllm_config, describe, tracing)
    except Exception:
        faults.contain("flush")
        return None


def feed_to(
    setup: destinations.Setup,
    vllm_config: VllmConfig,
    describe: Callable[[], EngineInfo],
    tracing: TracingSettings | None = None,
) -> Feed | None:
    """Return the way to the exporter of a set-up, None if there is none; log where the metrics are, or what is lost."""
    exporter = setup.running
    engine = with_exporter(describe(), vllm_config, exporter, tracing) if exporter is not None else None
    destinations.announce(setup, engine)
    return None if engine is None else Feed(engine)


class Feed:
    """Sends an engine's payloads to its exporter; each exporter's first message is the ``engine``."""

    def __init__(self, engine: EngineInfo) -> None:
        self._engine = engine
        self._queue: SimpleQueue[KvobsStats | None] = SimpleQueue()
        self._sent = Increments.none()
        self._waiting = Increments.none()
        self._spans: list[Group] = []  # that wait
        self._payload_s = 0.0  # when the last payload came
        self._exporter: _RunningExporter | None = None
        self._starts = 0  # since it last ran well
        self._start_at = 0.0
        self._is_over = False
        self._ends_well = True
        self._cores = cores_of_parent()
        self._thread = Thread(target=self._run, name="kvobs-feed", daemon=True)
        self._thread.start()

    def put(self, stats: KvobsStats) -> None:
        """Hand over a payload, which the caller must not use any more; this never waits."""
        self._queue.put(stats)

    def close(self, *, is_well: bool = True) -> None:
        """Send what waits, and let the exporter end; for a second at most.

        Args:
            is_well: whether the engine ends by itself; else the exporter serves the last numbers for a while.
        """
        self._ends_well = is_well
        self._queue.put(None)
        self._thread.join(CLOSING_S)

    # The thread

    def _run(self) -> None:
        with suppress(OSError):  # EngineCore's worker may have bound this process to the cores of the model
            os.sched_setaffinity(get_native_id(), self._cores)
        while not self._is_over:
            try:
                self._take_in()
                self._keep_running()
                self._send()
            except Exception:
                self._stop()
                faults.contain("flush")
        self._say_goodbye()

    def _take_in(self) -> None:
        """Wait for payloads, and add them up."""
        is_busy = self._exporter is not None and self._exporter.has_unsent
        with suppress(Empty):
            stats = self._queue.get(timeout=BUSY_S if is_busy else IDLE_S)
            while stats is not None:
                self._add(stats)
                stats = self._queue.get_nowait()
            self._is_over = True

    @faults.contained("flush")
    def _add(self, stats: KvobsStats) -> None:
        taken, self._payload_s = stats.increments(), time.time()
        self._waiting.add(taken)
        self._spans += taken.spans
        if len(self._spans) > SPANS_WAITING:
            lost = sum(map(len, self._spans[SPANS_WAITING:]))
            del self._spans[SPANS_WAITING:]
            self._waiting.add(Increments({_DROPPED: lost}, [], {}))

    def _keep_running(self) -> None:
        """Start the exporter, again if it has ended."""
        now = time.monotonic()
        if self._exporter is None:
            if now >= self._start_at:
                self._start(now)
            return
        for counted in self._exporter.read():
            self._waiting.add(counted)  # is part of the totals
        if self._exporter.has_ended:
            if now - self._exporter.started > WELL_AFTER_S:
                self._starts = 1
            pid = f" (pid {self._exporter.pid})" if self._exporter.pid else ""
            why = f": {name_of(self._exporter.status)}" if self._exporter.status is not None else ""
            self._stop()
            self._announce(f"kvobs's exporter{pid} has ended{why}")

    def _announce(self, what: str) -> None:
        """Log the end of an exporter, while it is started again quickly."""
        if self._starts <= len(BACK_OFF_S):
            log.error("%s. It is started again in %g s, and no count is lost", what, self._back_off_s)

    def _start(self, now: float) -> None:
        self._starts += 1
        self._start_at = now + self._back_off_s
        try:
            self._exporter = _RunningExporter(now)
        except (OSError, subprocess.SubprocessError) as error:
            self._announce(f"kvobs's exporter can't be started: {str(error).rstrip('.')}")
            return
        self._exporter.add(wire.to_line(asdict(self._engine)))
        self._exporter.add(wire.to_line({**wire.message(self._sent), "is_total": True}))
        self._hand_over(self._exporter)  # the exporter serves nothing before it has these three lines

    def _stop(self) -> None:
        if self._exporter is not None:
            self._exporter.kill()
            self._exporter = None
            self._start_at = time.monotonic() + self._back_off_s

    @property
    def _back_off_s(self) -> float:
        return BACK_OFF_S[min(self._starts, len(BACK_OFF_S)) - 1]

    def _send(self) -> None:
        if self._exporter is None:
            return
        if not self._exporter.has_unsent and (any(self._waiting) or self._spans):
            self._hand_over(self._exporter)
        self._exporter.write()

    def _hand_over(self, exporter: _RunningExporter) -> None:
        """Pass on what waits; from now on it is part of the totals."""
        message = wire.message(self._waiting._replace(spans=self._spans))
        exporter.add(wire.to_line({**message, "payload_s": self._payload_s}))
        self._sent.add(self._waiting)
        self._waiting, self._spans = Increments.none(), []

    def _say_goodbye(self) -> None:
        """Send the rest, without waiting long."""
        if self._exporter is None:
            return
        try:
            deadline = time.monotonic() + CLOSING_S * 0.8
            self._hand_over(self._exporter)
            if self._ends_well:
                self._exporter.add(wire.to_line({"bye": True}))
            self._exporter.write()
            while self._exporter.has_unsent and time.monotonic() < deadline:
                time.sleep(0.01)
                self._exporter.write()
        except Exception:
            faults.contain("flush")
        finally:
            self._exporter.close()


class _RunningExporter:
    """A running exporter, and the socket to it."""

    def __init__(self, now: float) -> None:
        self.started = now
        self.pid: int | None = None
        self.status: int | None = None
        """How it has ended, as from ``wait``."""
        self.has_ended = False
        self._unsent = bytearray()
        self._unread = b""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            # In another session: Ctrl-C in the engine's terminal is for the engine, whose end is the exporter's.
            # What is started here forks, and ends at once: the socket shows how long the exporter lives.
            # It closes the engine's files itself: thousands of them here would take milliseconds with the GIL held.
            os.set_inheritable(theirs.fileno(), True)
            try:
                subprocess.run(
                    [sys.executable, "-P", "-m", "kvobs.export", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    close_fds=False,
                    start_new_session=True,
                    env=_environment(),
                    check=True,
                    timeout=START_S,
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def has_unsent(self) -> bool:
        """Whether it has not read all that was sent."""
        return bool(self._unsent)

    def add(self, data: bytes) -> None:
        """Send this after all before it."""
        self._unsent += data

    def write(self) -> None:
        """Send as much as it takes now."""
        while self._unsent:
            try:
                n = self._socket.send(self._unsent)
            except OSError:  # it does not read, or has ended
                return
            del self._unsent[:n]

    def read(self) -> list[Increments]:
        """Return the numbers that it has counted itself."""
        try:
            data = self._socket.recv(READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        counted = []
        for text in lines:
            with suppress(ValueError):
                message = wire.from_line(text)
                self.pid, self.status = message.get("pid", self.pid), message.get("status", self.status)
                counted.append(wire.read(message))
        self.has_ended = not data or self.status is not None
        return counted

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._socket.close()
        if self.pid is not None and not self.has_ended:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket, upon which it ends by itself."""
        self._socket.close()


def _environment(package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Return the environment in which the exporter finds kvobs, wherever this process has found it.

    Python finds installed packages by itself; on PYTHONPATH they would stand before its own modules.
    """
    environ = dict(os.environ)
    if package.parent.name not in ("site-packages", "dist-packages"):
        paths = [str(package.parent), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ
