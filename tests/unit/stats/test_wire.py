"""Numbers are the same after the wire, as objects and as lines; what is malformed is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from kvobs.signals import TABLE_DIGEST
from kvobs.spans import Record
from kvobs.stats import wire
from kvobs.telemetry.taken import Taken, nothing
from tests.support.contexts import record
from tests.support.payloads import numbers


def payload(taken: Taken) -> dict[str, Any]:
    return {"v": wire.VERSION, "table": TABLE_DIGEST, "children": {}, **wire.parts(taken)}


@given(numbers())
def test_numbers_are_the_same_after_a_line(taken: Taken) -> None:
    line = wire.to_line(payload(taken))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.read(wire.from_line(line)) == taken._replace(spans=[])


def test_span_records_are_the_same_after_a_line() -> None:
    group = [record(), record(attributes={"kv_transfer.connector": "one", "n": 1, "x": 0.5})]
    (read,) = wire.spans(wire.from_line(wire.to_line(payload(nothing()._replace(spans=[group])))))
    assert [tuple(row) for row in read] == [(*one[:-1], list(one.links)) for one in group]
    assert all(Record.read(row) is not None for row in read)


@pytest.mark.parametrize("line", [b"", b"[1]", b"1", b"{", b"\xff\xfe", b"null", b'"x"'])
def test_what_is_no_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's, or ours
        wire.from_line(line)


@pytest.mark.parametrize("gauges", [[[1]], [1], [[[], 1]], [[1, 2, 3]]])
def test_malformed_gauges_are_a_value_error(gauges: Any) -> None:
    with pytest.raises(ValueError, match="gauges are pairs|dictionary update sequence"):
        wire.from_line(json.dumps({"gauges": gauges}).encode())


def test_another_version_has_no_numbers() -> None:
    other = payload(Taken({1: 1}, [], {}, [[record()]]))
    assert wire.read({**other, "v": wire.VERSION + 1}) == nothing()
    assert wire.spans({**other, "table": 0}) == []
