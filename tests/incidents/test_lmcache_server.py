"""LMCache's server is killed under load: its connector's call is named while it waits for an answer."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.server import ServerError
from tests.connectors.servers.stores import lmcache_entry, lmcache_server, running
from tests.connectors.servers.traffic import SMALL_CACHE
from tests.engine.exported import with_exporter
from tests.engine.metered import configuration
from tests.engine.serving import ServedEngine, eventually, prompt
from tests.incidents.known import LMCACHE
from tests.incidents.watching import watched

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLIENTS = 8
LOOKED_UP = 'sum(kvobs_lookups_total{connector="remote"})'
WAITS_S = 120
"""How long LMCache waits for an answer: 300 s by default."""


def test_its_server_is_killed_under_load(served_engine: ServedEngine, tmp_path: Path) -> None:
    """There is always a long prompt in the middle of being computed, whose chunks are saved one after the other."""
    with running(lmcache_server(tmp_path)) as store:
        entry = lmcache_entry(store, mq_timeout=WAITS_S, heartbeat_interval=WAITS_S)
        config, port = with_exporter(configuration(host_memory(), entry, names=["cpu", "remote"]))
        is_settled = threading.Event()
        with served_engine(config, *SMALL_CACHE, packages=["lmcache"], is_spawned=True) as server:

            def ask(first: int) -> None:
                for number in itertools.count(first, CLIENTS):
                    if is_settled.wait(0):
                        return
                    with suppress(ServerError):
                        server.complete("".join(prompt("fresh", number, part) for part in range(4)), 2)

            for first in range(CLIENTS):
                threading.Thread(target=ask, args=(first,), daemon=True).start()
            with watched(server, port, tmp_path) as watch:
                assert eventually(lambda: (watch.prometheus.value(LOOKED_UP) or 0) > 10)
                watch.begin()
                store.kill()
                watch.sees(LMCACHE)
                is_settled.set()
