"""The same comparison with the other vLLM versions, one process each: a process imports one vLLM only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract import hosts

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]

REPOSITORY = Path(__file__).resolve().parents[2]
LIVES = max(60, int(os.environ.get("KVOBS_LIVES", "0")))
OTHERS = [version for version in hosts.VERSIONS if version != hosts.INSTALLED]

HAPPENS = ("async load", "sync load", "not yet", "save promised", "preempted", "aborted, RUNNING", "load with dcp")


@pytest.mark.parametrize("version", OTHERS)
def test_connectors_are_called_as_by_the_router_of_this_version(version: str) -> None:
    found = compare(version)
    assert found["vllm"].startswith(version)
    assert not found["faulty"], f"{found['faulty']} of {found['lives']} lives\n\n" + "\n\n".join(found["faults"][:5])
    assert [what for what in HAPPENS if not found["seen"].get(what)] == []
    assert found["calls"] > 100 * LIVES


def compare(version: str) -> dict[str, Any]:
    """Compare the first lives under ``version``, fetching it where it is not there."""
    folder = hosts.prepare([version])[version]
    done = subprocess.run(
        [sys.executable, "-m", "tests.transparency", "--lives", str(LIVES)],
        cwd=REPOSITORY,
        env=hosts.environment(folder, REPOSITORY),
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    if not done.stdout:
        raise AssertionError(f"the comparison failed under vLLM {version}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
