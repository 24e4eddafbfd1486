"""A real server whose loads are slow, and that traces nothing: `kvobs trace` shows where their time went."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.host_offload import SLOW_S
from kvobs.demo.run import FAULTS, with_fault
from tests.engine.serving import TOKENS, ServedEngine, eventually, prompt, total

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KVOBS = Path(sys.executable).parent / "kvobs"


def traced(*arguments: str) -> list[dict[str, Any]]:
    """Return the loads that the command prints."""
    command = [str(KVOBS), "trace", "--json", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found: list[dict[str, Any]] = json.loads(shown.stdout) if shown.returncode == 0 else []
    return found


def test_a_slow_load_of_an_unsampled_request_is_shown_whole(
    served_engine: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    text, mine = prompt("slow"), "slow-load-of-mine"
    with served_engine(with_fault(FAULTS["slow-connector"], tmp_path)) as server:
        server.complete(text, TOKENS)
        server.reset_prefix_cache()
        begin = time.time()
        server.complete(text, TOKENS, headers={"X-Request-Id": mine})
        took_s = time.time() - begin
        assert eventually(lambda: bool(traced("--id", mine)), 20)
        (load,) = traced("--id", mine)
        once_more = traced("--id", mine)
        name = f"load of {load['connector']}, ok"
        shown = subprocess.run(
            [str(KVOBS), "trace", "--id", mine], capture_output=True, text=True, check=True, timeout=60
        )
        tokens = total(server, "kvobs_load_tokens_total", connector=load["connector"])
    assert once_more == [load]
    assert SLOW_S < load["seconds"] < took_s
    parts = {part["part"]: part for part in load["parts"]}
    assert list(parts) == ["request", "queue and lookup", "load cpu", "rank 0", "resume"]
    assert begin - 0.1 < parts["request"]["start"] < begin + 1
    assert load["seconds"] < parts["request"]["seconds"] < took_s
    assert parts["queue and lookup"]["words"].startswith("offered: cpu ")
    assert parts["load cpu"]["words"].startswith(f"{tokens:,.0f} of ")
    assert name in shown.stdout
    assert mine in shown.stdout
