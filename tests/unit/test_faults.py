"""A fault of kvobs's own is counted, logged once a place, and raised on only under pytest."""

import ast
from pathlib import Path
from threading import Thread

import pytest

import kvobs
from kvobs import faults
from kvobs.schema.signals import INTERNAL_ERRORS, Where


def fail(where: Where) -> None:
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError:
        faults.contain(where)


@pytest.mark.usefixtures("in_production")
def test_fault_is_contained_counted_by_place_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    places: list[Where] = ["record", "record", "merge"]
    for where in places:
        fail(where)
    assert [record.args for record in caplog.records] == [("record",), ("merge",)]
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)
    assert faults.take() == {"record": 2, "merge": 1}
    assert faults.take() == {}
    assert faults.contained("record")(fail).__name__ == "fail"


@pytest.mark.usefixtures("in_production", "hasty_threads")
def test_no_fault_is_lost_while_they_are_taken() -> None:
    def fail_often() -> None:
        for _ in range(100_000):
            fail("record")

    threads = [Thread(target=fail_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    counted = 0
    while any(thread.is_alive() for thread in threads):
        counted += faults.take().get("record", 0)
    assert counted + faults.take().get("record", 0) == 200_000


@pytest.mark.usefixtures("in_production")
def test_a_filter_of_the_log_that_raises_is_suppressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "once", lambda *_, **__: 1 / 0)
    fail("record")
    assert faults.take() == {"record": 1}


def test_under_pytest_it_is_raised_on() -> None:
    with pytest.raises(ZeroDivisionError):
        fail("record")
    assert faults.take() == {"record": 1}


def test_every_place_is_a_label_of_the_metric() -> None:
    """A count of any other place would be lost."""
    places = set()
    for path in Path(kvobs.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("contain", "contained"):
                (place,) = node.args
                if path.name != "faults.py":
                    assert isinstance(place, ast.Constant), f"{path}:{node.lineno}"
                    places.add(place.value)
    assert places == set(INTERNAL_ERRORS.labels["where"]) - {"version"}
