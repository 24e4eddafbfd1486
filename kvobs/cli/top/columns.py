"""The columns of `kvobs top`: what each shows of a server or a child, how wide, and which go first without room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from kvobs.cli.top.rows import ConnectorRow, Server
from kvobs.cli.units import NONE, amount, duration, percent, signed, whole


@dataclass(frozen=True)
class Column:
    """A number of each child."""

    title: str
    unit: str
    """Below the title."""
    by: str
    """The field that it is sorted by."""
    show: Callable[[ConnectorRow], str]
    width: int = 6
    words: str = ""
    """Its text in a line; "{}" is the number."""


def columns(*, since_start: bool) -> list[Column]:
    """Return all columns of children, in their order."""

    def stall(child: ConnectorRow) -> str:
        return duration(child.stall_s) if since_start or child.stall_s is None else amount(1e3 * child.stall_s)

    def scheduler(child: ConnectorRow) -> str:
        return duration(child.scheduler_s) if since_start else percent(child.scheduler_s)

    per_s, ms_per_s = ("", "") if since_start else ("/s", "ms/s")
    return [
        Column("hits", "", "hit_share", lambda c: percent(c.hit_share), 5),
        Column("lookups", per_s, "lookups", lambda c: amount(c.lookups), 7),
        Column("tokens", per_s, "load_tokens", lambda c: amount(c.load_tokens)),
        Column("bytes", per_s, "load_bytes", lambda c: amount(c.load_bytes), 6, f"{{}} bytes{per_s}"),
        Column("unused", per_s, "unused_tokens", lambda c: amount(c.unused_tokens), 6, f"{{}} tokens{per_s} unused"),
        Column("loads", per_s, "loads", lambda c: amount(c.loads), 5),
        Column("load", "p50", "load_p50_s", lambda c: duration(c.load_p50_s)),
        Column("load", "p99", "load_p99_s", lambda c: duration(c.load_p99_s)),
        Column("sched", "" if since_start else "busy", "scheduler_s", scheduler),
        Column("stall", ms_per_s, "stall_s", stall),
        Column("gain", "s" if since_start else "s/s", "gain_s", lambda c: signed(c.gain_s), 7, "gain {}"),
        Column("loads", "open", "loads_open", lambda c: whole(c.loads_open), 5),
        Column("saves", "held", "saves_held", lambda c: whole(c.saves_held), 5, "saves held {}"),
        Column("oldest", "", "oldest_s", lambda c: duration(c.oldest_s)),
        Column("skew", "p99", "skew_p99_s", lambda c: duration(c.skew_p99_s), 6, "skew p99 {}"),
        Column("slowest", "rank", "slowest_rank_share", _slowest, 12, "slowest rank {}"),
        Column("errors", per_s, "errors", lambda c: amount(c.errors)),
    ]


LEFT_OUT = (
    "gain_s",
    "lookups",
    "loads",
    "slowest_rank_share",
    "skew_p99_s",
    "unused_tokens",
    "saves_held",
    "load_bytes",
)
"""Columns that are omitted without room for all, in this order; what has words is then in a line below the child."""


def _slowest(child: ConnectorRow) -> str:
    return NONE if child.slowest_rank is None else f"{child.slowest_rank:.4} ({percent(child.slowest_rank_share)})"


SORTS: tuple[str | None, ...] = (None, *(column.by for column in columns(since_start=False)))
"""What they can be sorted by, in the order of the columns; None: as they are configured."""


@dataclass(frozen=True)
class ServerColumn:
    """A number, or a version, of each server."""

    title: str
    width: int
    show: Callable[[Server], str]


def _telemetry(server: Server) -> str:
    if server.telemetry_s is None:
        return NONE
    return duration(server.telemetry_s) + ("" if server.seconds is None else "/s")


def _requests(number: int | None) -> str:
    return NONE if number is None else whole(number)


VERSIONS = (
    ServerColumn("vLLM", 8, lambda server: server.vllm_version),
    ServerColumn("kvobs", 7, lambda server: server.kvobs_version),
)
"""Where there is room for them, the first one first."""
OF_SERVERS = (
    ServerColumn("run", 5, lambda server: _requests(server.running)),
    ServerColumn("wait", 5, lambda server: _requests(server.waiting)),
    ServerColumn("TTFT p50", 8, lambda server: duration(server.ttft_p50_s)),
    ServerColumn("p99", 6, lambda server: duration(server.ttft_p99_s)),
    ServerColumn("telemetry", 9, _telemetry),
    ServerColumn("errors in it", 12, lambda server: str(server.internal_errors)),
)


def fit(text: str, width: int) -> str:
    """Return text of this width; what is cut ends with a mark."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
