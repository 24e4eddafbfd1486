"""A server that is killed or asked to end under load ends with kvobs as vLLM's own MultiConnector has it end.

The other cases, and both side by side: ``python -m tests.engine.endings``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.endings import CASES, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BY_STOCK = {"kill -9 of EngineCore": {"HTTP 500"}}
"""What requests in flight get from vLLM 0.32 with its own MultiConnector; the server's exit status is 0."""


@pytest.mark.parametrize("case", BY_STOCK)
def test_a_server_ends_as_stock_does_and_leaves_nothing(
    case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
    ending = run(CASES[case], "kvobs", model, tmp_path)
    assert (ending.exit_code, set(ending.in_flight), ending.processes) == (0, BY_STOCK[case], ())
    assert ending.seconds < 15
    assert ending.metrics <= {"HTTP 200", "hung up on", "refused"}
    assert ending.counted is not None
    at_least, counted, at_most = ending.counted
    assert 0 < at_least <= counted <= at_most
    assert not [name for name in ending.files if "kvobs" in name]
