"""Read the spans in the pages of this host, from the oldest on; whoever exports them is not disturbed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvobs.export.load_traces import Found
from kvobs.page.layout import ORDINARY, URGENT
from kvobs.page.reader import Page


class Spans(NamedTuple):
    """The spans that are still there, and how many slow and failed ones were overwritten."""

    found: list[Found]
    missed: int


def spans_in(pages: Iterable[tuple[str, Page]]) -> Spans:
    """Return the spans in pages, each with its engine, from the oldest; other readers' positions do not move."""
    found, missed = [], 0
    for engine, page in pages:
        for ring in (URGENT, ORDINARY):
            reader = page.spans(ring)
            found += [Found(engine, page.rank, record) for group in reader.read() for record in group]
            missed += reader.missed if ring == URGENT else 0
    return Spans(found, missed)
