"""Ports of servers that tests start, stop and start again."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path

from kvobs.demo.server import ServerError, claim_port

LOWEST = 10_000
WORKERS = 8
"""Each of so many workers of pytest has its own ports, by the remainder."""


def _all() -> list[int]:
    """Return the ports of this process, below those that the kernel gives to connections, in any order."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ours = range(LOWEST + worker % WORKERS, kernels, WORKERS)
    return random.sample(ours, len(ours))


_left = iter(_all())


def lasting_port() -> int:
    """Return a free port that nobody else gets while its server is down: no other server of a test, no connection."""
    for port in _left:
        with suppress(ServerError):
            return claim_port(port)
    raise ServerError("No port is free below those that the kernel gives to connections.")
