"""``kvobs.testing`` runs with the oldest and the newest vLLM: its page's example, and a scripted connector."""

import pytest

from tests.support.example import TESTS

from . import hosts
from .test_hosts import probe

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]


@pytest.mark.parametrize("version", [min(hosts.VERSIONS), max(hosts.VERSIONS)])
def test_the_example_and_a_load_on_two_ranks_run(version: str) -> None:
    waits = "WAITING_FOR_REMOTE_KVS"
    statuses = [waits, waits, "FINISHED_LENGTH_CAPPED", "gone"]
    assert probe(version, module="example") == {"vllm": version, "passed": TESTS, "statuses": statuses}
