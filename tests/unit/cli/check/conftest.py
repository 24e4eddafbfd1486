"""What the tests of `kvobs check` on texts share."""

from unittest.mock import Mock

import pytest

from tests.support.contexts import no_otel_variables


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no port be taken, and no variable be set."""
    no_otel_variables(monkeypatch)
    monkeypatch.setattr("kvobs.export.listening.listen", Mock())
