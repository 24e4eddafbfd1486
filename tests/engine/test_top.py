"""`kvobs top` on a real server, under load: it names the child that is slow, its rank, and the child that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import child
from kvobs.demo.server import Server
from tests.engine.metered import configuration
from tests.engine.serving import BOTH_RANKS_ON_ONE_CORE, TOKENS, of_tests, prompt, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PATIENCE_S = 300
"""Far more than it takes: a machine that others share may stand still for a minute."""
LOAD: dict[str, Any] = {"offer": 64, "async": True}
PLANS: dict[str, dict[str, Any]] = {
    "quick": {**LOAD, "load_ms": 2},
    "slow": {**LOAD, "load_ms": {"0": 2, "1": 700}},
    "failing": {**LOAD, "load_ms": 2},
}


def test_the_slow_child_and_the_failing_one_are_named(model: Path, tmp_path: Path) -> None:
    order = tmp_path / "order"
    failing = child("FailingChild", tag="failing", order=str(order), failed=str(tmp_path))
    children = [
        of_tests("SteeredChild", tag="quick"),
        of_tests("SteeredChild", tag="slow"),
        {**failing, "kv_connector_module_path": "tests.engine.children_failing"},
    ]
    config = configuration(*children, names=list(PLANS))
    config["kv_connector_extra_config"]["kvobs"] |= {"isolate": ["failing"]}
    with serve(model, tmp_path, config, tensor_parallel=2, timeout=360, env=BOTH_RANKS_ON_ONE_CORE) as server:
        numbers = count()
        for _ in PLANS:  # the first requests take a server's warming up
            ask(server, next(numbers))
        address = f"127.0.0.1:{server.port}"
        noted = top_under_load(server, address, numbers)
        assert [noted[name]["exceptions_per_s"] for name in PLANS] == [0, 0, 0]
        assert not noted["failing"]["quarantined"]
        order.write_text("start_load_kv")
        noted = top_under_load(server, address, numbers)
    quick, slow, failed = (noted[name] for name in PLANS)
    assert [row["connector_class"] for row in noted.values()] == ["SteeredChild", "SteeredChild", "FailingChild"]
    assert slow["load_p50_s"] > max(0.5, quick["load_p50_s"])
    assert slow["skew_p99_s"] > 0.5
    assert (slow["slowest_rank"], slow["slowest_rank_share"]) == ("1", 1)
    assert slow["load_tokens_per_s"] > 0 < quick["load_tokens_per_s"]
    assert failed["exceptions_per_s"] > 0
    assert failed["quarantined"]
    for row in (quick, slow):
        assert row["exceptions_per_s"] == row["failed_loads_per_s"] == 0
        assert not row["quarantined"]


def ask(server: Server, i: int) -> None:
    """Send a fresh prompt; one child after the other loads."""
    name = list(PLANS)[i % len(PLANS)]
    server.complete(prompt("top", i), TOKENS, kv_transfer_params={"steer": {name: PLANS[name]}})


def top_under_load(server: Server, address: str, numbers: Iterator[int]) -> dict[str, dict[str, Any]]:
    """Return what `kvobs top` says of each child while requests are served that load from each of them."""
    over = threading.Event()

    def ask_on() -> None:
        while not over.is_set():
            ask(server, next(numbers))

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask_on) for _ in range(6)]
        try:
            command = [
                str(Path(sys.executable).parent / "kvobs"),
                "top",
                address,
                "--once",
                "--json",
                "--interval",
                "6",
            ]
            out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        finally:
            over.set()
        for answer in asked:
            answer.result()
    assert out.returncode == 0, out.stdout + out.stderr
    (noted,) = json.loads(out.stdout)["servers"]
    assert noted["error"] is None
    assert noted["telemetry_s_per_s"] > 0
    assert noted["internal_errors"] == 0
    return {row["connector"]: row for row in noted["connectors"]}
