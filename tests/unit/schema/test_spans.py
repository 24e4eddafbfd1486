"""The table of spans agrees with that of metrics; a record survives its page, and is read there with suspicion."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.page.layout import RING_BYTES, WORD
from kvobs.page.span_ring import SpanReader, SpanRing
from kvobs.schema import signals, spans
from kvobs.schema.spans import ATTRIBUTES, SPANS, Reason, Record, Span
from tests.support.contexts import SAMPLED, json_values, record, records


def test_every_attribute_is_in_the_table_and_says_what_it_is() -> None:
    constants = {
        value
        for name, value in vars(spans).items()
        if name.isupper() and isinstance(value, str) and name != "SCOPE" and not name.startswith("_")
    }
    assert constants == set(ATTRIBUTES)
    assert all(ATTRIBUTES.values())
    assert len(set(ATTRIBUTES.values())) == len(ATTRIBUTES)


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
def test_a_spans_labels_choose_a_series_of_its_histogram(span: Span) -> None:
    assert {span.subject, *span.labels} <= {"", *ATTRIBUTES}
    if span.histogram is None:
        assert span.labels == ()
    else:
        assert [label.removeprefix("kv_transfer.") for label in span.labels] == list(span.histogram.labels)
        assert span.histogram.kind is signals.Kind.HISTOGRAM


def test_a_title_names_the_subject_where_there_is_one() -> None:
    assert record("kv.load").title == "kv.load disk"
    assert record("kv.lookup").title == "kv.lookup"
    assert record("kv.load", attributes={}).title == "kv.load"
    assert record("kv.call", attributes={spans.HOOK: "wait_for_save"}).title == "kv.call wait_for_save"


@pytest.mark.parametrize("reason", list(Reason))
def test_slow_and_failed_spans_stay_urgent_after_reading(reason: Reason) -> None:
    for sent in (reason, str(reason)):
        assert record(reason=sent).is_urgent is (reason in (Reason.SLOW, Reason.ERROR))


def read(row: Any) -> Record | None:
    """Return what a reader of a page makes of a row in it; None: it is left out, and counted as missed."""
    size = 4 << 20
    words = memoryview(bytearray(RING_BYTES * WORD + size)).cast("q")
    try:
        assert SpanRing(words, 0, size).write([row])
    except OverflowError:
        return None  # a number that can't be written
    reader = SpanReader(words, 0, size)
    found = [one for group in reader.read() for one in group]
    assert len(found) + reader.missed == 1
    return found[0] if found else None


@given(records)
def test_a_record_survives_its_page(sent: Record) -> None:
    assert read(sent) == sent


@given(json_values | st.lists(json_values, min_size=10, max_size=10))
def test_nothing_else_is_a_record(row: Any) -> None:
    assert read(row) is None


@given(st.sampled_from(Record._fields), json_values)
def test_a_row_with_any_odd_field_is_read_or_not_without_raising(field: str, value: Any) -> None:
    row: list[Any] = list(record(**{field: value}))
    found = read(row)
    if found is not None:
        assert found == (*row[:-1], tuple(row[-1]))
        assert str(found.title).startswith(found.name)
        assert int(found.trace_id, 16)
        assert found.is_urgent in (True, False)


BAD: dict[str, list[Any]] = {
    "name": ["kv.other", ["kv.load"], {}],
    "reason": ["because", [], None],
    "trace_id": ["0" * 32, "1" * 31, "A" * 32, "1" * 32 + "\n", int("1" * 32)],
    "span_id": ["", "0" * 16, "1" * 32],
    "parent_id": ["0" * 16, None],
    "start_ns": [-1, 2**63, True],
    "end_ns": [1.5],
    "observed_ns": [-1, None],
    "attributes": [
        [["a", 1]],
        {1: 1},
        {"a": [1]},
        {"a": None},
        {str(i): i for i in range(65)},
        {"kv_transfer.connector": "x" * 1025},
        {"x" * 1025: 1},
        {"kv_transfer.tokens": 2**63},
        {"kv_transfer.tokens": -(2**63) - 1},
    ],
    "links": [(SAMPLED.traceparent,) * 65, SAMPLED.traceparent, None],
}


@pytest.mark.parametrize(("field", "bad"), [(field, bad) for field, values in BAD.items() for bad in values], ids=repr)
def test_a_row_with_a_bad_field_is_no_record(field: str, bad: Any) -> None:
    assert read(tuple(record())) == record()
    assert read(tuple(record(**{field: bad}))) is None


def test_a_row_without_what_a_record_needs_is_none() -> None:
    assert read(tuple(record())[:7]) is None
    assert read((*record(), 1)) is None


def test_a_record_at_all_limits_is_read() -> None:
    values = {"x" * 1024: "y" * 1024, "least": -(2**63), "most": 2**63 - 1, **{str(i): math.pi for i in range(61)}}
    most = record(attributes=values, start_ns=0, end_ns=2**63 - 1, links=(SAMPLED.traceparent,) * 64)
    assert read(most) == most
