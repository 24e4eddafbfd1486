"""No two servers of the tests get the same port."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

from kvobs.demo.server import HOST
from tests.support import server_ports
from tests.support.server_ports import lasting_port

if TYPE_CHECKING:
    import pytest


def test_no_port_is_returned_twice_whatever_chance_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's master, with one port for both of its servers, serves nothing and says nothing."""
    monkeypatch.setattr(random, "randint", lambda low, _high: low)
    assert len({lasting_port() for _ in range(50)}) == 50


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as theirs:
        theirs.bind((HOST, 0))
        theirs.listen()
        taken, free = theirs.getsockname()[1], lasting_port()
        monkeypatch.setattr(server_ports, "_left", iter([taken, free]))
        assert lasting_port() == free


def test_workers_of_pytest_have_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []
    for worker in range(server_ports.WORKERS):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        ports += server_ports._all()
    assert len(ports) == len(set(ports)) > 1000 * server_ports.WORKERS
