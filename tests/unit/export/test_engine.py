"""The pages of an engine's processes are read as one engine: sums are Python's, and have nothing of other engines."""

import dataclasses
import os
import threading
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvobs.export import engine as module
from kvobs.export.engine import Engine, engines_of, servers
from kvobs.page import files, layout
from kvobs.page.description import ConnectorInfo
from kvobs.page.layout import HEAD, MAGIC, ORDINARY, URGENT, VERSION
from kvobs.schema import signals
from kvobs.schema.signals import OTHER_VALUE, SERIES_AT_MOST, slot, word
from kvobs.schema.spans import Reason, Record
from tests.support.contexts import record
from tests.support.watched import NAMES, process
from tests.support.written import Numbers, Pages, numbers

HIT = word(0, slot(signals.LOOKUPS, "hit"))
IN_FLIGHT = word(1, slot(signals.IN_FLIGHT, "load"))
SUM = word(0, slot(signals.LOAD_DURATION, "async")) + signals.LOAD_DURATION.sum_offset
RECORD = slot(signals.OVERHEAD_SECONDS, "record")
CALLS = word(1, slot(signals.CALL_DURATION, "wait_for_save"))


def grown(engine: Engine) -> dict[int, int]:
    """Return the numbers that are not 0, without the cost of recording, which is estimated."""
    return {slot: n for slot, n in enumerate(engine.counts()) if n and slot != RECORD}


@given(st.lists(numbers(at_most=2**63 - 1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_sums_over_processes_are_pythons_sums(parts: list[Numbers]) -> None:
    pages = Pages(None, *range(len(parts) - 1))
    for part, page in zip(parts, pages.writers, strict=True):
        part.add_to(page)
    counts, rows, gauges = Counter[int](), Counter[Any](), dict[int, int]()
    for part in parts:
        counts.update(part.counts)
        rows.update(part.rows)
        gauges |= {slot: max(value + 1, gauges.get(slot, 0)) for slot, value in part.gauges.items()}
    counts.pop(RECORD, None)
    engine = pages.engine()
    assert grown(engine) == {slot: n % 2**64 for slot, n in counts.items() if n % 2**64} | gauges
    assert engine.rows() == rows


@pytest.mark.parametrize("n", [2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])
def test_a_sum_that_has_wrapped_is_a_number_without_a_sign(n: int) -> None:
    pages = Pages(None, 0)
    pages.add(SUM, n - 5)
    pages.add(SUM, 5)
    engine = pages.engine()
    assert grown(engine) == {SUM: n}
    pages.add(SUM, 1, writer=1)
    assert engine.counts()[SUM] == (n + 1) % 2**64


def test_the_cost_of_recording_is_calls_times_the_cost_of_one() -> None:
    pages, cost_ns = Pages(None, 0), 250.0
    for page, calls in zip(pages.writers, (1000, 500), strict=True):
        page.add(CALLS, calls)
        page.add(CALLS + signals.CALL_DURATION.sum_offset, 10**12)  # a time is no number of calls
    engine = pages.engine()
    for found in engine.all():
        found.process = dataclasses.replace(found.process, cost_ns=cost_ns)
    assert engine.counts()[RECORD] == 1500 * cost_ns


def test_numbers_are_live_and_those_of_an_ended_process_stay() -> None:
    pages = Pages(None, 0)
    engine = pages.engine()
    pages.add(HIT, 2, writer=1)
    pages.writers[1].rows.add(signals.CALL_ERRORS, 0, ("other", "OSError"), 3)
    assert grown(engine) == {HIT: 2}
    pages.writers[1].close()
    replaced = pages.begin(0)
    replaced.add(HIT, 5)
    replaced.rows.add(signals.CALL_ERRORS, 0, ("other", "OSError"), 1)
    engine.find()
    assert grown(engine) == {HIT: 7}, "the worker of the same rank that is gone, and the one in its place"
    assert engine.rows() == {(signals.CALL_ERRORS, 0, ("other", "OSError")): 4}


def test_a_later_reader_has_the_numbers_of_a_killed_worker() -> None:
    pages = Pages(None, connectors=tuple(map(ConnectorInfo, NAMES)))
    with process(pages.engine_id, 0, "is killed") as killed:
        os.waitpid(killed.pid, 0)
    engine = pages.engine()
    assert [page.rank for page in engine.all()] == [None, 0]
    first = word(0, slot(signals.CALL_DURATION, "start_load_kv"))
    assert sum(engine.counts()[first : first + signals.CALL_DURATION.sum_offset]) == 1
    assert engine.is_alive, "its scheduler's process runs"


def test_further_values_share_one_series_and_no_other_ends() -> None:
    pages = Pages(None, 0)
    for i in range(SERIES_AT_MOST):
        for page in pages.writers:
            page.rows.add(signals.CALL_ERRORS, 0, ("h", f"E{i}"), 1)
    pages.writers[1].rows.add(signals.CALL_ERRORS, 0, ("h", "one more"), 1)
    pages.writers[0].rows.add(signals.CALL_ERRORS, 0, ("h", "and another"), 2)
    pages.writers[0].rows.add(signals.CALL_ERRORS, 1, ("h", "its own"), 1)
    rows = pages.engine().rows()
    assert len(rows) == SERIES_AT_MOST + 2
    assert rows[signals.CALL_ERRORS, 0, (OTHER_VALUE, OTHER_VALUE)] == 3
    assert rows[signals.CALL_ERRORS, 0, ("h", "E0")] == 2
    assert rows[signals.CALL_ERRORS, 1, ("h", "its own")] == 1
    few = Pages(None, 0)
    for i in range(SERIES_AT_MOST // 2):
        few.writers[0].rows.add(signals.CALL_ERRORS, 0, ("scheduler", f"E{i}"), 1)
        few.writers[1].rows.add(signals.CALL_ERRORS, 0, ("worker", f"E{i}"), 1)
    engine = few.engine()
    before = engine.rows()
    few.writers[0].rows.add(signals.CALL_ERRORS, 0, ("scheduler", "late"), 1)
    assert engine.rows() == before | {(signals.CALL_ERRORS, 0, (OTHER_VALUE, OTHER_VALUE)): 1}


# Who it is


def test_the_scheduler_describes_an_engine_even_if_it_comes_last() -> None:
    pages = Pages(1, 0)
    engine = pages.engine()
    assert (engine.head and engine.head.rank, engine.has_core) == (1, False)
    pages.begin(None)
    engine.find()
    assert engine.head is not None
    assert (engine.head.rank, engine.has_core, engine.info) == (None, True, pages.info)


def test_an_engine_ends_with_its_scheduler_or_else_its_last_rank() -> None:
    pages = Pages(None, 0, 1)
    engine = pages.engine()
    of = {page.rank: page for page in engine.all()}
    assert engine.is_alive
    assert not engine.has_ended_well
    pages.writers[0].close()
    assert engine.has_ended_well, "its ranks are killed then"

    def end(rank: int | None) -> None:
        of[rank].process = dataclasses.replace(of[rank].process, started="another process with its id")

    end(None)
    assert not engine.is_alive
    del engine.pages[of[None].name]
    end(0)
    assert engine.is_alive
    assert not engine.has_ended_well
    end(1)
    assert not engine.is_alive


def test_before_its_first_page_an_engine_is_nothing() -> None:
    engine = Engine("none-0-")
    engine.find()
    assert (engine.all(), engine.info, engine.head) == ((), None, None)
    assert not engine.is_alive
    assert not engine.has_core


def test_servers_and_their_engines_are_told_apart() -> None:
    first, second = Pages(None, 0), Pages(None)
    others = [Pages(None, of=first, index=index) for index in (10, 2, 1)]
    ours = [server for server in servers() if server in (first.server, second.server)]
    assert ours == [second.server, first.server], "the one whose page is the newest comes last"
    assert engines_of(first.server) == [f"{first.server}-{index}-" for index in (0, 1, 2, 10)]
    assert engines_of(second.server) == [second.name]
    first.add(HIT, 1)
    second.add(HIT, 10)
    for i, pages in enumerate(others):
        pages.add(HIT, 100 + i)
    assert [grown(pages.engine())[HIT] for pages in (first, second, *others)] == [1, 10, 100, 101, 102]


# Pages that are none


def other_version(pages: Pages, name: str = "rank9-9-9") -> str:
    """Write a page of another version; return its name."""
    made = f"{pages.name}{name}{files.SUFFIX}"
    (files.folder() / made).write_bytes(HEAD.pack(MAGIC, VERSION ^ 1, 8) + bytes(4096))
    return made


def test_a_page_of_another_version_is_refused_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(None)
    pages.add(HIT, 3)
    name = other_version(pages)
    engine = pages.engine()
    for _ in range(3):
        engine.find()
        Engine(pages.name).find()
    assert (engine.refused, grown(engine)) == (1, {HIT: 3})
    text = (
        f"the metrics of an engine's process are missing: its page {name} can't be read: it was written by another "
        "version of"
    )
    assert caplog.text.count(text) == 1


def test_a_page_with_other_connectors_is_refused() -> None:
    pages = Pages(None)
    pages.begin(0, dataclasses.replace(pages.info, connectors=(ConnectorInfo("one"), ConnectorInfo("three"))))
    engine = pages.engine()
    assert (len(engine.all()), engine.refused) == (1, 1)


def test_a_half_written_page_is_read_when_it_is_whole() -> None:
    pages = Pages(None, 0)
    memory, head = pages.writers[1].words.obj, slice(0, HEAD.size)
    written: Any = memory
    whole, written[head] = bytes(written[head]), bytes(HEAD.size)
    engine = pages.engine()
    assert [page.rank for page in engine.all()] == [None]
    written[head] = whole
    engine.find()
    assert [page.rank for page in engine.all()] == [None, 0]
    assert engine.refused == 0


def test_threads_that_find_pages_at_once_find_each_once(hasty_threads: None) -> None:
    pages = Pages(None)
    engine = pages.engine()
    other_version(pages)
    for rank in range(10):
        pages.begin(rank).add(HIT, 1)
        threads = [threading.Thread(target=engine.find) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (engine.counts()[HIT], engine.refused) == (rank + 1, 1)


# Spans


def read(engine: Engine, ring: int) -> list[Record]:
    return [one for groups in engine.spans(ring) for group in groups for one in group]


def test_spans_are_read_once_and_by_ring() -> None:
    pages = Pages(None, 0)
    engine = pages.engine()
    slow, usual = record(reason=Reason.SLOW), record()
    pages.write([usual], [slow, usual])
    pages.write([usual, usual], writer=1)
    assert read(engine, URGENT) == [slow, usual]
    assert read(engine, ORDINARY) == [usual] * 3
    assert read(engine, ORDINARY) == []
    pages.write([slow], writer=1)
    assert (read(engine, ORDINARY), read(engine, URGENT)) == ([], [slow])


def test_a_later_reader_goes_on_where_an_earlier_one_stood() -> None:
    pages = Pages(None, 0)
    first = pages.engine()
    one, other = record(span_id="3" * 16), record(span_id="4" * 16)
    pages.write([one], [one])
    assert len(read(first, ORDINARY)) == 2
    positions = first.positions()
    pages.write([other])
    pages.write([other], writer=1)
    pages.begin(1)
    pages.write([other, other], writer=2)
    assert read(pages.engine(positions), ORDINARY) == [other] * 4
    assert len(read(pages.engine(), ORDINARY)) == 6


def test_what_was_overwritten_before_it_was_read_is_known() -> None:
    pages = Pages(None)
    engine, n = pages.engine(), 0
    room = layout.SPAN_BYTES[ORDINARY]
    while n * 100 < 2 * room:
        pages.write([record()])
        n += 1
    got = len(read(engine, ORDINARY))
    assert 0 < got < n
    assert engine.missed == n - got


def test_a_page_that_is_gone_when_it_is_opened_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look into the folder and the opening a process may end."""
    pages = Pages(None)
    monkeypatch.setattr(module, "names_of", lambda _: [f"{pages.name}rank7-7-7.page"])
    engine = Engine(pages.name)
    engine.find()
    assert engine.all() == ()
