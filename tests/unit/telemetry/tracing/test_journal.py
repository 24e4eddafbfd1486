"""Spans are written at a rate that readers can follow: slow and failed ones first, groups whole, each loss counted."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.page.layout import ORDINARY, SPAN_BYTES, URGENT
from kvobs.page.span_ring import SpanReader
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.schema import signals
from kvobs.schema.spans import Reason, Record
from kvobs.telemetry.tracing import journal
from kvobs.telemetry.tracing.journal import PER_SECOND, RESERVED, Journal
from kvobs.telemetry.tracing.trace_context import ID_AT_MOST
from tests.support.contexts import record
from tests.support.numbers import numbers, spans, taken

DROPPED = signals.slot(signals.SPANS_DROPPED, "rate")
Group = list[Record]


def group(size: int, is_urgent: bool = False, mark: int = 0, reason: Reason = Reason.SLOW) -> Group:
    """Return a group of which, if it is urgent, one record is."""
    records = [record(start_ns=mark) for _ in range(size)]
    if is_urgent:
        records[-1] = record(start_ns=mark, reason=reason)
    return records


class Written:
    """A journal whose clock is the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.page = PageWriter(describe(plain(["one"]), None))
        self.journal = Journal(self.page, lambda: self.now)

    def of(self, ring: int) -> SpanReader:
        return SpanReader(self.page.words, self.page.layout.spans(ring), SPAN_BYTES[ring])

    def dropped(self) -> int:
        return taken(self.page).counts.get(DROPPED, 0)


@dataclass
class Model:
    """The rule, stated plainly: so much room a second; the last of it is for what is urgent."""

    urgent: list[Group] = field(default_factory=list)
    ordinary: list[Group] = field(default_factory=list)
    dropped: int = 0
    room: float = PER_SECOND

    def pass_time(self, seconds: float) -> None:
        self.room = min(PER_SECOND, self.room + seconds * PER_SECOND)

    def add(self, group: Group, is_urgent: bool) -> None:
        if self.room - len(group) < (0 if is_urgent else RESERVED):
            self.dropped += len(group)
        else:
            (self.urgent if is_urgent else self.ordinary).append(group)
            self.room -= len(group)


sizes = st.sampled_from([1, 2, 9, 30, 60, journal.GROUP_AT_MOST]) | st.integers(1, journal.GROUP_AT_MOST)
# In eighths of a second, so that floats are exact.
seconds = st.sampled_from([0.125, 0.25, 1, 8])
READ, DROP = "read", "drop"


@given(st.lists(st.sampled_from([READ, DROP]) | seconds | st.tuples(sizes, st.booleans()), max_size=40))
def test_slow_and_failed_spans_come_first_and_losses_are_counted(
    events: Sequence[str | float | tuple[int, bool]],
) -> None:
    made, model = Written(), Model()
    for number, event in enumerate([*events, READ]):
        if event == READ:
            assert spans(made.page) == [*model.urgent, *model.ordinary]
            assert made.dropped() == model.dropped
            model = Model(room=model.room)
        elif event == DROP:
            made.journal.drop()
            model.dropped += 1
        elif isinstance(event, tuple):
            size, is_urgent = event
            made.journal.add(group(size, is_urgent, number))
            model.add(group(size, is_urgent, number), is_urgent)
        else:
            assert not isinstance(event, str)
            made.now += event
            model.pass_time(event)
        assert made.journal.is_full is (model.room <= RESERVED)
    assert spans(made.page) == []


def test_so_many_spans_a_second_are_written_for_however_long() -> None:
    made, seconds = Written(), 20
    for _ in range(seconds * 8 * PER_SECOND):
        made.now += 1 / (8 * PER_SECOND)
        made.journal.add([record()])
        spans(made.page)
    written = seconds * 8 * PER_SECOND - made.dropped()
    assert written == pytest.approx(PER_SECOND - RESERVED + seconds * PER_SECOND, abs=2)


def test_after_a_pause_there_is_room_for_no_more_than_a_second() -> None:
    made = Written()
    made.now += 3600
    for _ in range(3 * PER_SECOND):
        made.journal.add([record(reason=Reason.SLOW)])
    assert len(spans(made.page)) == PER_SECOND


@pytest.mark.parametrize("reason", Reason)
def test_only_slow_and_failed_spans_are_in_the_urgent_ring(reason: Reason) -> None:
    made = Written()
    made.journal.add(group(3, is_urgent=True, reason=reason))
    is_urgent = reason in (Reason.SLOW, Reason.ERROR)
    assert [len(list(made.of(ring).read())) for ring in (URGENT, ORDINARY)] == [is_urgent, not is_urgent]


def test_ordinary_spans_never_displace_slow_ones() -> None:
    made = Written()
    slow = group(2, is_urgent=True)
    made.journal.add(slow)
    for _ in range(100 * SPAN_BYTES[ORDINARY] // 10_000):
        made.now += 1
        made.journal.add(group(journal.GROUP_AT_MOST))
    ordinary = made.of(ORDINARY)
    assert len(list(ordinary.read())) > 1
    assert ordinary.missed > 0, "the ring went round"
    assert list(made.of(URGENT).read()) == [slow]


@pytest.mark.parametrize("ranks", [1, journal.GROUP_AT_MOST - 1])
def test_a_load_of_many_ranks_with_a_long_id_is_written_whole(ranks: int) -> None:
    made, name = Written(), "x" * ID_AT_MOST
    labels = {"kv_transfer.request.id": name, "gen_ai.request.id": name}
    load = [record(reason=Reason.ERROR, attributes=labels, start_ns=i) for i in range(1 + ranks)]
    made.journal.add(load)
    assert [one for group in spans(made.page) for one in group] == load
    assert made.dropped() == 0


def test_what_no_ring_has_room_for_is_counted() -> None:
    made = Written()
    made.journal.add([record(attributes={"kv_transfer.connector": "x" * 200_000})])
    assert spans(made.page) == []
    assert made.dropped() == 1


def test_malformed_contexts_are_counted_by_their_source() -> None:
    made = Written()
    for source, n in (("headers", 1), ("params", 2)):
        for _ in range(n):
            made.journal.note_malformed(source)
    slots = [signals.slot(signals.MALFORMED_CONTEXTS, source) for source in ("headers", "params")]
    assert [numbers(made.page).counts[slot] for slot in slots] == [1, 2]


@pytest.mark.usefixtures("hasty_threads")
def test_several_threads_lose_nothing_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PER_SECOND", 10_000)
    page, rounds = PageWriter(describe(plain(["one"]), None)), 3_000
    writes = Journal(page)
    readers = [SpanReader(page.words, page.layout.spans(ring), SPAN_BYTES[ring]) for ring in (URGENT, ORDINARY)]
    read: list[Group] = []

    def write(is_urgent: bool) -> None:
        for _ in range(rounds):
            writes.add(group(3, is_urgent))

    threads = [threading.Thread(target=write, args=(is_urgent,)) for is_urgent in (False, True)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        read += [group for reader in readers for group in reader.read()]
    read += [group for reader in readers for group in reader.read()]
    missed = sum(reader.missed for reader in readers)
    assert 3 * len(read) + missed + taken(page).counts.get(DROPPED, 0) == 2 * 3 * rounds
    assert all(len(kept) == 3 for kept in read)
    assert read
