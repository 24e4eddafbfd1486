"""Numbers are the same after the wire, as objects and as lines; what is malformed is left out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given

from kvobs import signals
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


def sent(**parts: Any) -> dict[str, Any]:
    return {**payload(nothing()), **parts}


@pytest.mark.parametrize(
    ("packed", "counts"),
    [
        ([0, 1], {0: 1}),
        ([0, 0], {}),
        ([0, -1], {}),
        ([0, wire.MOST], {0: wire.MOST}),
        ([0, wire.MOST + 1], {}),
        ([-1, 5, 1, 6], {0: 6}),
        ([wire.SLOTS - 1, 5, 1, 6], {wire.SLOTS - 1: 5}),
        ([3, 1, -3, 2, 3, 4], {3: 5, 0: 2}),
        ([3, 1, 4], {3: 1}),
        ([3, True], {}),
        ([3, 1.0], {}),
        ((3, 1), {}),
        (None, {}),
    ],
    ids=str,
)
def test_of_a_peers_counts_those_within_the_limits_are_taken(packed: Any, counts: dict[int, int]) -> None:
    """Memory and numbers of this process must not be the peer's choice."""
    assert wire.read(sent(counts=packed)).counts == counts


@pytest.mark.parametrize(
    ("gauges", "taken"),
    [
        ({0: 0, wire.SLOTS - 1: 2**63 - 1}, {0: 0, wire.SLOTS - 1: 2**63 - 1}),
        ({-1: 1, wire.SLOTS: 1, 1: -1, 2: 2**63}, {}),
        ({True: 1, 3: True, 2: 1.0, "3": 1}, {}),
        ([[1, 1]], {}),
    ],
    ids=str,
)
def test_of_a_peers_gauges_those_within_the_limits_are_taken(gauges: Any, taken: dict[int, int]) -> None:
    assert wire.read(sent(gauges=gauges)).gauges == taken


@pytest.mark.parametrize(
    ("row", "is_taken"),
    [
        (["s", 0, 0], True),
        (["s", 3, "x" * wire.LABEL, wire.MOST], True),
        (["s", 3, "x" * (wire.LABEL + 1), 1], False),
        (["x" * (wire.LABEL + 1), 3, 1], False),
        (["s", 3, wire.MOST + 1], False),
        (["s", 3, -1], False),
        (["s", -1, 1], False),
        (["s", True, 1], False),
        (["s", 1, True], False),
        (["s", 1.0, 1], False),
        (["s", 1, "x", 1.0], False),
        ([5, 1, 1], False),
        (["s", 1, 5, 1], False),
        (["s", 1], False),
        (("s", 1, 1), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_a_peers_rows_those_within_the_limits_are_taken(row: Any, is_taken: bool) -> None:
    assert wire.read(sent(opened=[row])).opened == ([row] if is_taken else [])
    assert wire.read(sent(opened=(row,))).opened == []


def test_rows_have_a_limit_and_malformed_ones_do_not_count() -> None:
    rows = [["s", 0, str(n), 1] for n in range(wire.ROWS + 1)]
    assert wire.read(sent(opened=[["s"], *rows])).opened == rows[:-1]


def test_groups_of_spans_are_lists() -> None:
    assert wire.spans(sent(spans=[[1], (2,), 3, []])) == [[1], []]
    assert wire.spans(sent(spans=([1],))) == []
    assert [*wire.read(sent(spans=[[], 2])).spans] == [[]]


def test_counts_are_packed_by_gaps_that_add_up_to_0_and_no_count_is_too_large_for_msgpack() -> None:
    assert wire.parts(Taken({7: 2, 3: 5}, [], {}))["counts"] == [3, 5, 4, 2, -7, 0]
    assert wire.parts(Taken({0: 5}, [], {}))["counts"] == [0, 5]
    assert wire.parts(Taken({1: wire.MOST, 2: wire.MOST + 1, 3: 4}, [], {}))["counts"] == [
        *(1, wire.MOST, 1, wire.MOST, 1, 4, -3, 0)
    ]
    assert wire.parts(nothing()) == wire.empty() == {"counts": [], "opened": [], "gauges": {}, "spans": []}


def test_equal_rows_are_summed_in_the_order_of_their_first() -> None:
    mine, theirs = [["s", 0, "x", 1], ["s", 0, "y", 2]], [["s", 1, "x", 4], ["s", 0, "x", 8]]
    assert wire.add_rows(mine, theirs) == [["s", 0, "x", 9], ["s", 0, "y", 2], ["s", 1, "x", 4]]


def test_a_gauge_is_in_its_unit_and_a_time_that_is_not_set_is_no_number() -> None:
    assert wire.gauge_value(signals.OLDEST_IN_FLIGHT, 1_500_000_000) == 1.5
    assert math.isnan(wire.gauge_value(signals.OLDEST_IN_FLIGHT, 0))
    assert wire.gauge_value(signals.IN_FLIGHT, 0) == 0
    assert wire.gauge_value(signals.IN_FLIGHT, 3) == 3


def test_a_line_is_short_and_ascii_whatever_is_in_it() -> None:
    """A collector of lines must not stumble over a line separator of Unicode in a request's id."""
    assert wire.to_line({"a": [1, 2], "b": "\u2028"}) == b'{"a":[1,2],"b":"\\u2028"}\n'
    assert wire.to_line({"gauges": {5: 6}}) == b'{"gauges":[[5,6]]}\n'
    assert wire.from_line(b'{"gauges":[[5,6]],"a":1}') == {"gauges": {5: 6}, "a": 1}
    assert wire.from_line(b'{"a":1}') == {"a": 1}
