"""The last calls of a process are in the ring of its page, in their order, also if it is killed within a record."""

import struct
import threading
import time
from contextlib import suppress
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.page import layout
from kvobs.page.calls import WORDS, pack, read, unpack
from kvobs.page.description import Identity
from kvobs.page.reader import CallRecord, Page, pages
from kvobs.probe.recorder import Recorder
from tests.support.probes import Kind, each_probe, recorder_of
from tests.support.watched import NAMES, REMOTE, WRITERS, begin, config, note


def page_of(engine: str = "e") -> Page:
    ((_, page),) = pages(Identity.of(config(engine)).server)
    return page


@given(st.integers(0, 2**30), st.integers(0, 2**30), st.booleans())
def test_the_subject_of_a_record_fits_in_a_word(call: int, calls: int, has_raised: bool) -> None:
    word = pack(call, calls, has_raised=has_raised)
    assert unpack(struct.unpack("q", struct.pack("q", word))[0]) == (call, calls, has_raised)


@each_probe
@pytest.mark.parametrize("added", [0, 1, 7, 8, 11, 16, 17])
def test_the_oldest_records_are_overwritten(kind: Kind, added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CALLS", 8)
    recorder = recorder_of(kind, 2)
    for i in range(1, added + 1):
        recorder.probe.note(i, 2 * i, i)
    assert kept(recorder) == [(i, 2 * i, i) for i in range(max(0, added - 8) + 1, added + 1)]


def kept(recorder: Recorder) -> list[tuple[int, int, int]]:
    return read(recorder.words[recorder.page.layout.ring :])


@each_probe
def test_each_call_has_one_record_and_one_that_raised_says_so(kind: Kind) -> None:
    mine = begin("e", 1)
    recorder = recorder_of(kind, len(NAMES), names=NAMES, page=mine)
    for _ in range(layout.CALLS - 2):  # its end is near
        recorder.probe.note(0, 0, 0)
    begin_ns = time.perf_counter_ns()
    recorder.timed(0, "start_load_kv", Mock())()
    with suppress(OSError):
        recorder.timed(REMOTE, "wait_for_save", Mock(side_effect=OSError))()
    recorder.timed(0, "get_finished", Mock())()
    records = page_of().records()
    assert [(r.connector, r.hook, r.calls, r.has_raised) for r in records] == [
        ("cpu", "start_load_kv", 1, False), ("remote", "wait_for_save", 1, True), ("cpu", "get_finished", 1, False)
    ]  # fmt: skip
    assert begin_ns < records[0].begin_ns < records[-1].begin_ns < time.perf_counter_ns() - records[-1].spent_ns
    assert kept(recorder)[-1] == tuple(mine.words[mine.layout.ring : mine.layout.ring + WORDS])


def test_an_incomplete_record_of_a_killed_process_is_not_read() -> None:
    mine = begin("e", 1)
    note(mine, 0, "wait_for_save", 5, 7)
    WRITERS.clear()  # as after a whole round; the begin is written first
    mine.words[mine.marks(REMOTE, "start_load_kv")] = mine.words[mine.layout.ring] = 11
    assert page_of().records() == []
    note(mine, REMOTE, "start_load_kv", 11, 2, calls=3)
    assert page_of().records() == [CallRecord("remote", "start_load_kv", 11, 2, 3, False)]


@each_probe
def test_threads_lose_no_place_in_the_ring(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CALLS", 10_001)
    recorder = recorder_of(kind, len(NAMES))
    calls = [recorder.timed(i, "wait_for_save", Mock(return_value=None)) for i in range(2)]
    threads = [threading.Thread(target=lambda call=call: [call() for _ in range(5000)]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept(recorder)) == 10_000
