"""Engines whose metrics the API server can't show have an exporter, however they are started, and say so in a line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvobs.demo.processes import kill_group
from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.demo.server import environment
from tests.engine.exported import PORT, by_itself
from tests.engine.forked_server import template
from tests.engine.serving import eventually, importing_tests, prompt, serve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("_default_port")]

OFF = "--disable-log-stats: vLLM's stat logging is off"
OFFLINE = """
import json, sys, time, urllib.request
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(sys.argv[1], kv_transfer_config=json.loads(sys.argv[2]), dtype="float32", enforce_eager=True,
              max_model_len=2048, block_size=32)
    llm.generate(["Numbers " * 100])
    for _ in range(60):
        time.sleep(0.5)
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[3]}/metrics").read().decode()
        except OSError:
            continue
        if "kvobs_lookups_total{" in page:
            print(page)
            break
"""


def lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if OFF in line]


def test_a_server_without_stats_has_metrics_at_an_exporter(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), files(tmp_path / "disk"))
    with serve(model, tmp_path, config, "--disable-log-stats") as plain:
        server = by_itself(plain)
        plain.complete(prompt("by itself"), 1)
        assert eventually(lambda: sum(s.value for s in server.metrics() if s.name == "kvobs_lookups_total") == 2, 10)
        (line,) = lines(plain.log.read_text())
    assert "INFO" in line
    assert f"metrics are at http://127.0.0.1:{PORT}/metrics" in line


def test_a_server_without_stats_and_exporter_warns_once(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), names=["host"])
    config["kv_connector_extra_config"]["kvobs"]["exporter"] = None
    with serve(model, tmp_path, config, "--disable-log-stats") as server:
        (line,) = lines(server.log.read_text())
    assert "WARNING" in line
    assert "Fix: remove kv_connector_extra_config.kvobs.exporter" in line


@pytest.mark.parametrize("has_core_process", [True, False])
def test_offline_use_has_metrics_at_an_exporter(model: Path, tmp_path: Path, has_core_process: bool) -> None:
    """There stat logging is off by default, in EngineCore's own process and within that of the user."""
    script, log = tmp_path / "offline.py", tmp_path / "offline.log"
    script.write_text(OFFLINE)
    config = json.dumps(multi_connector(host_memory(), files(tmp_path / "disk")))
    env = environment() | importing_tests() | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_core_process))}
    with log.open("wb") as out:
        command = [str(script), str(model), config, str(PORT)]
        run = template("tests.engine.forking_offline").fork(command, env, out)
        try:
            assert run.wait(300) == 0, log.read_text()
        finally:
            kill_group(run.pid)
    text = log.read_text()
    assert len(lines(text)) == 1
    assert re.findall(r"^kvobs_lookups_total\{.*\} (.*)$", text, re.MULTILINE) == ["1.0", "1.0"]
