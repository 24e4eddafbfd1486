"""What all tests share: quiet vLLM, no hub, and a clean slate for what kvobs says once."""

import logging
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

import pytest

from kvobs import notices
from tests.scripted import SCRIPTS, Script


@pytest.fixture(autouse=True)
def _clean_slate() -> None:
    """Let each test hear every notice, and write its own scripts."""
    notices.forget()
    SCRIPTS.clear()
    logging.getLogger("vllm.kvobs").setLevel(logging.DEBUG)


@pytest.fixture
def a() -> Script:
    return Script("a")


@pytest.fixture
def b() -> Script:
    return Script("b")
