"""Each fault of docs/vllm-faults.md is there: with the installed vLLM, and with the other versions that are fetched."""

import subprocess
import sys
from pathlib import Path

import pytest
from seen import SEEN, mended

from docs.pages import ROOT
from tests.contract import hosts

FOLDER = Path(__file__).parent
PAGE = " ".join((ROOT / "docs" / "vllm-faults.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("name", SEEN)
def test_a_fault_is_there_as_the_page_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")  # vLLM would remove the handlers by which other tests listen
    assert not mended(name)
    assert str(SEEN[name]) in PAGE


@pytest.mark.contract
@pytest.mark.parametrize("version", sorted(hosts.EXTRAS))
def test_the_faults_are_there_under_other_versions(version: str) -> None:
    env = hosts.environment(hosts.prepare([version])[version])
    done = subprocess.run([sys.executable, FOLDER / "seen.py"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
