"""An engine of two ranks on two hosts, which are namespaces of this machine.

The second one has its own shared memory, name, uptime, and a wall clock that is ahead; they share the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.testing.server import CORES, HOST, Server, claim_port
from tests.engine.serving import importing_tests, serve

AHEAD_S = 1.0
"""More than a step takes on a busy machine."""
UPTIME_S = "100000"
"""By which the second host has run longer."""
NAMESPACES = ("unshare", "--mount", "--uts", "--ipc", "--time", "--monotonic", UPTIME_S, "--boottime", UPTIME_S)
AS_HOST = (*NAMESPACES, "sh", "-c", 'mount -t tmpfs none /dev/shm && hostname other-host && exec "$@"', "sh")
ENV = {CORES: "nobind", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": HOST}


class OtherHost(Server):
    """The ranks on the second host: they serve no requests."""

    def wait_until_ready(self) -> None:
        self.ready = True  # it gets the time to end that others get


class TwoHosts(NamedTuple):
    """The server on the first host, the ranks on the second, and the ports of the exporters there."""

    server: Server
    other: Server
    ports: tuple[int, int]


@contextmanager
def on_two_hosts(model: Path, folder: Path, config: dict[str, Any], *args: str, **env: str) -> Iterator[TwoHosts]:
    """Run an engine whose rank 1 is on the second host."""
    rendezvous, *ports = (claim_port(0) for _ in range(3))
    nodes = ("--nnodes", "2", "--master-addr", HOST, "--master-port", str(rendezvous), *args)
    here, there = ({**ENV, **env, "KVOBS_EXPORTER": f"{HOST}:{port}"} for port in ports)
    there["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent / "ahead"), importing_tests()["PYTHONPATH"]])
    there["TESTS_AHEAD_NS"] = str(round(AHEAD_S * 1e9))
    second = OtherHost(
        model, folder / "other.log", config, args=(*nodes, "--node-rank", "1", "--headless"), env=there,
        tensor_parallel=2, launch=(*AS_HOST, *Server.launch),
    )  # fmt: skip
    first = (*nodes, "--node-rank", "0")
    with (
        second,
        serve(model, folder, config, *first, ranks=2, env=here, is_spawned=True) as server,
    ):
        yield TwoHosts(server, second, (ports[0], ports[1]))
