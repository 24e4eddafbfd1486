"""Exporters and engines as processes: forked, since to import vLLM takes long, or as an engine starts them."""

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from kvobs.export.process import lock_of, serve
from kvobs.export.totals import FRESH_S
from kvobs.page import files, writer
from kvobs.page.description import Identity
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.schema import signals
from kvobs.schema.options import ExporterOptions
from kvobs.schema.signals import slot, word
from kvobs.schema.spans import Reason
from kvobs.testing.server import claim_port, parse_metrics
from tests.support.contexts import record
from tests.support.waiting import eventually
from tests.support.watched import config
from tests.support.written import engine

HIT = word(0, slot(signals.LOOKUPS, "hit"))
HITS = ("kvobs_lookups_total", "connector", "one", "outcome", "hit")
LOAD = word(0, slot(signals.LOAD_DURATION, "async"))


class Page:
    """What an exporter serves at a port."""

    def __init__(self, port: int | None = None) -> None:
        self.port = port or claim_port(0)

    def get(self, path: str = "/metrics", accept: str = "text/plain") -> str:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.read().decode()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the content of /healthz."""
        try:
            return 200, json.loads(self.get("/healthz"))
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def counters(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return all that may only grow."""
        ends = ("_total", "_bucket", "_count", "_sum")
        return {
            (s.name, frozenset(s.labels.items())): s.value for s in parse_metrics(self.get()) if s.name.endswith(ends)
        }

    def value(self, name: str, *labels: str) -> float:
        wanted = dict(zip(labels[::2], labels[1::2], strict=True)).items()
        return sum(s.value for s in parse_metrics(self.get()) if s.name == name and wanted <= s.labels.items())

    def hits(self, engine: int = 0) -> float:
        return self.value(*HITS, "engine", str(engine))


def end(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a process that was forked here a signal, and wait for its end."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def has_ended(pid: int) -> bool:
    """Return whether a process that was forked here has ended."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def fork(run: Callable[[], Any]) -> int:
    """Run this in a fork; return its process id."""
    if pid := os.fork():
        return pid
    with suppress(BaseException):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        run()
    os._exit(0)


@contextmanager
def exporter(server: str, **options: Any) -> Iterator[int]:
    """Run an exporter in a fork."""
    pid = fork(lambda: serve(server, ExporterOptions(**options), lock_of(server)))
    try:
        yield pid
    finally:
        end(pid)


_AS_AN_ENGINE_DOES = """if True:
    import sys
    from pathlib import Path
    from kvobs.export.__main__ import main
    from kvobs.page import files
    files.folder = lambda: Path(sys.argv[2])
    sys.exit(main())
"""


def started(server: str, **options: Any) -> tuple[int, str]:
    """Start an exporter as an engine does, and return once it has its lock, or another one has it: its code and log."""
    given = json.dumps({"server": server, **options})
    command = [sys.executable, "-P", "-c", _AS_AN_ENGINE_DOES, given, str(files.folder())]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=log, timeout=120, check=False)
        log.seek(0)
        return done.returncode, log.read()


def state_of(server: str) -> dict[str, Any]:
    """Return what an exporter has left in the file of its lock."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((files.folder() / f"{server}{files.EXPORTER}").read_bytes())
        return found
    return {}


class Writing:
    """A process of an engine that counts, and writes spans: each is its number, and every third one is of a slow load.

    They are written at this rate, until it is told to stop; then it stays, as an idle engine does.
    """

    _NUMBERS = struct.Struct("qqq")  # the spans written, 1 to write more, and 1 once the last one is written

    def __init__(self, per_second: float = 100, at_once: int = 0, index: int = 0, **info: Any) -> None:
        self.engine_id = f"engine-{uuid4()}"
        self._config = config(self.engine_id)
        self.server = Identity.of(self._config).server
        self._shared = mmap.mmap(-1, self._NUMBERS.size)
        self._shared[:] = self._NUMBERS.pack(0, 1, 0)
        self._info = engine(has_spans="endpoint" in info, **info)
        self.pid = fork(lambda: self._write(per_second, at_once))
        eventually(lambda: os.listdir(files.folder()) and self.n > at_once)

    def _write(self, per_second: float, at_once: int) -> None:
        page = writer.begin(self._config, writer.describe(self._info, None))
        signal.signal(signal.SIGTERM, lambda *_: (page.close(), os._exit(0)))
        while True:
            n, writes, _ = self._NUMBERS.unpack(self._shared[:])
            if writes:
                is_slow = n % 3 == 0
                one = record("kv.load", span_id=f"{n + 1:016x}", reason=Reason.SLOW if is_slow else Reason.PARENT)
                page.spans[URGENT if is_slow else ORDINARY].write([one])
                page.add(HIT, 1)
                page.add(LOAD, 1)
                self._shared[:8] = struct.pack("q", n + 1)
            else:
                self._shared[16:] = struct.pack("q", 1)
            if n >= at_once:
                time.sleep(1 / per_second)

    @property
    def n(self) -> int:
        """Return how many it has written."""
        return self._NUMBERS.unpack(self._shared[:])[0]

    def stop(self) -> None:
        """Let it write no more."""
        self._shared[8:16] = struct.pack("q", 0)
        eventually(lambda: self._NUMBERS.unpack(self._shared[:])[2])
        time.sleep(FRESH_S)  # a scrape before may have left its text


@contextmanager
def writing(**given: Any) -> Iterator[Writing]:
    made = Writing(**given)
    try:
        yield made
    finally:
        end(made.pid)
