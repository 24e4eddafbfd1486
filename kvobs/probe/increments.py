"""Hold the growth of one process's numbers since the last time: what its recorder hands on, as plain builtins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvobs.schema.spans import Record

Group = list[Record]
"""Spans that belong together, such as a load and its ranks."""


class Increments(NamedTuple):
    """Numbers to add to those of earlier ones."""

    counts: dict[int, int]  # slot -> how much was added
    opened: list[list[Any]]  # [signal, child, label values..., how much was added], for open sets of label values
    gauges: dict[int, int]  # slot -> value, of gauges that changed; of an age its begin, by this process's clock
    spans: Sequence[Group] = ()  # groups of span records, slow and failed ones first

    @classmethod
    def none(cls) -> Increments:
        """Return numbers to which something can be added."""
        return cls({}, [], {})

    def add(self, more: Increments) -> None:
        """Add more increments to these; of gauges the later value counts, and spans are left out."""
        for slot, n in more.counts.items():
            self.counts[slot] = self.counts.get(slot, 0) + n
        if more.opened:
            self.opened[:] = add_rows(self.opened, more.opened)
        self.gauges.update(more.gauges)


def add_rows(mine: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
    """Return the sums of two lists of rows of ``Increments.opened``."""
    added: dict[tuple[Any, ...], int] = {}
    for *key, n in (*mine, *theirs):
        added[tuple(key)] = added.get(tuple(key), 0) + n
    return [[*key, n] for key, n in added.items()]
