"""An engine with a best-effort connector."""

import pytest

from kvobs.testing import Script
from tests.support.best_effort import Isolating


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> Isolating:
    return Isolating(monkeypatch, a, b)
