"""The wire form of kvobs's own numbers, from the workers to whoever exports them.

::

    {"v": 3, "table": digest of the slot table,
     "children": {name: "module:Class"},               # in the order of the configuration
     "counts": [gap, n, gap, n, ...],                  # how much was added, by the gaps between slots
     "opened": [[signal, child, label values..., n]],  # the same, for label values that no table has
     "gauges": {slot: value},                          # the last one counts
     "spans": [[record, ...], ...]}                    # see spans.Record; a group is exported whole, or not at all

The gaps of a whole list add up to 0, so that two lists merge by concatenation. Only plain builtins, safe for pickle,
msgpack and, as a line for the exporter, JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from math import nan
from typing import Any

from kvobs.signals import OLDEST_IN_FLIGHT, TABLE_DIGEST, Signal, place
from kvobs.telemetry.taken import Taken, nothing

VERSION = 3
# Limits of a peer's input: anything beyond is malformed, and must not determine memory use.
SLOTS = place(1_000, 0)
ROWS = 4_096
LABEL = 128  # characters
MOST = 2**53  # the largest count: exact as a float, and well below msgpack's largest number


def is_ours(data: Mapping[str, Any]) -> bool:
    """Return whether this process can read the numbers."""
    return data.get("v") == VERSION and data.get("table") == TABLE_DIGEST


def read(data: Mapping[str, Any]) -> Taken:
    """Return the well-formed numbers of a payload; none if another version of kvobs wrote them."""
    if not is_ours(data):
        return nothing()
    opened = data.get("opened")
    rows = [row for row in opened if _is_row(row)][:ROWS] if isinstance(opened, list) else []
    return Taken(_unpacked(data.get("counts")), rows, _slots(data.get("gauges")), spans(data))


def spans(data: Mapping[str, Any]) -> list[Any]:
    """Return the groups of span records; none if another version of kvobs wrote them."""
    groups = data.get("spans") if is_ours(data) else None
    return [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []


def empty() -> dict[str, Any]:
    """Return the parts of a payload without numbers."""
    return {"counts": [], "opened": [], "gauges": {}, "spans": []}


def parts(taken: Taken) -> dict[str, Any]:
    """Return the parts of a payload with these numbers."""
    packed = _packed(taken.counts)
    return {"counts": packed, "opened": taken.opened, "gauges": taken.gauges, "spans": list(taken.spans)}


def add_rows(mine: list[list[Any]], theirs: list[list[Any]]) -> list[list[Any]]:
    """Return the sums of two lists of open series."""
    added: dict[tuple[Any, ...], int] = {}
    for *key, n in (*mine, *theirs):
        added[tuple(key)] = added.get(tuple(key), 0) + n
    return [[*key, n] for key, n in added.items()]


def gauge_value(signal: Signal, value: int) -> float:
    """Return a payload's gauge in Prometheus's unit; a time that is not set is NaN."""
    return nan if signal is OLDEST_IN_FLIGHT and not value else value * signal.unit


# Lines, between EngineCore and the exporter


def to_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line of JSON; the slots of gauges, which JSON does not take as keys, as pairs."""
    if isinstance(gauges := message.get("gauges"), Mapping):
        message = {**message, "gauges": list(gauges.items())}
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Return the message of a line; ValueError if it is none."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, found {type(message).__name__}")
    if isinstance(gauges := message.get("gauges"), list):
        try:
            message["gauges"] = dict(gauges)
        except TypeError as error:
            raise ValueError(f"gauges are pairs: {error}") from None
    return message


def _packed(counts: Mapping[int, int]) -> list[int]:
    if max(counts.values(), default=0) > MOST:  # a value that msgpack rejects would end the engine
        counts = {slot: min(n, MOST) for slot, n in counts.items()}
    packed: list[int] = []
    last = 0
    for slot in sorted(counts):
        packed += (slot - last, counts[slot])
        last = slot
    return [*packed, -last, 0] if last else packed


def _unpacked(packed: Any) -> dict[int, int]:
    counts: dict[int, int] = {}
    if not isinstance(packed, list) or not all(type(number) is int for number in packed):
        return counts
    for slot, n in zip(accumulate(packed[::2]), packed[1::2], strict=False):
        if 0 < n <= MOST and 0 <= slot < SLOTS:
            counts[slot] = counts.get(slot, 0) + n
    return counts


def _slots(numbers: Any) -> dict[int, int]:
    if not isinstance(numbers, dict):
        return {}
    return {
        slot: n
        for slot, n in numbers.items()
        if type(slot) is int and type(n) is int and 0 <= slot < SLOTS and 0 <= n < 2**63
    }


def _is_row(row: Any) -> bool:
    if not isinstance(row, list) or len(row) < len(("signal", "child", "n")):
        return False
    signal, child, *values, n = row
    return (
        type(child) is int
        and type(n) is int
        and child >= 0 <= n <= MOST
        and all(isinstance(v, str) and len(v) <= LABEL for v in (signal, *values))
    )
