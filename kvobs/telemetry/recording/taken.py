"""The increments of one process's numbers, as a recorder hands them on and a payload carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvobs.telemetry.recording.journal import Group


class Taken(NamedTuple):
    """Increments since the last call: plain builtins, ready for the wire."""

    counts: dict[int, int]  # slot -> how much was added
    opened: list[list[Any]]  # [signal, child, label values..., how much was added], for open sets of label values
    gauges: dict[int, int]  # slot -> value, of gauges that changed
    spans: Sequence[Group] = ()  # groups of span records, slow and failed ones first

    def add(self, more: Taken) -> None:
        """Add more increments to these; of gauges the later value counts, and spans are left out."""
        for slot, n in more.counts.items():
            self.counts[slot] = self.counts.get(slot, 0) + n
        if more.opened:
            self.opened[:] = add_rows(self.opened, more.opened)
        self.gauges.update(more.gauges)


def add_rows(mine: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
    """Return the sums of two lists of rows of ``Taken.opened``."""
    added: dict[tuple[Any, ...], int] = {}
    for *key, n in (*mine, *theirs):
        added[tuple(key)] = added.get(tuple(key), 0) + n
    return [[*key, n] for key, n in added.items()]


def nothing() -> Taken:
    """Return numbers to which something can be added."""
    return Taken({}, [], {})
