"""Faults inside kvobs's own telemetry, on a real server: they cost numbers, and nothing else."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.collector import Collector
from kvobs.demo.run import host_memory
from kvobs.demo.server import Server, ServerError
from kvobs.schema.signals import INTERNAL_ERRORS
from tests.engine import seams
from tests.engine.metered import configuration
from tests.engine.sabotage import SWITCH
from tests.engine.serving import (
    BOTH_RANKS_ON_ONE_CORE,
    TOKENS,
    eventually,
    hang_up,
    of_tests,
    prompt,
    serve,
    total,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STORED = {"offer": "stored", "async": True}
ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {**STORED, "load_ms": {"0": 5, "1": 30}},
    {"offer": "stored"},
    {"promise": True, "save_ms": {"0": 5, "1": 30}},
    {**STORED, "fail": "blocks"},
    {"stray": "save"},
)
PROMPTS = {prompt("contained", i): ORDERS[i % len(ORDERS)] for i in range(30)}

NOT_HERE = {
    "aggregation.aggregator:KVOutputAggregator._report_stuck": "no report of kvobs's workers stays there",
    "routing.open_transfers:OpenTransfers.note_in_aggregator": "the same",
    "routing.outcomes:Outcomes.sync_loads_failed": "every failed load there is asynchronous",
    **dict.fromkeys(
        (
            "routing.fastest:Fastest.decide",
            "routing.fastest:Fastest.taken",
            "routing.fastest:Fastest.admitted",
            "routing.fastest:Fastest.load_ended",
            "routing.outcomes:Outcomes.decided",
            "telemetry.requests.request_traces:Traces.decided",
        ),
        "of the load policy fastest: without its decisions other tokens are loaded",
    ),
    "children.layer_calls:LayerCalls._failed": "a child that raises in a layer's hook ends the engine",
    "telemetry.telemetry:_trace": "passed once, at start",
    "telemetry.timeline.flight:begin": "passed once, at start",
    "telemetry.timeline.black_box:begin": "passed once, at start",
    "telemetry.timeline.black_box:BlackBox.close": "passed once, at the end",
    "telemetry.telemetry:_report": "passed once, at start",
    "telemetry.requests.request_log:RequestLog.close": "passed once, at the end",
    "export.prometheus:MultiKVConnectorPromMetrics._define_own": "passed once, at start",
    "export.prometheus:MultiKVConnectorPromMetrics._make_cutter": "passed once, at start",
    **dict.fromkeys(
        (
            "connector:_feed",
            "children.collector:divert",
            "export.feed:Feed._add",
            "export.feed:Feed._run",
            "export.feed:Feed._say_goodbye",
        ),
        "on the way to the exporter, which is off here",
    ),
    **dict.fromkeys(
        (
            "export.process:Exporter.run",
            "export.process:Exporter._make_cutter",
            "export.otlp_metrics:MetricsPush._run",
            "export.otlp_metrics:MetricsPush._try_to_send",
        ),
        "in the exporter's own process, from which no exception reaches an engine",
    ),
}
"""Seams that no request leads to; ``tests/unit/test_containment.py`` breaks them in one process."""


def test_faults_in_every_seam_of_the_telemetry_change_no_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    folder = tmp_path / "sabotage"
    (folder / "hit").mkdir(parents=True)
    busy = {**of_tests("BusyChild"), "kv_connector_module_path": "tests.engine.sabotage"}
    config = configuration(of_tests("SteeredChild"), host_memory(), busy, names=["steered", "cpu", "busy"])
    config["kv_connector_extra_config"]["kvobs"]["tracing"] = {"level": "calls", "propagate": True}
    config["kv_connector_extra_config"]["kvobs"]["timeline"] = {"dir": str(tmp_path / "timeline")}
    config["kv_connector_extra_config"]["kvobs"] |= {"report": "always", "request_log": str(tmp_path / "requests")}
    env = {
        SWITCH: str(folder),
        "VLLM_LOG_STATS_INTERVAL": "1",  # in seconds: each time, the stats are summed up
        "PYTHONDONTWRITEBYTECODE": "1",
        # So few spans wait for the collector that some are dropped.
        **dict.fromkeys(("OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"), "8"),
        **BOTH_RANKS_ON_ONE_CORE,
    }
    with Collector() as collector:
        args = ("--otlp-traces-endpoint", collector.endpoint)
        with serve(model, tmp_path, config, *args, tensor_parallel=2, env={**env, **collector.env}) as server:
            expected = answers(server, external=True)
            loaded = total(server, "vllm:external_prefix_cache_hits_total")
            assert answers(server) == expected
            loaded = total(server, "vllm:external_prefix_cache_hits_total") - loaded
            assert loaded > 20 * 100
            assert faults(server) == {}

            (folder / "broken").touch()
            assert answers(server, external=True) == expected
            before = total(server, "vllm:external_prefix_cache_hits_total")
            assert answers(server) == expected
            assert total(server, "vllm:external_prefix_cache_hits_total") - before == loaded

            def every_seam_is_broken() -> bool:
                rare(server, folder / "raising")
                return not unbroken(folder)

            assert eventually(every_seam_is_broken), unbroken(folder)
            assert faults(server).keys() == set(seams.find().values())
            assert set(seams.find().values()) == set(INTERNAL_ERRORS.labels["where"]) - {"version"}
            (folder / "broken").unlink()

            (folder / "jumping").touch()
            assert answers(server) == expected
            (folder / "jumping").unlink()

            counted = total(server, "kvobs_lookups_total")
            assert answers(server) == expected
            assert eventually(lambda: total(server, "kvobs_lookups_total") >= counted + 3 * len(PROMPTS))
            log = server.log.read_text()
    lines = re.findall(r"internal error in kvobs's telemetry \((\w+)\)", log)
    assert max(lines.count(where) for where in lines) <= 4, "once for each process"
    written = set((folder / "written").read_text().splitlines())
    assert sorted(line.partition(" ")[0] for line in written) == [
        "kvobs.telemetry.requests.request_log",
        *["kvobs.telemetry.timeline.ring_files"] * 6,
    ], "of recordings and pages the scheduler's and the ranks'"


def answers(server: Server, *, external: bool = False) -> dict[str, Any]:
    """Return the completions of the same prompts, computed anew or loaded from the children."""
    server.reset_prefix_cache(external=external)

    def ask(text: str) -> Any:
        (choice,) = server.complete(text, TOKENS, kv_transfer_params={"steer": {"steered": PROMPTS[text]}}).raw[
            "choices"
        ]
        return choice

    with ThreadPoolExecutor(6) as pool:
        return dict(zip(PROMPTS, pool.map(ask, PROMPTS), strict=True))


def rare(server: Server, raising: Path) -> None:
    """Cause what a plain request does not: an abort during a load, and a child that raises."""
    hang_up(
        server, 0.1, prompt("abort"), kv_transfer_params={"steer": {"steered": {**STORED, "offer": 64, "load_ms": 200}}}
    )
    raising.touch()
    with pytest.raises(ServerError):
        server.request("/reset_prefix_cache?reset_external=true", {})
    raising.unlink()
    saved = {"steer": {"steered": ORDERS[3]}}
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: server.complete(prompt("after", i), TOKENS, kv_transfer_params=saved), range(12)))


def faults(server: Server) -> dict[str, float]:
    noted = [s for s in server.metrics() if s.name == "kvobs_internal_errors_total"]
    return {s.labels["where"]: s.value for s in noted if s.value}


def unbroken(folder: Path) -> set[str]:
    return set(seams.find()) - set(NOT_HERE) - {path.name for path in (folder / "hit").iterdir()}


def test_every_exception_is_a_seam() -> None:
    assert set(NOT_HERE) <= set(seams.find())
