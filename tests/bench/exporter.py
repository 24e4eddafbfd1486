"""What kvobs costs each process, with the exporter and without: CPU time, while every request is traced.

Wall times drown in noise where processes share cores; the CPU time of each process, before and after the same load,
does not. Servers that differ in their router only get the load of ``traced`` in turns: 200 of kvobs's spans a second.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvobs.demo.processes import group_members
from kvobs.demo.server import Server, ServerError, claim_port
from kvobs.vllm_api.proc import stat
from tests.bench import traced
from tests.bench.endtoend import Say, compare, in_turn, running
from tests.bench.receiver import receiving
from tests.bench.report import Budget, Line, Part
from tests.bench.traced import REQUESTS, SENT_AFTER_S
from tests.engine.exported import Exported
from tests.engine.serving import stock
from tests.support.affinity import set_affinity

ROUNDS = 10
WARM_UP = 1
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MIB = 1 << 20
ENGINE_CORE = "EngineCor"
"""A part of the name of that process, which Linux cuts; the server's first process is its API server."""


class Turn(NamedTuple):
    """What one server's processes used in one turn, in ms of CPU time a request."""

    api_server: float
    engine_core: float
    exporter: float
    wall_s: float
    completion_p95: float


def configs(port: int) -> dict[str, dict[str, Any]]:
    """Return each server's configuration; the exporter's port is this."""
    exported = traced.config("requests")
    exported["kv_connector_extra_config"]["kvobs"]["exporter"] = {"port": port}
    return {
        "stock": stock(traced.config("off")),
        "stock again": stock(traced.config("off")),
        "off": traced.config("off"),
        "kvobs": traced.config("requests"),
        "kvobs, exporter": exported,
    }


def measure(rounds: int, say: Say) -> Part:
    """Load all servers in turns, and compare their processes round by round."""
    port = claim_port(0)
    with (
        tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder,
        receiving() as receiver,
        running(Path(folder), configs(port), say, ["--otlp-traces-endpoint", receiver.endpoint]) as servers,
    ):
        exporter = Exported(servers["kvobs, exporter"], port)
        exporter.until_up()
        pid = exporter.pid()
        set_affinity(pid, os.sched_getaffinity(0))
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        for number in range(WARM_UP + rounds):
            for name in in_turn(list(servers), number):
                turns[name].append(take_turn(servers[name], pid if name == "kvobs, exporter" else None))
            if number == WARM_UP:
                say(f"{rounds} rounds, about {sum(t[-1].wall_s for t in turns.values()) * rounds:.0f} s more")
        resident = exporter.resident() / MIB
    return Part(
        "Real servers, CPU time of each process, 200 spans/s; baseline: vLLM's MultiConnector",
        lines({name: all_turns[WARM_UP:] for name, all_turns in turns.items()}, resident),
    )


def take_turn(server: Server, exporter: int | None) -> Turn:
    """Load a server; return what its processes used."""
    before = used(server, exporter)
    begin = time.monotonic()
    turn = traced.take_turn(server)
    time.sleep(SENT_AFTER_S)  # until its spans are out
    wall = time.monotonic() - begin
    api, core, exported = (
        (now - then) * 1000 / REQUESTS for now, then in zip(used(server, exporter), before, strict=True)
    )
    return Turn(api, core, exported, wall, turn.completion_p95)


def used(server: Server, exporter: int | None) -> tuple[float, float, float]:
    """Return the seconds of CPU time that API server, EngineCore and exporter have used."""
    assert server.process is not None
    cores = [fields for name, fields in map(stat, group_members(server.process.pid)) if ENGINE_CORE in name]
    if len(cores) != 1:
        raise ServerError(f"{len(cores)} processes are called {ENGINE_CORE}: EngineCore's CPU time can't be read.")
    exported = seconds(stat(exporter)[1]) if exporter is not None else 0.0
    return seconds(stat(server.process.pid)[1]), seconds(cores[0]), exported


def seconds(fields: Sequence[str]) -> float:
    """Return the CPU time of a process from its /proc fields, the state first: in user mode and in the kernel."""
    return (int(fields[11]) + int(fields[12])) * TICK_S


def lines(turns: Mapping[str, Sequence[Turn]], resident: float) -> list[Line]:
    """Compare the servers; ``resident`` is the exporter's memory in MiB."""
    api = {name: [turn.api_server for turn in all_turns] for name, all_turns in turns.items()}
    core = {name: [turn.engine_core for turn in all_turns] for name, all_turns in turns.items()}
    exported = turns["kvobs, exporter"]
    shares = tuple(turn.exporter * REQUESTS / 1000 / turn.wall_s * 100 for turn in exported)
    p95 = tuple(
        with_it.completion_p95 / off.completion_p95 for with_it, off in zip(exported, turns["off"], strict=True)
    )
    p95_of = [turn.completion_p95 for turn in exported], [turn.completion_p95 for turn in turns["off"]]
    return [
        *compare("API server, a request", "ms", api, limits={"kvobs, exporter": 1.01}),
        *compare("EngineCore, a request", "ms", core, limits={}),
        Line("the exporter, of a core", "%", median(shares), shares, budget=Budget(2.0)),
        Line("the exporter's memory", "MiB", resident, (resident,), budget=Budget(60.0)),
        Line(
            "completion, p95, exporter against off",
            "ms",
            median(p95_of[0]),
            p95,
            baseline=median(p95_of[1]),
            budget=Budget(1.02),
        ),
    ]
