import logging

import pytest

from kvobs import notices


def test_a_thing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert notices.once("k", logging.WARNING, "said %d", 1) is True
    assert notices.once("k", logging.WARNING, "said %d", 2) is False
    assert [record.getMessage() for record in caplog.records] == ["said 1"]


def test_what_was_said_is_bounded_kind_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that names ever new things does not keep what others have to say out of the log."""
    for key, times in {"k{}": 128, "kind:{}": 128, "kind:{}:more": 128, "kind:{:0300}": 1}.items():
        notices.forget()
        assert sum(notices.once(key.format(i), logging.DEBUG, "again") for i in range(5000)) == times
        assert notices.once("other:1", logging.DEBUG, "heard")
    assert max(len(key) for said in notices._said.values() for key in said) <= 256
