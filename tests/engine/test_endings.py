"""A server that is killed or asked to end under load ends with kvobs as vLLM's own MultiConnector has it end.

The other cases, and both side by side: ``python -m tests.engine.endings``.
"""

import pytest

from tests.engine.endings import CASES, run
from tests.engine.serving import ServedEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_killed_it_ends_as_stock_leaving_nothing(served_engine: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM 0.32 and its own MultiConnector requests in flight get HTTP 500; the server's exit status is 0."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    ending = run(CASES["kill -9 of EngineCore"], "kvobs", served_engine)
    assert (ending.exit_code, set(ending.in_flight), ending.processes) == (0, {"HTTP 500"}, ())
    assert ending.seconds < 15
    assert ending.metrics <= {"HTTP 200", "hung up on", "refused"}
    assert ending.counted is not None
    at_least, counted, at_most = ending.counted
    assert 0 < at_least <= counted <= at_most
    of_other_tests = "kvobs-test-"  # that run on this machine
    assert not [name for name in ending.files if "kvobs" in name and not name.startswith(of_other_tests)]
