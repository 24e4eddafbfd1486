"""Numbers are the same after the wire, as objects and as lines; what is malformed is left out."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given

from kvobs.schema import signals
from kvobs.schema.spans import Record
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.wire import PROTOCOL, EngineInfo, Increments
from tests.support.contexts import record
from tests.support.payloads import engine, numbers


@given(numbers())
def test_numbers_are_the_same_after_a_line(taken: Increments) -> None:
    line = wire.to_line(wire.message(taken))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.read(wire.from_line(line)) == taken._replace(spans=[])


def test_span_records_are_the_same_after_a_line() -> None:
    group = [record(), record(attributes={"kv_transfer.connector": "one", "n": 1, "x": 0.5})]
    (read,) = wire.spans(wire.from_line(wire.to_line(wire.message(Increments.none()._replace(spans=[group])))))
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


def sent(**parts: Any) -> dict[str, Any]:
    return {**wire.message(Increments.none()), **parts}


REFUSED = None
"""What is malformed is refused with all that came with it: it is not known what the rest is worth."""


def is_read(part: str, value: Any, expected: Any) -> bool:
    others: dict[str, Any] = {"counts": [5, 6], "gauges": {7: 8}, "opened": [["s", 0, 1]], part: value}
    if expected is REFUSED:
        with pytest.raises(ValueError, match=f"a payload's {'rows' if part == 'opened' else part[:5]}"):
            wire.read(sent(**others))
        return True
    return bool(getattr(wire.read(sent(**others)), part) == expected)


FARTHEST = wire.SLOTS * wire.DIGITS - 1


@pytest.mark.parametrize(
    ("packed", "counts"),
    [
        ([], {}),
        ([0, 1], {0: 1}),
        ([0, 0], {}),
        ([0, wire.BASE - 1], {0: wire.BASE - 1}),
        ([wire.SLOTS - 1, 5, 1, 6], {wire.SLOTS - 1: 5, 0: 6 * wire.BASE}),
        ([FARTHEST, 7], {wire.SLOTS - 1: 7 * wire.BASE ** (wire.DIGITS - 1)}),
        ([3, 1, -3, 2, 3, 4], {3: 5, 0: 2}),
        ([2 * wire.SLOTS + 3, 1, 0, 2], {3: 3 * wire.BASE**2}),
        *[(malformed, REFUSED) for malformed in (
            [0, -1], [0, wire.BASE], [-1, 5, 1, 6], [FARTHEST + 1, 7], [FARTHEST, -7], [FARTHEST, wire.BASE],
            [3, 1, 4], [3, True], [3, 1.0], ["3", 1], (3, 1), None,
        )],
    ],
    ids=str,
)  # fmt: skip
def test_a_peers_counts_are_taken_within_the_limits(packed: Any, counts: dict[int, int] | None) -> None:
    """Memory and numbers of this process must not be the peer's choice."""
    assert is_read("counts", packed, counts)


@pytest.mark.parametrize(
    ("gauges", "taken"),
    [
        ({0: 0, wire.SLOTS - 1: 2**63 - 1}, {0: 0, wire.SLOTS - 1: 2**63 - 1}),
        *[(malformed, REFUSED) for malformed in (
            {0: 1, -1: 1}, {wire.SLOTS: 1}, {1: -1}, {2: 2**63}, {True: 1}, {3: True}, {2: 1.0}, {"3": 1}, [[1, 1]]
        )],
    ],
    ids=str,
)  # fmt: skip
def test_a_peers_gauges_are_taken_within_the_limits(gauges: Any, taken: dict[int, int] | None) -> None:
    assert is_read("gauges", gauges, taken)


@pytest.mark.parametrize(
    ("row", "is_taken"),
    [
        (["s", 0, 0], True),
        (["s", 3, "x" * wire.LABEL, wire.BASE**wire.DIGITS - 1], True),
        *[(malformed, False) for malformed in (
            ["s", 3, "x" * (wire.LABEL + 1), 1], ["x" * (wire.LABEL + 1), 3, 1], ["s", 3, wire.BASE**wire.DIGITS],
            ["s", 3, -1], ["s", -1, 1], ["s", True, 1], ["s", 1, True], ["s", 1.0, 1], ["s", 1, "x", 1.0], [5, 1, 1],
            ["s", 1, 5, 1], ["s", 1], ("s", 1, 1),
        )],
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_peers_rows_are_taken_within_the_limits(row: Any, is_taken: bool) -> None:
    assert is_read("opened", [row], [row] if is_taken else REFUSED)
    assert is_read("opened", [["s", 0, 1], row], [["s", 0, 1], row] if is_taken else REFUSED)
    assert is_read("opened", (row,), REFUSED)


def test_rows_have_a_limit() -> None:
    rows = [["s", 0, str(n), 1] for n in range(wire.ROWS + 1)]
    assert is_read("opened", rows, rows[:-1])


def test_groups_of_spans_are_lists() -> None:
    assert wire.spans(sent(spans=[[1], (2,), 3, []])) == [[1], []]
    assert wire.spans(sent(spans=([1],))) == []
    assert [*wire.read(sent(spans=[[], 2])).spans] == [[]]


def test_counts_are_packed_by_gaps_that_add_up_to_0_and_no_number_is_too_large_for_msgpack() -> None:
    assert wire.packed({7: 2, 3: 5}) == [3, 5, 4, 2, -7, 0]
    assert wire.packed({0: 5}) == [0, 5]
    assert wire.packed({1: wire.BASE - 1, 2: -1, 3: 0, 4: 4}) == [1, wire.BASE - 1, 3, 4, -4, 0]
    large = {1: 5 * wire.BASE**2 + 7, 2: wire.BASE, 3: -1}
    assert wire.packed(large) == [1, 7, wire.SLOTS + 1, 1, wire.SLOTS - 1, 5, -2 * wire.SLOTS - 1, 0]


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


# --- an engine's first message


def test_a_first_message_is_read_as_it_was_written() -> None:
    one = engine(port=9464, index=3, has_spans=True, endpoint="http://x:4317", otlp_metrics=True, linger_s=1.5)
    assert EngineInfo.read(wire.from_line(wire.to_line(one.message()))) == one


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hello": PROTOCOL + 1}, f"version {PROTOCOL + 1}, allowed: {PROTOCOL}"),
        ({"hello": None}, "version None"),
        ({"connectors": [{"name": "x"}]}, "can't be read"),
        ({"connectors": 1}, "can't be read"),
        ({"unknown": 1}, "can't be read"),
    ],
)
def test_another_message_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        EngineInfo.read({**engine().message(), **change})
    with pytest.raises(ValueError, match="version None"):
        EngineInfo.read({"v": 3})


# --- increments


def test_increments_of_any_size_are_added_and_what_is_added_stays_as_it_is() -> None:
    mine, more = Increments.none(), Increments({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
    for _ in range(3):
        mine.add(more)
        mine.add(Increments({1: 1}, [], {5: 7, 8: 9}))
    assert mine == Increments({1: 3 * 10**30 + 3, 2: 3}, [["s", 0, 3 * 10**30]], {5: 7, 8: 9})
    assert more == Increments({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
