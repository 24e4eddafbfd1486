"""A fault of kvobs's own is counted, logged once a place, and raised on only under pytest."""

import pytest

from kvobs import faults


def fail(where: str) -> None:
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError:
        faults.contain(where)


@pytest.mark.usefixtures("in_production")
def test_it_is_contained_counted_by_place_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for where in ("record", "record", "apply"):
        fail(where)
    assert [record.args for record in caplog.records] == [("record",), ("apply",)]
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)
    assert faults.take() == {"record": 2, "apply": 1}
    assert faults.take() == {}


def test_under_pytest_it_is_raised_on() -> None:
    with pytest.raises(ZeroDivisionError):
        fail("record")
    assert faults.take() == {"record": 1}
