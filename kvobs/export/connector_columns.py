"""List the numbers of a connector with their titles and meanings, as `kvobs top` and the status page show them."""

from collections.abc import Callable
from typing import NamedTuple

from kvobs.export.connector_rows import ConnectorRow
from kvobs.export.texts import NONE, amount, duration, integer, percent, signed_amount
from kvobs.schema.signals import no_estimate
from kvobs.schema.verdicts import HANGS, IDLE, WELL


class Column(NamedTuple):
    """A number of each connector, and the field to sort by; one with words is below the connector's row."""

    title: str
    show: Callable[[ConnectorRow], str]
    by: str
    words: str = ""


MEANINGS = {
    "run, wait, TTFT": "running and waiting requests, and the time to the first token: from vLLM's own metrics",
    "telemetry, errors in it": "share of the server's time spent in kvobs, and internal errors since the start",
    "hits": "share of hits among the requests that were answered or timed out",
    "tokens, loads, lookups": "tokens loaded, successful loads, and requests that were answered or timed out",
    "bytes, lost to a shorter offer": "bytes over all ranks; tokens offered beyond the chosen connector's offer",
    "saved": "tokens stored, by the connector's KV cache events; most connectors publish none",
    "stored, evicted": "tokens that it holds now, of its size if known, and tokens that it forgot, by these events",
    "load p50, p99, mean": "duration of successful loads; p50 and p99 are accurate to 10 %",
    "sched busy": "share of the time that the scheduler spent in calls into the connector: no step runs meanwhile",
    "stall": "time that steps waited for loads and saves, summed over ranks",
    "oldest, loads open, saves held": "open loads and held saves, and the age of the oldest of these, of the lookups "
    "that requests wait for, and of the loaded requests that are not scheduled yet",
    "gain": "time that computing the loaded tokens would have taken, minus the waits, for loads with an estimate",
    "slowest rank, skew p99": "the rank that was slowest most often, with its share; how much longer the slowest "
    "rank took than the fastest",
    "errors": "exceptions raised by the connector, plus failed loads",
}
"""All numbers on the screen, by their titles."""


def columns(*, since_start: bool, narrow: bool = False) -> list[Column]:
    """Return all numbers; in a narrow window some are below the connector."""
    per_s, of_time = ("", duration) if since_start else ("/s", percent)
    p50, stall, oldest = ("load p50 {}", f"stall {{}}{per_s}", "oldest {}") if narrow else ("", "", "")
    return [
        Column("hits", lambda c: percent(c.hit_share), "hit_share"),
        Column(f"tokens\n{per_s}", lambda c: amount(c.load_tokens_per_s), "load_tokens_per_s"),
        Column("load\np50", lambda c: duration(c.load_p50_s), "load_p50_s", p50),
        Column("load\np99", lambda c: duration(c.load_p99_s), "load_p99_s"),
        Column("load mean", lambda c: duration(c.load_mean_s), "load_mean_s", "load mean {}"),
        Column("sched\nbusy", lambda c: of_time(c.scheduler_s_per_s), "scheduler_s_per_s"),
        Column(f"stall\n{per_s}", lambda c: duration(c.stall_s_per_s), "stall_s_per_s", stall),
        Column("oldest", lambda c: duration(c.oldest_s), "oldest_s", oldest),
        Column("gain", lambda c: _gain(c, per_s), "gain_s_per_s", "gain: {}"),
        Column("slowest rank", _slowest, "slowest_rank_share", "slowest rank {}"),
        Column("skew p99", lambda c: duration(c.skew_p99_s), "skew_p99_s", "skew p99 {}"),
        Column("loads open", lambda c: integer(c.loads_open), "loads_open", "loads open {}"),
        Column("saves held", lambda c: integer(c.saves_held), "saves_held", "saves held {}"),
        Column("bytes", lambda c: amount(c.load_bytes_per_s), "load_bytes_per_s", f"{{}} bytes{per_s}"),
        Column("saved", lambda c: amount(c.save_tokens_per_s), "save_tokens_per_s", f"{{}} tokens{per_s} saved"),
        Column(
            "evicted", lambda c: amount(c.evicted_tokens_per_s), "evicted_tokens_per_s", f"{{}} tokens{per_s} evicted"
        ),
        Column("stored", _stored, "stored_tokens", "{} tokens stored"),
        Column(
            "lost to a shorter offer",
            lambda c: amount(c.lost_to_shorter_offer_per_s),
            "lost_to_shorter_offer_per_s",
            f"{{}} tokens{per_s} lost to a shorter offer",
        ),
        Column("loads", lambda c: amount(c.loads_per_s), "loads_per_s", f"{{}} loads{per_s}"),
        Column("lookups", lambda c: amount(c.lookups_per_s), "lookups_per_s", f"{{}} lookups{per_s}"),
        Column(f"errors\n{per_s}", lambda c: amount(c.errors_per_s), "errors_per_s"),
    ]


def _gain(row: ConnectorRow, per_s: str) -> str:
    """Return the gain with the number of loads that it is of, or why there is none."""
    if row.gain_s_per_s is None or not (row.loads_per_s or row.estimated_loads_per_s):
        return no_estimate(row.prefills_seen) if row.loads_per_s else NONE
    return f"{signed_amount(row.gain_s_per_s)} of {amount(row.estimated_loads_per_s)} loads{per_s}"


def _stored(row: ConnectorRow) -> str:
    """Return what a store holds, of how much room."""
    if row.stored_tokens is None:
        return NONE
    return amount(row.stored_tokens) + (f" of {amount(row.capacity_tokens)}" if row.capacity_tokens else "")


def _slowest(row: ConnectorRow) -> str:
    return f"{row.slowest_rank:.4} ({percent(row.slowest_rank_share)})" if row.slowest_rank else NONE


def problems_of(row: ConnectorRow) -> list[str]:
    """Return a connector's state if it is bad, and the call that it is in."""
    problems = []
    if row.state == HANGS.name:
        problems.append(f"{row.state}: {row.state_by} for {duration(row.state_value)}")
    elif row.state not in {WELL.name, IDLE.name}:
        problems.append(row.state)
    if row.call:
        problems.append(f"in {row.call}" if row.state == HANGS.name else f"in {row.call} for {duration(row.call_s)}")
    return problems
