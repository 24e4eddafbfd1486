"""Spans are read from the pages of running processes, and no other reader notices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs.cli.pages import pages
from kvobs.cli.trace.reading import spans_in
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.schema.spans import Reason
from tests.support.page_files import page_folder
from tests.support.slow_loads import RANKS, SLOW, span
from tests.support.written import Pages


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with page_folder() as made:
        yield made


def test_spans_of_both_rings_are_read_with_their_engine_and_rank() -> None:
    written = Pages(None, 1)
    lookup = span("kv.lookup", 1, 0, 1, reason=Reason.PARENT)
    written.write(SLOW, [lookup])
    written.write([RANKS[0]], writer=1)
    found, missed = spans_in(pages())
    assert [(each.rank, each.record) for each in found] == [
        *((None, record) for record in (*SLOW, lookup)), (1, RANKS[0])
    ]  # fmt: skip
    assert {each.engine for each in found} == {f"{written.server[:8]}-0"}
    assert missed == 0


def test_reading_moves_no_position_and_changes_no_page() -> None:
    """The exporter reads on after it what it would have read without it."""
    written = Pages(None)
    engine = written.engine()
    written.write(SLOW)
    before = [bytes(writer.words) for writer in written.writers]
    positions = engine.positions()
    assert [len(spans_in(pages()).found) for _ in range(3)] == [3, 3, 3]
    assert [bytes(writer.words) for writer in written.writers] == before
    assert engine.positions() == positions
    assert [record for groups in engine.spans(URGENT) for group in groups for record in group] == SLOW
    assert len(spans_in(pages()).found) == 3, "also after another reader"


def test_overwritten_slow_spans_are_counted() -> None:
    written = Pages(None)
    n = 3000
    for i in range(n):
        written.write([span("kv.load", i + 1, i, 1, request__id="r" * 50)])
    written.write([span("kv.lookup", 1, 0, 1, reason=Reason.PARENT)])
    found, missed = spans_in(pages())
    kept = [each for each in found if each.record.name == "kv.load"]
    assert missed == n - len(kept) > 0
    assert kept[-1].record.span_id == f"{n:016x}"
    assert ORDINARY != URGENT
