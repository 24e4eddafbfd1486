"""What kvobs costs each process, with the exporter and without: CPU time, while every request is traced.

Wall times drown in noise where processes share cores; the CPU time of each process, before and after the same load,
does not. EngineCore spins while it waits for its worker, which is most of its CPU time: that is measured apart, and
counts as the same for all routers. Servers that differ in their router only get the same load in turns. Every request
loads from a connector, so that it is three of kvobs's spans, and they come at a pace that makes 200 a second. The loads
are synchronous: while an asynchronous one is pending vLLM spins, and on two cores that is all one would measure.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from kvobs.demo.run import entry, multi_connector
from kvobs.testing.collector import decode
from kvobs.testing.server import HOST, Server, ServerError, claim_port, group_members
from kvobs.vllm_api.proc import stat
from tests.bench import waits
from tests.bench.endtoend import SPIN_S, Say, ask, check_end, compare, completing, in_turn, prompt, running
from tests.bench.report import Budget, Line, Part
from tests.engine.exported import Exported
from tests.engine.serving import of_tests, stock
from tests.support.affinity import set_affinity
from tests.support.grpc_collector import GrpcListener

ROUNDS = 10
WARM_UP = 1
"""Rounds before those that count: what they ask is saved, and then loaded in each of those."""
REQUESTS = 150
PACE_S = 0.015
"""From one request to the next, however long they take."""
AT_ONCE = 8
ANSWER_TOKENS = 4
SENT_AFTER_S = 3.0
"""Until all spans have arrived: a batch goes out after a second."""
TRACED = {"kvobs", "kvobs, exporter"}
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
ENGINE_CORE = "EngineCor"
"""A part of the name of that process, which Linux cuts; the server's first process is its API server."""


class Turn(NamedTuple):
    """What one server's processes used in one turn, in ms of CPU time a request."""

    api_server: float
    engine_core: float
    """Without its waits."""
    waits: float
    exporter: float
    wall_s: float
    completion_p95: float


def configs(port: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return each server's configuration, with the exporter's port and the folder for EngineCores' waits."""
    config = partial(_config, folder)
    exported = config("requests")
    exported["kv_connector_extra_config"]["kvobs"]["exporter"] = {"port": port}
    return {
        "stock": stock(config("off")),
        "stock again": stock(config("off")),
        "off": config("off"),
        "kvobs": config("requests"),
        "kvobs, exporter": exported,
    }


def _config(folder: Path, level: str) -> dict[str, Any]:
    near = {
        **entry("WaitingConnector", plan={"offer": 64}, waits=str(folder)),
        "kv_connector_module_path": waits.__name__,
    }
    made = multi_connector(near, of_tests("IdleConnector"), names=["near", "far"])
    made["kv_connector_extra_config"]["kvobs"]["tracing"] = {"level": level}
    return made


def measure(rounds: int, say: Say) -> Part:
    """Load all servers in turns, and compare their processes round by round."""
    port = claim_port(0)
    with (
        tempfile.TemporaryDirectory(prefix="kvobs-bench-") as temporary,
        receiving() as (endpoint, bodies),
        running(folder := Path(temporary), configs(port, folder), say, ["--otlp-traces-endpoint", endpoint]) as servers,
    ):
        exporter = Exported(servers["kvobs, exporter"], port)
        exporter.until_up()
        pid = exporter.pid()
        set_affinity(pid, os.sched_getaffinity(0))
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for number in range(WARM_UP + rounds):
            for name in in_turn(list(servers), number):
                turns[name].append(take_turn(servers[name], folder, pid if name == "kvobs, exporter" else None))
            if number == WARM_UP:
                say(f"{rounds} rounds, about {sum(t[-1].wall_s for t in turns.values()) * rounds:.0f} s more")
        resident = exporter.resident() / MIB
        check_traced(bodies)
    return Part(
        "Real servers, CPU time of each process, 200 spans/s; baseline: vLLM's MultiConnector",
        lines({name: all_turns[WARM_UP:] for name, all_turns in turns.items()}, resident),
    )


def take_turn(server: Server, folder: Path, exporter: int | None) -> Turn:
    """Load a server; return what its processes used."""
    before = used(server, folder, exporter)
    begin = time.monotonic()
    completions = load(server)
    time.sleep(SENT_AFTER_S)
    wall = time.monotonic() - begin
    api, core, waits, exported = (
        (now - then) * 1000 / REQUESTS for now, then in zip(used(server, folder, exporter), before, strict=True)
    )
    return Turn(api, core - waits, waits, exported, wall, quantiles(completions, n=20)[18] * 1000)


def load(server: Server) -> list[float]:
    """Empty vLLM's own cache, so that all prompts are loaded from a connector; return the seconds of each request."""
    time.sleep(SPIN_S)
    server.reset_prefix_cache()
    for i in range(3):
        ask(server, prompt("wake", i), 1)
    begin, answers = time.perf_counter(), []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for i in range(REQUESTS):
            time.sleep(max(0, begin + i * PACE_S - time.perf_counter()))
            answers.append(pool.submit(complete, server, prompt("traced", i)))
        return [answer.result() for answer in answers]


def complete(server: Server, text: str) -> float:
    """Have a prompt completed for a client who traces it; return the seconds it took."""
    headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
    begin = time.perf_counter()
    with completing(server, text, ANSWER_TOKENS, headers) as answer:
        check_end(answer.read())
    return time.perf_counter() - begin


@contextmanager
def receiving() -> Iterator[tuple[str, list[bytes]]]:
    """Keep the spans that arrive by OTLP over gRPC; decoding would take the servers' core while they are measured."""
    bodies: list[bytes] = []
    listener = GrpcListener(port := claim_port(0), bodies.append)
    yield f"http://{HOST}:{port}", bodies
    listener.stop()


def check_traced(bodies: Iterable[bytes]) -> None:
    """Raise `ServerError` unless kvobs's spans came from the servers that trace, and from no other."""
    spans = (span for body in bodies for span in decode(body))
    servers = {span.resource["service.name"] for span in spans if span.scope == "kvobs"}
    if servers != TRACED:
        raise ServerError(f"kvobs's spans arrived from {sorted(servers)}: tracing was not measured.")


def used(server: Server, folder: Path, exporter: int | None) -> tuple[float, float, float, float]:
    """Return the seconds of CPU time that API server, EngineCore, its waits within them, and exporter have used."""
    assert server.process is not None
    cores = [pid for pid in group_members(server.process.pid) if ENGINE_CORE in stat(pid)[0]]
    if len(cores) != 1:
        raise ServerError(f"{len(cores)} processes are called {ENGINE_CORE}: EngineCore's CPU time can't be read.")
    api, core = (seconds(stat(pid)[1]) for pid in (server.process.pid, cores[0]))
    return api, core, waits.waited(folder, cores[0]), seconds(stat(exporter)[1]) if exporter is not None else 0.0


def seconds(fields: Sequence[str]) -> float:
    """Return the CPU time of a process from its /proc fields, the state first: in user mode and in the kernel."""
    return (int(fields[11]) + int(fields[12])) * TICK_S


def lines(turns: Mapping[str, Sequence[Turn]], resident: float) -> list[Line]:
    """Compare the servers; ``resident`` is the exporter's memory in MiB."""
    api = {name: [turn.api_server for turn in all_turns] for name, all_turns in turns.items()}
    core = {name: [turn.engine_core for turn in all_turns] for name, all_turns in turns.items()}
    spun = [turn.waits for turn in turns["stock"]]
    whole = {name: [sum(pair) for pair in zip(each, spun, strict=True)] for name, each in core.items()}
    exported = turns["kvobs, exporter"]
    shares = [turn.exporter * REQUESTS / 1000 / turn.wall_s * 100 for turn in exported]
    p95, p95_off = ([turn.completion_p95 for turn in turns[name]] for name in ("kvobs, exporter", "off"))
    return [
        *compare("API server, a request", "ms", api, limits={"kvobs, exporter": 1.01}),
        *compare("EngineCore without its waits, a request", "ms", core, limits={}),
        *compare("EngineCore, a request", "ms", whole, limits=dict.fromkeys(TRACED, 1.05)),
        Line("the exporter, of a core", "%", shares, budget=Budget(2.0)),
        Line("the exporter's memory", "MiB", [resident], budget=Budget(60.0)),
        Line("completion, p95, exporter against off", "ms", p95, p95_off, Budget(1.02)),
    ]
