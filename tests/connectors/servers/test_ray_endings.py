"""A rank's process is killed under Ray: the server ends as with vLLM's own MultiConnector, with both executors.

In a module of its own: two clusters at one address get in each other's way.
"""

import os
import signal
import time
from dataclasses import dataclass

import pytest

from kvobs.demo.run import host_memory, multi_connector
from tests.connectors.servers.cluster import EXECUTORS, ON_RAY, RANKS, cluster
from tests.engine.endings import LOADS, LONG, SHORT, UNDER_WAY_S, WARM_S, Clients, _wait
from tests.engine.serving import ServedEngine, eventually, of_tests, prompt, stock

pytestmark = [pytest.mark.connectors, pytest.mark.ray, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Ending:
    """What became of a server whose worker was killed."""

    exit_code: int | None
    in_flight: frozenset[str]
    workers: int
    """Of the ranks' processes, that are left."""


def killed(router: str, executor: str, served_engine: ServedEngine) -> Ending:
    """Kill one rank's process under load; ``router`` is "kvobs" or "stock"."""
    config = multi_connector(of_tests("SteeredConnector", plan=LOADS), host_memory(), names=["steered", "cpu"])
    config = config if router == "kvobs" else stock(config)
    with (
        cluster(**EXECUTORS[executor]) as ranks,
        served_engine(config, *ON_RAY, ranks=RANKS, env=ranks.env, is_spawned=True) as server,
    ):
        process = server.process
        assert process is not None
        server.complete(prompt("first"), SHORT)
        clients = Clients(server, SHORT)
        assert eventually(lambda: clients.answered(time.monotonic() - 2) > 0, WARM_S), "nothing is answered"
        underway = Clients(server, LONG)
        time.sleep(UNDER_WAY_S)
        moment = time.monotonic()
        os.kill(ranks.workers()[-1], signal.SIGKILL)
        code = _wait(process)
        in_flight = underway.outcomes(moment)
        clients.outcomes(moment)
        eventually(lambda: not ranks.workers(), 30)
        return Ending(code, in_flight, len(ranks.workers()))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_server_whose_worker_is_killed_ends_as_with_stock(executor: str, served_engine: ServedEngine) -> None:
    endings = {router: killed(router, executor, served_engine) for router in ("stock", "kvobs")}
    print(f"\n{executor}: {endings}")
    assert endings["kvobs"] == endings["stock"]
    assert endings["kvobs"].in_flight
