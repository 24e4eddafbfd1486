"""Who listens on a port is found, if that can be seen."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from kvobs.demo.server import claim_port
from kvobs.export.ports import holder


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listening_process_is_named(family: socket.AddressFamily) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        except OSError:
            assert family == socket.AF_INET6, "this machine has no IPv6"
            return
        port = listening.getsockname()[1]
        assert holder(port) == "another process", "it does not listen yet"
        listening.listen()
        named = holder(port)
    assert named.startswith(f"pid {os.getpid()} (")
    assert os.path.basename(sys.executable)[:6] in named or "pytest" in named
    assert len(named) < 160


def test_a_free_port_is_held_by_nobody_that_is_seen() -> None:
    assert holder(claim_port(0)) == "another process"
