"""Under Ray, with a rank on another host than EngineCore: that host has its exporter, and a call that hangs is seen.

With the newer executor: the compiled graph of the older one passes nothing on between these two hosts.
"""

from pathlib import Path

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.server import HOST, claim_port
from tests.connectors.servers.cluster import EXECUTORS, ON_RAY, RANKS, cluster, joined
from tests.engine import metered
from tests.engine.exported import Exported
from tests.engine.serving import ServedEngine, eventually, prompt
from tests.incidents.beginning import begin, faulty

pytestmark = [pytest.mark.connectors, pytest.mark.ray, pytest.mark.timeout(1200)]


def test_a_hanging_call_is_seen_on_a_host_without_the_scheduler(served_engine: ServedEngine, tmp_path: Path) -> None:
    config = metered.configuration(host_memory(), faulty(tmp_path, rank=1), names=["cpu", "remote"])
    ports = claim_port(0), claim_port(0)
    first, second = ({"KVOBS_EXPORTER": f"{HOST}:{port}"} for port in ports)
    with (
        cluster(1, **EXECUTORS["ray-v2"]) as ranks,
        joined(ranks, **second),
        served_engine(config, *ON_RAY, ranks=RANKS, env={**ranks.env, **first}, is_spawned=True) as server,
    ):
        server.complete(prompt("warm"), 2)
        here, there = (Exported(server, port) for port in ports)
        for each in (here, there):
            each.until_up()
        assert here.health()["processes"]["rank 1"] == "not seen"
        assert there.health()["processes"].keys() == {"rank 1"}
        begin(server, tmp_path, "wait_for_save", "hangs")
        assert eventually(lambda: bool(there.health()["processes"]["rank 1"] == "wait_for_save of remote"))
