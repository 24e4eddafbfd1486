"""Write and read the messages to the process that exports the numbers: payloads, and an engine's first message.

A payload::

    {"v": 5, "table": digest of the slot table,
     "children": {name: "module:Class"},               # in the order of the configuration; not in lines
     "counts": [gap, n, gap, n, ...],                  # how much was added, by the gaps between slots
     "opened": [[signal, child, label values..., n]],  # the same, for label values that no table has
     "gauges": {slot: value},                          # the last one counts; ages when they are sent, 0: none
     "spans": [[record, ...], ...]}                    # see spans.Record; a group is exported whole, or not at all

The gaps of a whole list add up to 0, so that two lists merge by concatenation. Only plain builtins, safe for pickle,
msgpack and, as a line for the exporter, JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter_ns
from typing import Any

from kvobs.probe.increments import Increments
from kvobs.schema.signals import (
    CHILD_WIDTH,
    CONNECTORS_AT_MOST,
    OLDEST_IN_FLIGHT,
    PROCESS_WIDTH,
    SERIES,
    TABLE_DIGEST,
    Scope,
    place,
)

VERSION = 5
# Limits of a peer's input: anything beyond is malformed, and must not determine memory use.
MOST = 2**63 - 1  # nanoseconds of 292 years; msgpack takes no number twice as large, and would end the engine
PARTS = 256  # numbers of MOST that one total may be sent as
SLOTS = place(CONNECTORS_AT_MOST, 0)
ROWS = 4_096
LABEL = 128  # characters
_OLDEST = {series.first for series in SERIES[Scope.CHILD] if series.signal is OLDEST_IN_FLIGHT}


def is_ours(data: Mapping[str, Any]) -> bool:
    """Return whether this process can read the numbers."""
    return data.get("v") == VERSION and data.get("table") == TABLE_DIGEST


def read(data: Mapping[str, Any]) -> Increments:
    """Return the numbers of a payload; none if another version of kvobs wrote them.

    Raises:
        ValueError: some of them are malformed; then all are refused.
    """
    if not is_ours(data):
        return Increments.none()
    counts, rows, gauges = (data.get(part, none) for part, none in (("counts", []), ("opened", []), ("gauges", {})))
    return Increments(unpacked(counts), _checked_rows(rows), _ages(_checked_gauges(gauges)), spans(data))


def spans(data: Mapping[str, Any]) -> list[Any]:
    """Return the groups of span records; none if another version of kvobs wrote them."""
    groups = data.get("spans") if is_ours(data) else None
    return [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []


def empty() -> dict[str, Any]:
    """Return the parts of a payload without numbers."""
    return {"counts": [], "opened": [], "gauges": {}, "spans": []}


def message(increments: Increments) -> dict[str, Any]:
    """Return a payload with these numbers."""
    return {
        "v": VERSION,
        "table": TABLE_DIGEST,
        "counts": packed(increments.counts),
        "opened": increments.opened,
        "gauges": _ages(increments.gauges),
        "spans": list(increments.spans),
    }


def _ages(gauges: Mapping[int, int]) -> dict[int, int]:
    """Return gauges with ages for begins, or begins for ages: hosts have different clocks."""
    now_ns = perf_counter_ns()
    return {
        at: max(1, now_ns - n) if n and (at - PROCESS_WIDTH) % CHILD_WIDTH in _OLDEST else n for at, n in gauges.items()
    }


def to_line(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    """Return the message of a line; ValueError if it is none."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, found {type(message).__name__}")
    if gauges := message.get("gauges"):
        message["gauges"] = {int(slot): n for slot, n in gauges.items()}  # keys of JSON are text
    return message


def packed(counts: Mapping[int, int]) -> list[int]:
    """Return counts by the gaps between their slots; one that is too large for a number is several."""
    pairs: list[int] = []
    last = 0
    for slot in sorted(counts):  # of ints: pairs would take twice as long
        if (n := counts[slot]) > 0:
            pairs += slot - last, min(n, MOST)
            last = slot
            for _ in range(PARTS - 1 if n > MOST else 0):
                if (n := n - MOST) > 0:
                    pairs += 0, min(n, MOST)
    return [*pairs, -last, 0] if last else pairs


def unpacked(pairs: Any) -> dict[int, int]:
    """Return the sums of packed counts.

    Raises:
        ValueError: they are malformed.
    """
    if not isinstance(pairs, list) or not {int}.issuperset(map(type, pairs)) or len(pairs) % 2:
        raise ValueError("a payload's counts are pairs of whole numbers")
    counts: dict[int, int] = {}
    for slot, n in zip(accumulate(pairs[::2]), pairs[1::2], strict=True):
        if 0 < n <= MOST and 0 <= slot < SLOTS:
            counts[slot] = counts.get(slot, 0) + n
        elif n:
            raise ValueError(f"a payload's count {n} of slot {slot} is out of range")
    return counts


def _checked_gauges(gauges: Any) -> dict[int, int]:
    if not isinstance(gauges, dict) or not all(
        type(slot) is int and type(n) is int and 0 <= slot < SLOTS and 0 <= n <= MOST for slot, n in gauges.items()
    ):
        raise ValueError("a payload's gauges are whole numbers by slot")
    return dict(gauges)


def _checked_rows(rows: Any) -> list[list[Any]]:
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise ValueError("a payload's rows are lists of a signal, a child, label values and a number")
    return rows[:ROWS]


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


@dataclass(frozen=True, slots=True)
class ConnectorInfo:
    """One configured connector."""

    name: str
    class_name: str
    role: str
    link_gbps: float | None = None  # Gbit/s of its links


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine and its exporter's options."""

    pid: int  # of EngineCore, or of the first rank on a host without it
    began_ns: int  # when its numbers began, since the epoch
    model: str  # the value of vLLM's label ``model_name``
    index: int  # in its data-parallel group, the value of vLLM's label ``engine``
    connectors: tuple[ConnectorInfo, ...]  # in the order of the configuration
    load_policy: str
    failure_policy: str  # vLLM's ``kv_load_failure_policy``
    vllm_version: str
    is_native: bool = False  # whether its processes have the compiled probe
    host: str = ""  # to listen on
    port: int | None = None  # of /metrics; None: it is served nowhere
    web_config: str | None = None  # the file with its TLS settings
    otlp_metrics: bool = False  # whether the metrics are sent by OTLP, too
    linger_s: float = 15.0  # how long the last numbers are served after an engine that did not end by itself
    has_spans: bool = False  # whether span records come
    endpoint: str | None = None  # vLLM's OTLP endpoint; None: the one of the environment
    pages: str = ""  # the begin of the names of its processes' pages
    ranks: tuple[int, ...] = ()  # of its workers; on a host without EngineCore of those there
    has_core: bool = True  # whether EngineCore is on this host: elsewhere only calls and ends of ranks are shown
    parent: int = 0  # there the process that starts and stops the ranks; 0: it is not known
    launch: str = ""  # the same in all lives of a server, and different for another one


def exporter_url(host: str, port: int, tls: str | None) -> str:
    """Return the URL of an exporter's metrics; ``tls`` is its ``web_config``."""
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}/metrics"
