"""Faults inside kvobs's own telemetry, on a real server: they cost numbers, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.demo.collector import Collector
from kvobs.demo.run import host_memory, multi_connector
from kvobs.demo.server import Server
from kvobs.signals import INTERNAL_ERRORS
from tests.engine.sabotage import FAULTS, SWITCH
from tests.engine.serving import ask_all, eventually, of_tests, prompt, serve, total

pytestmark = pytest.mark.engine

PROMPTS = [prompt("contained", i) for i in range(40)]


def compute_and_load(server: Server) -> list[dict[str, tuple[int, ...]]]:
    """Return the answers to the same prompts, computed and then loaded from the children."""
    server.reset_prefix_cache(external=True)
    computed = ask_all(server, PROMPTS)
    server.reset_prefix_cache()
    return [computed, ask_all(server, PROMPTS)]


def test_faults_in_every_place_of_the_telemetry_change_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    switch = tmp_path / "sabotage"
    broken = {**of_tests("StatsChild"), "kv_connector_module_path": "tests.engine.sabotage"}
    config = multi_connector(host_memory(), broken, names=["cpu", "broken"])
    env = {SWITCH: str(switch), "VLLM_LOG_STATS_INTERVAL": "1"}  # in seconds: each time, the stats are summed up
    with (
        Collector() as collector,
        serve(
            model, tmp_path, config, "--otlp-traces-endpoint", collector.endpoint, env={**env, **collector.env}
        ) as server,
    ):

        def faults() -> dict[str, float]:
            told = [s for s in server.metrics() if s.name == "kvobs_internal_errors_total"]
            return {s.labels["where"]: s.value for s in told if s.value}

        def every_place_was_hit() -> bool:
            ask_all(server, PROMPTS[:2])
            return faults().keys() == FAULTS.keys()

        def loaded() -> float:
            return total(server, "vllm:external_prefix_cache_hits_total")

        expected = compute_and_load(server)
        before = loaded()
        assert before > 40 * 100
        assert faults() == {}

        switch.touch()
        assert compute_and_load(server) == expected
        assert loaded() == 2 * before
        assert eventually(every_place_was_hit), faults()
        switch.unlink()

        served = total(server, "kvobs_lookups_total")
        assert compute_and_load(server) == expected
        assert eventually(lambda: total(server, "kvobs_lookups_total") >= served + 4 * len(PROMPTS))


def test_every_place_is_sabotaged() -> None:
    # "version" is no fault of this process: its peer is of another version.
    assert set(FAULTS) == set(INTERNAL_ERRORS.labels["where"]) - {"version"}
