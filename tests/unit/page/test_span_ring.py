"""Spans reach every reader whole, in their order, each once; what came too late or is malformed is counted exactly."""

import mmap
import os
import time
from itertools import count

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from kvobs.page import span_ring
from kvobs.page.layout import ORDINARY, RING_BYTES, RING_HEAD, RING_TAIL, SPAN_BYTES, URGENT, WORD
from kvobs.page.span_ring import _FRAME, SpanReader, SpanRing
from kvobs.page.writer import PageWriter, describe, plain
from kvobs.schema import spans
from kvobs.schema.spans import Record
from kvobs.telemetry.tracing.journal import GROUP_AT_MOST, Journal
from kvobs.telemetry.tracing.trace_context import ID_AT_MOST
from tests.support.contexts import record, records

SIZE = 1 << 14


class Ring:
    """A ring with room for so many bytes, which spans of increasing number are written into."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, RING_BYTES * WORD + size)  # forks share it
        self.words = memoryview(self.memory).cast("q")
        self.ring = SpanRing(self.words, 0, size)
        self.written = self.longest = 0

    def write(self, n: int = 1, text: int = 0) -> bool:
        """Write a group of so many spans with texts of so many letters; return whether it was taken."""
        more = {"text": "x" * text} if text else {}
        group = [record(start_ns=self.written + i, attributes=more) for i in range(n)]
        if is_taken := self.ring.write(group):
            self.written += n
            self.longest = max(self.longest, size_of(*group))
        return is_taken

    def reader(self, *begin: tuple[int, int]) -> SpanReader:
        return SpanReader(self.words, 0, self.size, *begin)


def numbers(reader: SpanReader) -> list[int]:
    """Read what there is; return the numbers of the spans."""
    return [each.start_ns for group in reader.read() for each in group]


def size_of(*group: Record) -> int:
    """Return the room that a group takes in the ring."""
    return -(-(_FRAME.size + len(msgspec.msgpack.encode(group))) // WORD) * WORD


@given(records)
def test_a_span_is_read_as_it_was_written(one: Record) -> None:
    mine = Ring(1 << 17)
    assert mine.ring.write([one, one])
    assert list(mine.reader().read()) == [[one, one]]


groups = st.tuples(st.integers(1, 6), st.integers(0, 600) | st.integers(0, 1024))


@given(st.lists(groups | st.none(), max_size=80), st.sampled_from([2048, 4096, 4104, SIZE]))
@example([(1, 0)] * 30 + [None], 2048)
def test_what_is_read_and_what_is_missed_is_what_was_written(events: list[tuple[int, int] | None], size: int) -> None:
    """None stands for a look of a reader; another one looks at the end only."""
    mine, found = Ring(size), list[int]()
    reader, late = mine.reader(), mine.reader()
    for event in [*events, None]:
        if event is not None:
            mine.write(*event)
            continue
        found += (more := numbers(reader))
        assert more == [*range(mine.written)][mine.written - len(more) :], "the last ones, without a gap"
        assert len(found) + reader.missed == mine.written
    last = numbers(late)
    assert last == [*range(late.missed, mine.written)]
    kept = mine.words[RING_HEAD] - mine.words[RING_TAIL]
    assert size - 2 * mine.longest < kept <= size or not late.missed, "no more than needed was overwritten"


def test_a_slow_load_on_many_ranks_with_long_ids_has_room() -> None:
    ids = dict.fromkeys((spans.REQUEST, spans.GEN_AI_REQUEST, spans.CONNECTOR), "x" * ID_AT_MOST)
    one = record("kv.load.rank", parent_id="3" * 16, start_ns=2**60, end_ns=2**60, attributes={**ids, spans.RANK: 999})
    assert Ring(SPAN_BYTES[URGENT]).ring.write([one] * GROUP_AT_MOST)


def test_a_group_has_half_of_the_ring_at_most() -> None:
    mine = Ring(2048)
    fits = next(n for n in count(500) if size_of(record(start_ns=0, attributes={"text": "x" * n})) > 1024) - 1
    for _ in range(9):
        assert mine.write(1, fits)
    reader = mine.reader()
    before = bytes(mine.memory)
    assert not mine.write(1, fits + 1)
    assert bytes(mine.memory) == before
    assert (numbers(reader), reader.missed) == ([7, 8], 7)


def test_a_reader_that_comes_back_counts_what_it_missed() -> None:
    mine = Ring()
    reader = mine.reader()
    for n in (3, 5, 200, 1, 4000):
        before = reader.missed
        for _ in range(n):
            mine.write()
        found = numbers(reader)
        assert found == [*range(mine.written - len(found), mine.written)]
        assert reader.missed - before == n - len(found)
        assert (reader.missed == before) is (n < 50)
    assert numbers(reader) == []


def test_what_a_reader_skips_is_not_missed() -> None:
    mine = Ring()
    reader = mine.reader()
    for n in (0, 3, 4000):
        for _ in range(n):
            mine.write()
        reader.skip()
    mine.write(2)
    assert (numbers(reader), reader.missed) == ([4003, 4004], 0)


def test_a_second_reader_continues_where_the_first_one_stopped() -> None:
    """Also if it stopped between two groups, and what it had not read was overwritten meanwhile."""
    mine = Ring()
    for _ in range(10):
        mine.write(2)
    first = mine.reader()
    reading = first.read()
    assert [[each.start_ns for each in next(reading)] for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    second = mine.reader(first.position)
    assert (numbers(second), second.missed) == ([*range(6, 20)], 0)
    for _ in range(500):
        mine.write(2)
    third, fourth = mine.reader(second.position), mine.reader()
    found = numbers(third)
    assert found == [*range(20 + third.missed, 1020)]
    assert (numbers(fourth), fourth.missed) == (found, 20 + third.missed)


def test_only_spans_overwritten_while_they_are_read_are_missed() -> None:
    mine = Ring()

    class Overtaken(SpanReader):
        writes = 0

        def _frame(self) -> tuple[int, int, int, int] | None:
            while self._at >= mine.words[RING_TAIL] and self.writes:
                mine.write()
            self.writes = 0
            return super()._frame()

    for _ in range(60):
        mine.write()
    reader = Overtaken(mine.words, 0, SIZE, (0, 0))
    reader.writes = 1
    oldest = mine.reader()
    found = numbers(reader)
    assert 0 < reader.missed < 3
    assert found == [*range(reader.missed, mine.written)] == numbers(oldest)


def test_a_header_overwritten_while_it_is_read_counts_nothing() -> None:
    mine = Ring()
    for _ in range(5):
        mine.write()
    first = mine.reader()
    next(first.read())

    class Torn(SpanReader):
        is_torn = True

        def _frame(self) -> tuple[int, int, int, int] | None:
            frame = super()._frame()
            if frame is None or not self.is_torn:
                return frame
            self.is_torn = False
            mine.words[RING_TAIL] = first.position[0]
            return frame[0] + 49, *frame[1:]

    reader = Torn(mine.words, 0, SIZE, (0, 0))
    assert numbers(reader) == [1, 2, 3, 4]
    assert reader.missed == 1


@pytest.mark.parametrize("size", [SIZE, 1 << 18])
@pytest.mark.parametrize("waits", [True, False])
def test_another_process_reads_while_the_writer_writes(size: int, waits: bool) -> None:
    """None is torn and none out of order; none is lost while the reader keeps up, else those that are are counted."""
    mine, place = Ring(size), memoryview(mmap.mmap(-1, WORD)).cast("q")  # where the reader is
    at_least = 60_000 if waits or size > SIZE else 400_000  # only there is the reader often overtaken within a record
    if not (writer := os.fork()):
        is_lapped = False
        while mine.written < at_least or not (waits or is_lapped):
            mine.write(1 + mine.written % 4, mine.written % (900 if size > SIZE else 90))
            is_lapped = is_lapped or mine.words[RING_HEAD] - place[0] > 2 * size
            while waits and mine.words[RING_HEAD] - place[0] > size // 2:
                time.sleep(0)
        os._exit(0)
    reader, read, expected, is_settled = mine.reader(), 0, 0, False
    while not is_settled:
        is_settled = os.waitpid(writer, os.WNOHANG)[0] == writer  # then it is read once more
        for group in reader.read():
            place[0] = reader.position[0]
            for each in group:
                assert each.start_ns >= expected
                assert each.attributes.get("text", "") == "x" * len(str(each.attributes.get("text", "")))
                read, expected = read + 1, each.start_ns + 1
    assert reader.position == (mine.words[RING_HEAD], expected)
    assert read + reader.missed == expected
    assert (reader.missed == 0) is waits
    assert mine.words[RING_HEAD] > 10 * size


def test_ordinary_spans_displace_no_slow_or_failed_ones() -> None:
    page = PageWriter(describe(plain(["one"]), 0))
    clock = count(0, 1000).__next__
    journal = Journal(page, lambda: float(clock()))
    for i in range(40):
        journal.add([record(reason="slow" if i % 2 else "error", start_ns=i)] * 2)
        for _ in range(100):
            journal.add([record(attributes={"text": "x" * 200})] * 3)
    at = page.layout
    ordinary, urgent = (SpanReader(page.words, at.spans(ring), SPAN_BYTES[ring]) for ring in (ORDINARY, URGENT))
    assert numbers(urgent) == [i for i in range(40) for _ in range(2)]
    assert (urgent.missed, len(numbers(ordinary)) > 100, ordinary.missed > 0) == (0, True, True)


# --- what is malformed


@pytest.mark.parametrize(
    "text",
    [
        b"\xc1",
        msgspec.msgpack.encode([record(name="no.such")]),
        msgspec.msgpack.encode([record(), record(trace_id="0" * 32)]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["one"]),
        b"\x91" * 200,
    ],
)
def test_a_record_that_is_none_is_missed_and_the_next_one_read(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Ring()
    mine.write(2)
    with monkeypatch.context() as patch:
        patch.setattr(span_ring, "_ENCODE", lambda _: text)
        mine.write(2)
    mine.write(2)
    assert (numbers(reader := mine.reader()), reader.missed) == ([0, 1, 4, 5], 2)


def test_after_bytes_that_changed_what_is_written_then_is_read() -> None:
    mine = Ring()
    for _ in range(3):
        mine.write(2)
    mine.memory[-SIZE + size_of(record(), record()) + _FRAME.size] ^= 1
    reader = mine.reader()
    assert numbers(reader) == [0, 1]
    mine.write(2)
    assert (numbers(reader), reader.missed) == ([6, 7], 4)
