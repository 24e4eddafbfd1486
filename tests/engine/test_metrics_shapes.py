"""Metrics of servers with several API servers or engines or without stat logging, and loads that change no answer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.export.starter import AUTO_AFTER_S
from tests.engine import metered
from tests.engine.exported import PORT, SHOWN_BY_NONE, by_itself
from tests.engine.readings import Growth, assert_every_call_is_counted, kvobs_samples
from tests.engine.serving import BOTH_RANKS_ON_ONE_CORE, ServedEngine, ask_all, eventually, hit, prompt

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("_default_port")]


def test_with_two_api_servers_an_exporter_has_the_numbers(served_engine: ServedEngine, tmp_path: Path) -> None:
    """The engine starts it: each of them shows files of prometheus_client only."""
    config = metered.configuration(
        metered.counting_entry(tmp_path), host_memory(), files(tmp_path / "disk"), names=["steered", "cpu", "disk"]
    )
    texts = [text + "." if len(text) % 32 == 1 else text for text in (prompt("file", i) for i in range(10))]
    with served_engine(config, "--api-server-count", "2") as plain:
        server = by_itself(plain)
        with Growth(server, connector="steered") as grown:
            metered.ask_in_turn(server, 60)
        metered.assert_counted_in_turn(grown, 60)
        computed = ask_all(server, texts)
        for loads, external in (("cpu", False), ("disk", True)):
            server.reset_prefix_cache(external=external)
            with Growth(server) as grown:
                assert ask_all(server, texts) == computed
            assert grown("kvobs_loads_total", outcome="ok", connector=loads) == grown("kvobs_loads_total") == 10
            tokens = grown("kvobs_load_tokens_total", connector=loads)
            assert tokens == grown("vllm:external_prefix_cache_hits_total") > 10 * 64
            assert grown("kvobs_load_bytes_total", connector=loads) == tokens * metered.BYTES_PER_TOKEN
        assert_every_call_is_counted(server, tmp_path / "counts", "steered", ranks=1)

        metered.assert_nothing_in_flight(server)
        samples = kvobs_samples(server)
        assert not [s for s in samples if "pid" in s.labels]
        assert len(samples) == len({(s.name, *sorted(s.labels.items())) for s in samples})
        assert not [s for s in samples if s.name.startswith(("kvobs_rank_skew", "kvobs_slowest"))], "there is one rank"
        metered.assert_promtool_finds_no_fault(server)


@pytest.mark.parametrize("api_servers", [1, 2])
def test_data_parallel_engines_have_series_of_their_own(
    served_engine: ServedEngine, tmp_path: Path, api_servers: int
) -> None:
    """By default there are as many API servers as engines, and the engine starts one exporter of both."""
    config = metered.configuration(metered.counting_entry(tmp_path), host_memory(), names=["steered", "cpu"])
    args = ("--data-parallel-size", "2", *(("--api-server-count", "1") if api_servers == 1 else ()))
    with served_engine(config, *args, env=BOTH_RANKS_ON_ONE_CORE) as plain:
        server = plain if api_servers == 1 else by_itself(plain)
        for engine, requests in (("0", 24), ("1", 40)):
            with Growth(server, connector="steered", engine=engine) as grown:
                metered.ask_in_turn(server, requests, engine)
            metered.assert_counted_in_turn(grown, requests)
        for engine in ("0", "1"):
            assert hit(server, engine) >= 3 * 32
            assert_every_call_is_counted(server, tmp_path / "counts", "steered", ranks=1, engine=engine)
            series = [s for s in kvobs_samples(server) if s.labels.get("engine") == engine]
            assert 0 < len(series) <= metered.SERIES_AT_MOST
        metered.assert_nothing_in_flight(server)
        up = {s.labels["engine"]: s.value for s in server.metrics() if s.name == "kvobs_engine_up"}
        assert up == ({} if api_servers == 1 else {"0": 1, "1": 1})


def top(port: int) -> dict[str, Any]:
    """Return what `kvobs top` finds on this host, without an address, about the server at this port."""
    found = CliRunner().invoke(app, ["top", "--once", "--json", "--interval", "1"])
    servers = [one for one in json.loads(found.output)["servers"] if one["address"].endswith(f" at port {port}")]
    assert len(servers) == 1, found.output
    return dict(servers[0])


def test_a_server_without_stats_has_metrics_at_an_exporter(served_engine: ServedEngine, tmp_path: Path) -> None:
    config = metered.configuration(metered.counting_entry(tmp_path), host_memory(), names=["steered", "cpu"])
    # Spawned: the port is on its command line.
    with served_engine(config, "--disable-log-stats", is_spawned=True) as plain:
        seen = top(plain.port)  # of an engine whose exporter has not started yet
        assert (seen["error"], [row["connector"] for row in seen["connectors"]]) == (None, ["steered", "cpu"])
        metered.ask_in_turn(plain, 40)
        server = by_itself(plain)
        assert sum(s.value for s in server.metrics() if s.name == "kvobs_lookups_total") == 80
        assert_every_call_is_counted(server, tmp_path / "counts", "steered", ranks=1, has_stats=False)
        metered.assert_nothing_in_flight(server)
        (line,) = re.findall(f".*{SHOWN_BY_NONE}.*", plain.log.read_text())
    assert "INFO" in line
    assert f"serves the metrics at http://127.0.0.1:{PORT}/metrics" in line


def test_a_server_without_stats_and_exporter_warns_once(served_engine: ServedEngine) -> None:
    config = multi_connector(host_memory(), names=["host"])
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = None
    with served_engine(config, "--disable-log-stats") as server:
        lines = re.compile(f".*are not exported: {SHOWN_BY_NONE}, and kvobs.exporter is null")
        assert eventually(lambda: bool(lines.search(server.log.read_text())), AUTO_AFTER_S + 30)
        (line,) = lines.findall(server.log.read_text())
    assert "WARNING" in line
