"""The same lives with the newest vLLM, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.hosts import environment, prepare

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.contract
def test_lives_are_right_with_the_newest_vllm() -> None:
    folder = prepare(["0.33.0"])["0.33.0"]
    names = ("lives", "handoffs", "hisparse", "moriio", "hidden_states", "verify")
    files = [f"tests/connectors/test_{name}.py" for name in names]
    only = ["-k", "v2 and then or handed or own_router or hisparse or moriio or hidden or verify and not refilled"]
    command = [sys.executable, "-m", "pytest", "-q", *files, *only]
    env = environment(folder, ROOT) | {"VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
