"""The increments of one process's numbers, as a recorder hands them on and a payload carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvobs.telemetry.journal import Group


class Taken(NamedTuple):
    """Increments since the last call: plain builtins, ready for the wire."""

    counts: dict[int, int]  # slot -> how much was added
    opened: list[list[Any]]  # [signal, child, label values..., how much was added], for open sets of label values
    gauges: dict[int, int]  # slot -> value, of gauges that changed
    spans: Sequence[Group] = ()  # groups of span records, slow and failed ones first


def nothing() -> Taken:
    """Return numbers to which something can be added."""
    return Taken({}, [], {})
