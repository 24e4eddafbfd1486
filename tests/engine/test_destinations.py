"""Servers without stat logging have an exporter, and say so in a line; `test_exporter` has offline use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvobs.demo.run import files, host_memory, multi_connector
from tests.engine.exported import PORT, by_itself
from tests.engine.serving import eventually, prompt, serve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("_default_port")]

OFF = "--disable-log-stats: vLLM's stat logging is off"


def test_a_server_without_stats_has_metrics_at_an_exporter(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), files(tmp_path / "disk"))
    with serve(model, tmp_path, config, "--disable-log-stats") as plain:
        server = by_itself(plain)
        plain.complete(prompt("by itself"), 1)
        assert eventually(lambda: sum(s.value for s in server.metrics() if s.name == "kvobs_lookups_total") == 2, 10)
        (line,) = re.findall(f".*{OFF}.*", plain.log.read_text())
    assert "INFO" in line
    assert f"metrics are at http://127.0.0.1:{PORT}/metrics" in line


def test_a_server_without_stats_and_exporter_warns_once(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), names=["host"])
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = None
    with serve(model, tmp_path, config, "--disable-log-stats") as server:
        (line,) = re.findall(f".*{OFF}.*", server.log.read_text())
    assert "WARNING" in line
    assert "Fix: remove kv_connector_extra_config.kvobs.exporter" in line
