"""Spans are read from the pages within the rate, slow and failed ones first, and none twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvobs.export import span_reading
from kvobs.export.span_reading import SpanReading, in_turns
from kvobs.export.totals import Totals
from kvobs.page.layout import ORDINARY, SPAN_BYTES
from kvobs.schema import signals, spans
from kvobs.schema.signals import slot
from kvobs.schema.spans import Reason, Record
from kvobs.telemetry.tracing.journal import GROUP_AT_MOST, PER_SECOND, RESERVED
from tests.support.contexts import record
from tests.support.converters import Converter, Hanging, Make
from tests.support.written import Pages

SLOW = record(reason=Reason.SLOW)
MISSED, EXPORT = slot(signals.SPANS_DROPPED, "missed"), slot(signals.OVERHEAD_SECONDS, "export")


class Reading:
    """Reads into the memory of a converter, with a clock that the test sets."""

    def __init__(self, converter: Converter, *pages: Pages) -> None:
        self.converter, self.now, self.counted = converter, 100.0, Counter[int]()
        self.totals = [each.totals() for each in pages]
        self.events: list[str] = []
        mine = converter.converter
        self.reading = SpanReading(mine, self._count, lambda: self.events.append("noted"), lambda: self.now)

    def _count(self, _totals: Totals, slot: int, n: int) -> None:
        self.counted[slot] += n

    def go_on(self) -> int:
        """Export; return how many spans there were."""
        before = len(self.converter.sent())
        self.reading.go_on(self.totals)
        return len(self.converter.sent()) - before


@pytest.fixture
def read(converter: Make) -> Callable[..., Reading]:
    return lambda *pages, exporter=None: Reading(converter(exporter), *pages)


@pytest.mark.parametrize(("is_urgent", "passed"), [(False, PER_SECOND - RESERVED), (True, PER_SECOND)])
def test_spans_above_the_rate_wait_in_the_page_for_room(
    is_urgent: bool, passed: int, read: Callable[..., Reading]
) -> None:
    pages = Pages()
    pages.write(*[[SLOW if is_urgent else record()]] * 380)
    mine = read(pages)
    assert mine.go_on() == passed
    assert mine.go_on() == 0
    mine.now += 0.125
    assert mine.go_on() == PER_SECOND // 8
    mine.now += 3600
    assert mine.go_on() == min(passed, 380 - passed - PER_SECOND // 8), "what was not used is not saved up"
    mine.now += 1
    mine.go_on()
    assert len(mine.converter.sent()) == 380
    assert mine.counted[MISSED] == 0
    assert mine.converter.lost == {}


def test_slow_and_failed_ones_of_all_processes_come_first(read: Callable[..., Reading]) -> None:
    first = Pages(None, 0)
    second = Pages(of=first, index=1)
    for pages, writer in ((first, 0), (first, 1), (second, 0)):
        pages.write(*[[record()]] * 200, [SLOW], writer=writer)
    mine = read(first, second)
    assert mine.go_on() == PER_SECOND - RESERVED
    reasons = [(span.attributes or {})[spans.REASON] for span in mine.converter.sent()]
    assert reasons == ["slow"] * 3 + ["parent"] * (PER_SECOND - RESERVED - 3)
    engines = Counter((span.attributes or {})[spans.ENGINE] for span in mine.converter.sent())
    assert abs(engines[0] - engines[1]) <= 2, "no engine waits for another one"
    pages = first
    pages.write(*[[SLOW]] * 100)
    assert mine.go_on() == RESERVED, "kept for them"


@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=8)), max_size=10
    )
)
@settings(max_examples=30, deadline=None)
def test_the_rate_is_kept_and_other_spans_are_left_or_counted(
    lasting: Converter, plan: list[tuple[float, list[tuple[int, bool]]]]
) -> None:
    """The plan: how long to wait, and the sizes of groups that are written then, and whether they are urgent."""
    lasting.again()
    pages, written = Pages(), 0
    mine = Reading(lasting, pages)
    begin = mine.now
    for wait_s, groups in plan:
        mine.now += wait_s
        for size, is_urgent in groups:
            pages.write([SLOW if is_urgent else record()] * size)
            written += size
        mine.go_on()
        assert len(lasting.sent()) <= PER_SECOND * (1 + mine.now - begin) + GROUP_AT_MOST
    mine.reading.finish(mine.totals)
    assert len(lasting.sent()) + mine.counted[MISSED] == written
    assert lasting.lost == {}


def test_a_reader_stopped_for_a_minute_counts_what_it_missed(
    read: Callable[..., Reading],
) -> None:
    pages = Pages()
    mine = read(pages)
    for _ in range(60):
        pages.write(*[[record()]] * PER_SECOND)
    mine.now += 60
    got = mine.go_on()
    for _ in range(100):
        mine.now += 1
        got += mine.go_on()
    assert got > SPAN_BYTES[ORDINARY] // 400
    assert mine.counted[MISSED] == 60 * PER_SECOND - got
    pages.write(*[[record()]] * 5)
    assert mine.go_on() == 5
    assert mine.counted[MISSED] == 60 * PER_SECOND - got, "once"


def test_ordinary_spans_displace_no_slow_ones(read: Callable[..., Reading]) -> None:
    pages = Pages()
    pages.write([SLOW] * 3)
    for _ in range(50):
        pages.write([record()] * 60)
    mine = read(pages)
    mine.go_on()
    assert Counter((span.attributes or {})[spans.REASON] for span in mine.converter.sent())["slow"] == 3


def test_it_is_noted_what_was_read_before_it_is_handed_over(
    read: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is killed in between has lost some spans, and sends none twice."""
    pages = Pages()
    mine = read(pages)
    assert mine.go_on() == 0
    assert mine.events == []
    convert = mine.converter.converter.convert

    def note(groups: Sequence[Any], engine: int) -> list[Record]:
        mine.events.append("handed over")
        return convert(groups, engine)

    monkeypatch.setattr(mine.converter.converter, "convert", note)
    pages.write([record()], [SLOW])
    mine.go_on()
    assert mine.events == ["noted", "handed over", "handed over"]
    (position,) = mine.totals[0].engine.positions().values()
    assert [seen for _, seen in position] == [1, 1]


def test_each_exemplar_has_the_trace_of_its_own_record(read: Callable[..., Reading]) -> None:
    first = Pages()
    second = Pages(of=first, index=1)
    times = {"1" * 32: 2_000, "2" * 32: 2_000_000_000}
    for pages, (trace_id, ns) in zip((first, second), times.items(), strict=True):
        attributes = {spans.CONNECTOR: "one"}
        pages.write([record("kv.save", trace_id=trace_id, observed_ns=ns, attributes=attributes)])
    mine = read(first, second)
    mine.go_on()
    marks = [mark for totals in mine.totals for found in totals._marks.values() for mark in found.values()]
    assert [(mark.trace_id, round(mark.value * 1e9)) for mark in marks] == list(times.items())


def test_the_time_of_exporting_is_counted_where_there_was_any(read: Callable[..., Reading]) -> None:
    pages = Pages()
    mine = read(pages)
    mine.go_on()
    assert mine.counted[EXPORT] == 0
    pages.write([record()])
    mine.go_on()
    assert 0 < mine.counted[EXPORT] < 10**9


def test_at_the_end_all_is_read_whatever_the_rate(read: Callable[..., Reading]) -> None:
    pages = Pages(None, 0, 1)
    for writer in range(3):
        pages.write(*[[SLOW]] * 350, *[[record()]] * 300, writer=writer)
    mine = read(pages)
    mine.go_on()
    mine.reading.finish(mine.totals)
    assert len(mine.converter.sent()) == 3 * 650
    assert (mine.counted[MISSED], mine.converter.lost) == (0, {})


def test_at_the_end_a_full_queue_is_waited_for_a_little(
    read: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setattr("kvobs.export.span_reading.time.sleep", lambda _: lapse())
    hanging = Hanging()
    pages = Pages()
    mine = read(pages, exporter=hanging)

    def lapse() -> None:
        mine.now += 0.5

    pages.write(*[[SLOW]] * 300)
    mine.reading.finish(mine.totals)
    assert mine.now == 100 + span_reading.LAST_S
    assert mine.converter.lost == {}, "what has no place is left in the page"
    assert 100 - GROUP_AT_MOST < mine.converter.converter.queued <= 100
    hanging.may_go.set()


def test_a_queue_that_is_smaller_than_a_group_takes_what_fits(
    read: Callable[..., Reading], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    pages = Pages()
    pages.write([record()] * 4, [record()] * 11, [record()] * 5)
    mine = read(pages)
    mine.reading.finish(mine.totals)
    assert len(mine.converter.sent()) == 9
    assert mine.converter.lost == {"queue": 11}


@given(st.lists(st.lists(st.integers(), max_size=5), max_size=5))
def test_in_turns_yields_all_in_rounds(lists: list[list[int]]) -> None:
    sources: list[Iterator[tuple[int, int, int]]] = [
        iter([(round_, i, n) for round_, n in enumerate(each)]) for i, each in enumerate(lists)
    ]
    found = list(in_turns(sources))
    assert [(a, b) for a, b, _ in found] == sorted((a, b) for a, b, _ in found)
    assert len(found) == sum(map(len, lists))
