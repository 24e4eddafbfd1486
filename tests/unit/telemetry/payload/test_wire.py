"""Numbers are the same after the wire, as objects and as lines; what is malformed is left out."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.probe.increments import Increments
from kvobs.schema import signals
from kvobs.schema.signals import locate, place, slot
from kvobs.schema.spans import Record
from kvobs.telemetry.payload import wire
from tests.support.contexts import record
from tests.support.payloads import NOW_NS, numbers, stopped_clock


@given(numbers(), st.integers(0, 2**40))
def test_numbers_are_the_same_after_a_line(taken: Increments, later_ns: int) -> None:
    """By another host's clock, an age begins as much before now."""
    with stopped_clock():
        line = wire.to_line(wire.message(taken))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    with stopped_clock(NOW_NS + later_ns):
        read = wire.read(wire.from_line(line))
    begun = [at for at, n in taken.gauges.items() if n and locate(at)[0].signal is signals.OLDEST_IN_FLIGHT]
    later = {at: n + later_ns * (at in begun) for at, n in taken.gauges.items()}
    assert read == taken._replace(spans=[], gauges=later)


def test_an_age_is_more_than_nothing_and_begins_after_the_clock() -> None:
    at = place(0, slot(signals.OLDEST_IN_FLIGHT, "resume"))
    with stopped_clock(10):
        assert wire.message(Increments({}, [], {at: 10}))["gauges"] == {at: 1}
        assert wire.read(sent(gauges={at: 50})).gauges == {at: 1}


def test_span_records_are_the_same_after_a_line() -> None:
    group = [record(), record(attributes={"kv_transfer.connector": "one", "n": 1, "x": 0.5})]
    (read,) = wire.spans(wire.from_line(wire.to_line(wire.message(Increments.none()._replace(spans=[group])))))
    assert [tuple(row) for row in read] == [(*one[:-1], list(one.links)) for one in group]
    assert all(Record.read(row) is not None for row in read)


@pytest.mark.parametrize("line", [b"", b"[1]", b"1", b"{", b"\xff\xfe", b"null", b'"x"'])
def test_line_that_is_no_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's, or ours
        wire.from_line(line)


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


@pytest.mark.parametrize(
    ("packed", "counts"),
    [
        ([], {}),
        ([0, 1], {0: 1}),
        ([0, 0], {}),
        ([wire.SLOTS - 1, wire.MOST], {wire.SLOTS - 1: wire.MOST}),
        ([3, 1, -3, 2, 3, 4], {3: 5, 0: 2}),
        *[(malformed, REFUSED) for malformed in (
            [0, -1], [0, wire.MOST + 1], [-1, 5, 1, 6], [wire.SLOTS, 7], [3, 1, 4], [3, True], [3, 1.0],
            ["3", 1], (3, 1), None,
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
        (["s", 3, "x" * wire.LABEL, wire.MOST], True),
        *[(malformed, False) for malformed in (
            ["s", 3, "x" * (wire.LABEL + 1), 1], ["x" * (wire.LABEL + 1), 3, 1], ["s", 3, wire.MOST + 1],
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
    assert wire.packed({1: wire.MOST + 1, 2: -1, 3: 0, 4: 4}) == [1, wire.MOST, 0, 1, 3, 4, -4, 0]


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 5 * wire.MOST)))
def test_counts_arrive_whatever_their_size(counts: dict[int, int]) -> None:
    """A sum of nanoseconds over a thousand loads in flight passes the largest number in months."""
    assert wire.unpacked(wire.packed(counts)) == {slot: n for slot, n in counts.items() if n}
    assert wire.unpacked(wire.packed({1: 10**40})) == {1: wire.PARTS * wire.MOST}


def test_a_line_is_short_and_ascii_whatever_is_in_it() -> None:
    """A collector of lines must not stumble over a line separator of Unicode in a request's id."""
    assert wire.to_line({"a": [1, 2], "b": "\u2028"}) == b'{"a":[1,2],"b":"\\u2028"}\n'
    assert wire.from_line(wire.to_line({"gauges": {5: 6}, "a": 1})) == {"gauges": {5: 6}, "a": 1}
    assert wire.from_line(b'{"a":1}') == {"a": 1}


def test_increments_of_any_size_are_added_and_what_is_added_stays_as_it_is() -> None:
    mine, more = Increments.none(), Increments({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
    for _ in range(3):
        mine.add(more)
        mine.add(Increments({1: 1}, [], {5: 7, 8: 9}))
    assert mine == Increments({1: 3 * 10**30 + 3, 2: 3}, [["s", 0, 3 * 10**30]], {5: 7, 8: 9})
    assert more == Increments({1: 10**30, 2: 1}, [["s", 0, 10**30]], {5: 6})
