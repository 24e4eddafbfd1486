import logging

import pytest

from kvobs import notices


def test_a_thing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert notices.once("k", logging.WARNING, "said %d", 1) is True
    assert notices.once("k", logging.WARNING, "said %d", 2) is False
    assert [record.getMessage() for record in caplog.records] == ["said 1"]


def test_what_was_said_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    said = sum(notices.once(f"k{i}", logging.DEBUG, "again") for i in range(5000))
    assert said == 1024
