"""Real engines whose metrics reach nobody log one line about it at the start, however they are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvobs.demo.processes import kill_group
from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.demo.server import environment
from tests.engine.forked_server import template
from tests.engine.serving import importing_tests, serve

pytestmark = pytest.mark.engine

WARNING = "--disable-log-stats: vLLM's stat logging is off"
OFFLINE = """
import json, sys
from vllm import LLM

if __name__ == "__main__":
    LLM(sys.argv[1], kv_transfer_config=json.loads(sys.argv[2]), dtype="float32", enforce_eager=True,
        max_model_len=2048, block_size=32)
"""


def warnings(log: str) -> list[str]:
    return [line for line in log.splitlines() if WARNING in line]


def test_a_server_without_stats_warns_once(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), files(tmp_path / "disk"))
    with serve(model, tmp_path, config, "--disable-log-stats") as server:
        (line,) = warnings(server.log.read_text())
    assert "WARNING" in line
    assert "Fix: set kv_connector_extra_config.kvobs.exporter to {}" in line


@pytest.mark.parametrize("has_core_process", [True, False])
def test_offline_use_warns_once(model: Path, tmp_path: Path, has_core_process: bool) -> None:
    """There stat logging is off by default, in EngineCore's own process and within that of the user."""
    script, log = tmp_path / "offline.py", tmp_path / "offline.log"
    script.write_text(OFFLINE)
    config = json.dumps(multi_connector(host_memory(), files(tmp_path / "disk")))
    env = environment() | importing_tests() | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(has_core_process))}
    with log.open("wb") as out:
        command = [str(script), str(model), config]
        run = template("tests.engine.forking_offline").fork(command, env, out)
        try:
            assert run.wait(300) == 0, log.read_text()
        finally:
            kill_group(run.pid)
    assert len(warnings(log.read_text())) == 1
