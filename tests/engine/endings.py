"""How servers end under load, killed or asked to: with kvobs, and with vLLM's own MultiConnector.

    python -m tests.engine.endings [CASE ...]

runs the cases whose names begin so with both, prints what became of each, and fails where they differ.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from itertools import count
from pathlib import Path
from typing import Any

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.model import NAME, make_model
from kvobs.testing.server import HOST, Server, group_members, parse_metrics
from kvobs.vllm_api.proc import stat
from tests.engine.serving import ServedEngine, eventually, of_tests, prompt, serve, stock

CLIENTS = 2  # of each kind
SHORT, LONG = 40, 1500  # tokens of an answer
WARM_S, UNDER_WAY_S = 60.0, 0.5
GONE_S = 60.0
"""Seconds in which a server is to be gone."""
PATIENCE_S = 30.0
"""Seconds after which a client gives up."""
SHARED_MEMORY = Path("/dev/shm")
LOADS = {"offer": 64, "async": True, "load_ms": 20}
_NUMBER = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{20,}|[0-9a-f]{8,}|\d+")
_COMPILERS = re.compile(r"torchinductor_|cc\w{6}\.")  # their caches and scratch files, wherever they were killed
NEVER_SAVED = {"promise": True, "save_ms": {}}


@dataclass(frozen=True)
class Case:
    """One way to end, and the server that it happens to."""

    name: str
    end: Callable[[Server], None]
    ranks: int = 1
    args: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=lambda: LOADS)
    either: frozenset[str] = frozenset()
    """What requests in flight get from vLLM now and then, with and without kvobs."""
    may_leave: str = "(?!)"
    """Files that vLLM leaves behind now and then, with and without kvobs: a pattern; this one matches none."""


def kill(part: str) -> Callable[[Server], None]:
    """Return what kills one process of a server, the one that was started last, by a part of its name."""

    def end(server: Server) -> None:
        assert server.process is not None
        found = [pid for pid in group_members(server.process.pid) if part in name_of(pid)]
        assert found, f"no process of the server is called {part}"
        # A process that one of them started, as compilers are, has its name at first.
        os.kill(max(pid for pid in found if int(stat(pid)[1][1]) not in found), signal.SIGKILL)

    return end


def terminate(server: Server) -> None:
    assert server.process is not None
    server.process.terminate()


CASES = {
    case.name: case
    for case in (
        # The other worker ends by itself, within 3 s, or vLLM kills it after 9, and its shared memory stays.
        Case("kill -9 of a worker", kill("Worker_TP"), ranks=2, may_leave="vllm_dist_.*cpushm"),
        Case("kill -9 of EngineCore", kill("EngineCor")),
        # vLLM ends with EngineCore, whether or not what it aborted has been reported.
        Case("SIGTERM", terminate, either=frozenset({"cut short, abort", "gave up", "answered"})),
        Case("SIGTERM, --shutdown-timeout 25", terminate, args=("--shutdown-timeout", "25")),
        Case("SIGTERM, --shutdown-timeout 25, a save pending", terminate, 1, ("--shutdown-timeout", "25"), NEVER_SAVED),
    )
}


@dataclass(frozen=True)
class Ending:
    """What became of a server."""

    exit_code: int | None
    """None: it was not gone in time."""
    seconds: float
    in_flight: frozenset[str]
    """What long requests got that were in flight."""
    metrics: frozenset[str]
    """What /metrics said from then on."""
    processes: tuple[str, ...]
    """Of the server's, that are left."""
    files: tuple[str, ...]
    """That it left behind, numbers in their names left out."""
    counted: tuple[int, int, int] | None = None
    """Requests: answered before, on /metrics at the end, sent by then."""

    def comparable(self, case: Case) -> tuple[Any, ...]:
        """Return what must be the same with and without kvobs."""
        files = tuple(name for name in self.files if not re.match(case.may_leave, name))
        return self.exit_code, self.in_flight - case.either, self.processes, files


def exchange(server: Server, method: str, path: str, body: str | None = None) -> tuple[str, str]:
    """Return what came of a request, "HTTP 200" or the like where it was answered, and the answer's body."""
    connection = HTTPConnection(HOST, server.port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return f"HTTP {answer.status}", answer.read().decode()
    except ConnectionRefusedError:
        return "refused", ""
    except TimeoutError:
        return "gave up", ""
    except (OSError, HTTPException):
        return "hung up on", ""
    finally:
        connection.close()


class Clients:
    """Ask for answers of so many tokens, one after the other, until one is not given in full."""

    def __init__(self, server: Server, tokens: int) -> None:
        self.begun = 0
        self.sent: list[tuple[float, float, str]] = []  # begin, end, what came of it
        self._server, self._tokens = server, tokens
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        for i in count():
            self.begun += 1
            begin = time.monotonic()
            outcome = self._outcome(prompt("ending", self._tokens, number, i))
            self.sent.append((begin, time.monotonic(), outcome))
            if outcome != "answered":
                return

    def _outcome(self, text: str) -> str:
        asked = {"model": NAME, "prompt": text, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        status, body = exchange(self._server, "POST", "/v1/completions", json.dumps(asked))
        if status != "HTTP 200":
            return status
        said = json.loads(body)
        whole = said["usage"]["completion_tokens"] == self._tokens
        return "answered" if whole else f"cut short, {said['choices'][0]['finish_reason']}"

    def answered(self, before: float) -> int:
        return sum(end < before and outcome == "answered" for _, end, outcome in list(self.sent))

    def outcomes(self, moment: float) -> frozenset[str]:
        """Wait for all clients; return what came of their requests that were in flight at this moment."""
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client still waits for its answer"
        return frozenset(outcome for begin, end, outcome in self.sent if begin < moment < end)


class Scraper:
    """Read /metrics over and over, until it is refused."""

    def __init__(self, server: Server) -> None:
        self.said: set[str] = set()
        self.counts: list[int] = []
        self._server = server

    def run(self) -> None:
        while "refused" not in self.said:
            self.read()
            time.sleep(0.02)

    def read(self) -> int | None:
        """Return how many requests have ended by kvobs's numbers; None without an answer, or without kvobs."""
        status, body = exchange(self._server, "GET", "/metrics")
        self.said.add(status)
        calls = [s for s in parse_metrics(body) if s.name == "kvobs_call_duration_seconds_count"]
        ends = [s for s in calls if s.labels["hook"].startswith("request_finished")]
        if not calls:
            return None
        self.counts.append(int(sum(s.value for s in ends if s.labels["connector"] == "steered")))
        return self.counts[-1]


def run(case: Case, router: str, served_engine: ServedEngine) -> Ending:
    """Let a server under load end; ``router`` is "kvobs" or "stock"."""
    config = multi_connector(of_tests("SteeredConnector", plan=case.plan), host_memory(), names=["steered", "cpu"])
    config = config if router == "kvobs" else stock(config)
    shared_before = set(os.listdir(SHARED_MEMORY))
    with served_engine(config, *case.args, ranks=case.ranks, is_spawned=True) as server:
        process: Any = server.process
        scratch: Any = server.scratch
        server.complete(prompt("first"), SHORT)  # torch compiles with it, for longer than a client waits
        clients, scraper = Clients(server, SHORT), Scraper(server)
        assert eventually(lambda: clients.answered(time.monotonic() - 2) > 0, WARM_S), "nothing is answered"
        asked = time.monotonic()
        counted = scraper.read()
        ledger = None if counted is None else (1 + clients.answered(asked), counted, 1 + clients.begun)
        underway = Clients(server, LONG)  # after /metrics has been read, which may take long on a busy server
        time.sleep(UNDER_WAY_S)
        moment = time.monotonic()
        case.end(server)
        threading.Thread(target=scraper.run, daemon=True).start()
        exit_code = _wait(process)
        seconds = time.monotonic() - moment
        in_flight = underway.outcomes(moment)
        assert in_flight, "no long request was in flight"
        clients.outcomes(moment)
        eventually(lambda: not group_members(process.pid), 10)
        left = tuple(sorted(name_of(pid) for pid in group_members(process.pid)))
        shared = set(os.listdir(SHARED_MEMORY)) - shared_before - _in_use()
        files = {str(path.relative_to(scratch)) for path in scratch.rglob("*") if not path.is_dir()}
        assert scraper.counts == sorted(scraper.counts), "what /metrics said went back"
    return Ending(
        exit_code, seconds, in_flight, frozenset(scraper.said), left, _without_numbers(shared | files), ledger
    )


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        return None


def name_of(pid: int) -> str:
    with suppress(OSError):
        return stat(pid)[0]
    return ""


def _in_use() -> set[str]:
    """Return the names of shared memory that living processes have: not the server's, which is gone."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", maps.read_text()))
    return found


def _without_numbers(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(_NUMBER.sub("*", name) for name in names if not _COMPILERS.match(name)))


def main(names: list[str]) -> int:
    """Run the cases with both; return how many end differently."""
    different = 0
    with tempfile.TemporaryDirectory(prefix="kvobs-endings-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for case in [case for case in CASES.values() if case.name.startswith(tuple(names or [""]))]:
            engines = {router: partial(serve, model, folder / router) for router in ("stock", "kvobs")}
            endings = {router: run(case, router, engine) for router, engine in engines.items()}
            print(f"{case.name}", *(f"  {router:6} {ending}" for router, ending in endings.items()), sep="\n")
            is_same = endings["stock"].comparable(case) == endings["kvobs"].comparable(case)
            different += not is_same
            print("  the same" if is_same else "  DIFFERENT", flush=True)
    return different


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
