"""A connector that is slow, fails, or leaves requests waiting is named everywhere; two engines show it in turn.

In an order in which the Overview does not remember a worse state than that of the moment, and alerts no other incident.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.server import Server, ServerError
from tests.engine.exported import with_exporter
from tests.engine.metered import ask, configuration
from tests.engine.serving import ServedEngine, eventually, of_tests, prompt
from tests.incidents.alerts import Recorded
from tests.incidents.known import AFTER_A_RESTART, LOADS, NOT_RESUMED, ORDERS, SYNC, SYNC_AGAIN, Incident
from tests.incidents.watching import Watched, watched

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLIENTS = 4
SETTLES_S = 2
"""Until what an incident has left under way is over, and scraped: else it is of the next one."""
FEW_BLOCKS = ("--max-model-len", "512", "--num-gpu-blocks-override", "18")
"""Of 32 tokens; one is vLLM's own."""
IN_FLIGHT = 'kvobs_in_flight{{connector="remote",kind="{}"}}'
WELL = {"offer": 64, "async": True, "load_ms": 20}


@contextmanager
def asking(server: Server, about: str, steer: dict[str, Any], each_s: int) -> Iterator[None]:
    """Keep clients asking inside the ``with`` block, with these orders to `remote`; wait for their last answers."""
    is_settled = threading.Event()

    def client(number: int) -> None:
        for i in itertools.count():
            with suppress(ServerError, OSError):
                ask(server, prompt(about, number, i), steer, tokens=2)
            if is_settled.wait(each_s):
                return

    clients = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(1 if each_s else CLIENTS)]
    for thread in clients:
        thread.start()
    yield
    is_settled.set()
    for thread in clients:
        thread.join()
    time.sleep(SETTLES_S)


def fill_blocks(server: Server, watch: Watched) -> None:
    """While a request is loaded, which has 2 blocks and needs 7, let another one end with 13 of 17, and keep them."""
    loaded, kept = prompt("loaded")[:200], prompt("kept")[:200]
    threading.Thread(target=ask, args=(server, loaded, {**LOADS, "load_ms": 12_000}), daemon=True).start()
    assert eventually(lambda: watch.prometheus.value(IN_FLIGHT.format("load")) == 1)
    ask(server, kept, {"promise": True, "save_ms": 45_000}, tokens=200)
    assert eventually(lambda: watch.prometheus.value(IN_FLIGHT.format("awaiting_schedule")) == 1)


def test_each_is_seen_in_its_turn(served_engine: ServedEngine, tmp_path: Path) -> None:
    config, port = with_exporter(configuration(host_memory(), of_tests("SteeredConnector"), names=["cpu", "remote"]))
    lives = ((), 2), (FEW_BLOCKS, 1)
    recorded: dict[Incident, Recorded] = {}
    for (args, ranks), orders in zip(lives, (ORDERS, AFTER_A_RESTART), strict=True):
        with served_engine(config, *args, ranks=ranks) as server:
            ask(server, prompt("warm"), WELL if orders is ORDERS else {})
            with watched(server, port, tmp_path) as watch:
                for incident, steer in orders.items():
                    logged = watch.logged
                    if incident is NOT_RESUMED:  # its line in the log may come before Prometheus has the number
                        fill_blocks(server, watch)
                    watch.begin(logged)
                    with asking(server, incident.title, steer, incident.each_s):
                        earlier = recorded.get(SYNC) if incident is SYNC_AGAIN else None
                        recorded[incident] = watch.sees(incident, earlier)
