"""Redhare with a real redis behind it: alone, in vLLM's MultiConnector and in kvobs; redis killed in the middle."""

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import entry
from kvobs.testing.server import HOST, claim_port
from tests.connectors.servers import traffic
from tests.connectors.servers.served import STORE
from tests.connectors.servers.stores import Store, running
from tests.connectors.servers.third_party import KNOWN, ROUTERS, Run, running_in
from tests.connectors.servers.traffic import LONG, Answers
from tests.engine.serving import ServedEngine

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines and stores are started within it

UNTIL_KILLED_S = 0.5


def redis(folder: Path) -> Store:
    """Return a redis that keeps nothing on disk."""
    port = claim_port(0)
    command = ["redis-server", "--bind", HOST, "--port", str(port), "--save", "", "--dir", str(folder)]
    return Store("redis-server", command, folder / "redis.log", port, port)


def redhare(store: Store) -> dict[str, Any]:
    """Return Redhare's connector, whose worker holds the bytes, as a connector."""
    options = {"redis_url": f"redis://{HOST}:{store.port}", "data_plane_addr": f"{HOST}:{claim_port(0)}"}
    config = entry("RedhareConnector", transport="tcp", capacity_bytes="256MB", **options)
    return {**config, "kv_connector_module_path": "tests.connectors.servers.redhare_cpu"}


def keys(store: Store) -> list[str]:
    """Return the keys that redis holds, without the process number in the client's."""
    command = ["redis-cli", "-h", HOST, "-p", str(store.port), "--scan"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    return sorted(re.sub(r"-p\d+", "", key) for key in found)


def run(router: str, served_engine: ServedEngine, folder: Path) -> Run:
    with running(redis(folder)) as store, running_in(router, "redhare", redhare(store), served_engine) as run:
        run.ask_one_after_the_other(lambda: keys(store))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(run.ask_and_abort)
            time.sleep(UNTIL_KILLED_S)
            store.kill()
            asking.result()
        run.answers += traffic.ask_all(run.server, LONG)
        run.look_at_the_end()
        return run


@pytest.fixture(scope="module")
def runs(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    return {router: run(router, served_engine, tmp_path_factory.mktemp(router)) for router in ROUTERS}


def test_answers_are_right_even_without_redis_and_hold_no_block(runs: dict[str, Run], expected: Answers) -> None:
    for router, run in runs.items():
        assert traffic.wrong(run.answers, expected) == [], router
        assert (run.is_settled, run.wrong) == (True, []), router


def test_keys_and_redhares_numbers_are_the_same_in_every_router(runs: dict[str, Run]) -> None:
    """Second after host memory it loads nothing, so its numbers differ from those when it is first."""
    for routers in (("alone", "stock", "kvobs"), ("stock-second", "kvobs-second")):
        reference, *others = (runs[router] for router in routers)
        assert len(reference.stored) > 12 * len(KNOWN)
        assert reference.total("redhare_external_cache_hit_tokens_total") > 0
        for other in others:
            assert other.stored == reference.stored, other.router
            assert other.own == reference.own, other.router


def test_kvobs_counts_what_redhare_counts(runs: dict[str, Run]) -> None:
    run = runs["kvobs"]
    assert run.total("kvobs_lookups_total", connector=STORE) == run.total("redhare_external_cache_lookup_total")
    assert run.total("kvobs_loads_total", connector=STORE, outcome="ok") == len(KNOWN)
    assert run.total("kvobs_load_tokens_total", connector=STORE) == run.total("vllm:external_prefix_cache_hits_total")
    assert run.total("kvobs_saves_total", connector=STORE, outcome="ok") == 2 * len(KNOWN)
    assert runs["kvobs-second"].total("kvobs_loads_total", connector=STORE) == 0
