"""A ring holds the last records that were written whole, whatever it is read in the middle of."""

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kvobs.cli.timeline import snapshot
from kvobs.cli.timeline.snapshot import RingError, read
from kvobs.telemetry.timeline import ring
from kvobs.telemetry.timeline.ring import END, MAGIC, NUMBER, OPEN, RECORD, SPENT, START, WIDTH, Ring

ABOUT = {"pid": 7}
HEAD = 8 * 5  # of ABOUT, with its padding
LAST = RECORD.size - RECORD.size // WIDTH  # where a record's last word begins

words = st.integers(-(2**63), 2**63 - 1)
moments = st.integers(0, 2**62)
written = st.lists(st.tuples(moments, moments, words, words), max_size=40)


def made(room: int, live: int = 0) -> tuple[bytearray, Ring]:
    memory = bytearray(HEAD + live * 8 + room * RECORD.size)
    return memory, Ring(memory, ABOUT, live)


def rows(memory: Any) -> list[list[int]]:
    snapshot: Any = read(memory)
    return snapshot.records.tolist()


@given(st.integers(1, 9), written, st.integers(0, 3))
def test_the_last_records_are_there_in_their_order(room: int, records: list[tuple[int, ...]], live: int) -> None:
    memory, one = made(room, live)
    assert one.room == room
    for i in range(live):
        one.words[one.live + i] = i + 1
    for start, spent, what, more in records:
        one.add(start, spent, what, more)
    assert rows(memory) == [[n, *record, n] for n, record in enumerate(records, 1)][-room:]
    snapshot: Any = read(memory)
    assert (snapshot.about, snapshot.live.tolist()) == (ABOUT, list(range(1, live + 1)))


@given(st.integers(2, 9), written, st.integers(0, RECORD.size))
def test_only_a_record_that_a_crash_cut_off_is_left_out(room: int, records: list[tuple[int, ...]], cut: int) -> None:
    """A process dies after so many bytes of a record: it was zeroed, then written from its beginning on."""
    memory, one = made(room)
    for record in records:
        one.add(*record)
    before = rows(memory)
    at = one.add(1, 2, 3, 4) * 8
    whole = bytes(memory[at : at + RECORD.size])
    memory[at : at + RECORD.size] = whole[:cut] + bytes(RECORD.size - cut)
    survivors = before if len(before) < room else before[1:]
    # The low bytes of its number, which are written first, are all that a number has.
    is_whole = memory[at : at + RECORD.size] == whole
    assert rows(memory) == survivors + ([[len(records) + 1, 1, 2, 3, 4, len(records) + 1]] if is_whole else [])
    assert is_whole == (cut > LAST)


class Written:
    """Memory in which something is written between two readings."""

    def __init__(self, memory: bytearray, write: Any) -> None:
        self.memory, self.write, self.readings = memory, write, 0

    def __len__(self) -> int:
        return len(self.memory)

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(self.memory)

    def __getitem__(self, part: slice) -> bytes:
        self.readings += 1
        if self.readings == 3:  # the JSON, the words, the words
            self.write()
        return bytes(self.memory[part])


@given(st.integers(4, 9), st.integers(0, 30), st.integers(1, 3))
def test_what_is_written_while_it_is_read_is_left_out(room: int, before: int, more: int) -> None:
    memory, one = made(room)
    for i in range(before):
        one.add(i, 0, 0)

    def write() -> None:
        for i in range(more):
            one.add(before + i, 0, 0)

    head, unpack = ring.HEAD, staticmethod(lambda memory: ring.HEAD.unpack_from(memory.memory))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "HEAD", type("Head", (), {"size": head.size, "unpack_from": unpack}))
        content: Any = read(Written(memory, write))
    assert content.records[:, START].tolist() == list(range(max(0, before + more - room), before))


@given(moments, st.integers(0, 2**40))
def test_an_open_record_is_closed_in_place(start: int, spent: int) -> None:
    memory, one = made(3)
    one.add(0, 1, 2)
    at = one.add(start, OPEN, 5)
    assert rows(memory)[1][SPENT] == OPEN
    one.close(at, start + spent)
    assert rows(memory)[1] == [2, start, spent, 5, 0, 2]


def test_a_record_in_another_ones_place_is_left_out() -> None:
    memory, one = made(3)
    at = one.add(1, 2, 3)
    one.words[at + NUMBER] = one.words[at + END] = 2
    assert rows(memory) == []


def test_a_writer_that_has_not_begun_is_no_mistake() -> None:
    assert read(bytes(4096)) is None


def changed(**changes: int | bytes) -> bytes:
    memory, _ = made(3)
    head = dict(zip(("magic", "version", "length", "live", "room"), ring.HEAD.unpack_from(memory), strict=True))
    memory[: ring.HEAD.size] = ring.HEAD.pack(*(head | changes).values())
    return bytes(memory)


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (b"", "too short"),
        (b'{"traceEvents": []}' * 9, "not a kvobs recording"),
        (changed(version=ring.VERSION + 1), f"its format is {ring.VERSION + 1}, this kvobs reads"),
        (changed(version=ring.VERSION - 1), f"its format is {ring.VERSION - 1}, this kvobs reads"),
        (changed(room=4), "is truncated"),
        (changed(live=2**32 - 1), "is truncated"),
        (changed(length=2), "unreadable"),
        (made(3)[0][:-1], "is truncated"),
    ],
    ids=["empty", "stray", "newer", "older", "records", "live words", "text", "truncated"],
)
def test_what_cannot_be_read_is_said(memory: bytes, says: str) -> None:
    with pytest.raises(RingError, match=says):
        read(memory)


@given(st.binary(min_size=24, max_size=400))
def test_whatever_follows_the_magic_is_read_or_refused(text: bytes) -> None:
    """Never anything but RingError."""
    try:
        read(MAGIC + ring.VERSION.to_bytes(4, "little") + text)
    except RingError:
        return


@given(st.lists(words, min_size=18, max_size=18))
def test_whatever_the_records_hold_is_read(content: list[int]) -> None:
    memory, one = made(3)
    memory[one.first * 8 :] = np.array(content, "<i8").tobytes()
    for record in rows(memory):
        assert record[NUMBER] == record[END] > 0


def test_there_must_be_room_for_a_record() -> None:
    assert made(1)[1].room == 1
    with pytest.raises(ValueError, match="no room for a record"):
        made(0)
    assert len(json.dumps(ABOUT)) <= HEAD - ring.HEAD.size
