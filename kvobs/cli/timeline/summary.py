"""Summarize recordings: the processes, the transfers in progress with their age, and the slowest loads."""

from __future__ import annotations

from collections.abc import Sequence

from kvobs.cli import table
from kvobs.cli.timeline import names
from kvobs.cli.timeline.recordings import Process, Slice
from kvobs.cli.timeline.transfers import Joined
from kvobs.cli.units import NONE, clock, duration

IN_PROGRESS_AT_MOST = 10
SLOWEST_AT_MOST = 5
RAISED_AT_MOST = 5


def of_processes(processes: Sequence[Process]) -> list[str]:
    """Return a table of how much is recorded of each process."""
    rows = []
    for name, one in _named(processes):
        kinds = [transfer.kind for transfer in one.transfers if transfer.end is not None]
        counts = (len(one.slices), kinds.count("load"), kinds.count("save"))
        seconds = (one.last_ns - one.first_ns) / 1e9
        time = f"{seconds:.1f} s" if seconds >= 1 else duration(seconds)
        state = "running" if one.is_alive else "ended"
        rows.append((name, str(one.pid), state, *(f"{n:,}" for n in counts), time, clock(one.last_ns)))
    heads = ("process", "pid", "state", "calls", "loads", "saves", "time", "until")
    return table.lines(heads, rows, texts=("process", "state"))


def of_calls(processes: Sequence[Process]) -> list[str]:
    """Return a line for each call that was still running at the end of its process's recording, with its age.

    And for the last calls that raised.
    """
    raised = [(slice_, name, one) for name, one in _named(processes) for slice_ in one.raised]
    raised.sort(key=lambda entry: entry[0].start)
    return [
        f"{name}: {_connector(one, slice_)} raised in {slice_.name} at {clock(slice_.end or slice_.start)}"
        for slice_, name, one in raised[-RAISED_AT_MOST:]
    ] + [
        f"{name} was in {slice_.name}{of} since {clock(slice_.start)} ({duration((one.read_ns - slice_.start) / 1e9)})"
        for name, one in _named(processes)
        for slice_ in one.open
        for of in [f" of {_connector(one, slice_)}" if slice_.track else ""]
    ]


def _named(processes: Sequence[Process]) -> list[tuple[str, Process]]:
    return list(zip(names.of_processes(processes), processes, strict=True))


def _connector(process: Process, call: Slice) -> str:
    return process.track_name(call.track).partition(":")[0]


def in_progress(joined: Sequence[Joined]) -> list[str]:
    """Return a table of lookups, loads and saves that have not ended, the oldest first."""
    found = [one for one in joined if one.is_open]
    rows = [
        (one.kind, duration(one.spent_ns / 1e9), names.short(one.request), _tokens(one), _ranks(one), place)
        for one, place in zip(found, _places(found, joined), strict=True)
    ]
    heads = ("in progress", "age", "request", "tokens", "waits for", "connector")
    return _cut(table.lines(heads, rows[:IN_PROGRESS_AT_MOST], texts=_LEFT), len(found) - IN_PROGRESS_AT_MOST)


def slowest_loads(joined: Sequence[Joined]) -> list[str]:
    """Return a table of the loads that took longest."""
    ended = [one for one in joined if one.kind == "load" and not one.is_open]
    slowest = sorted(ended, key=lambda one: -one.spent_ns)[:SLOWEST_AT_MOST]
    rows = [
        (
            *(clock(one.start), duration(one.spent_ns / 1e9), names.short(one.request), _tokens(one)),
            *(last_rank(one), place + ("" if one.outcome == "ok" else f", {one.outcome}")),
        )
        for one, place in zip(slowest, _places(slowest, joined), strict=True)
    ]
    heads = ("slowest loads", "took", "request", "tokens", "last rank", "connector")
    return table.lines(heads, rows, texts=_LEFT)


_LEFT = ("in progress", "slowest loads", "request", "waits for", "last rank", "connector")


def last_rank(one: Joined) -> str:
    """Return the rank that took longest, and how much longer than the quickest."""
    if one.slowest is None:
        return NONE
    rank, skew_ns = one.slowest
    return f"{rank} +{duration(skew_ns / 1e9)}"


def _places(several: Sequence[Joined], of: Sequence[Joined]) -> list[str]:
    """Return the connector of each, behind its run and engine where the recordings have several."""
    engines = dict(zip(((one.run, one.engine) for one in of), names.of_engines(of), strict=True))
    return [", ".join(filter(None, (engines[one.run, one.engine], one.connector))) or NONE for one in several]


def _ranks(one: Joined) -> str:
    if not one.waits_for:
        return NONE
    return f"rank{'s' * (len(one.waits_for) > 1)} {', '.join(map(str, one.waits_for))}"


def _tokens(one: Joined) -> str:
    return f"{one.tokens:,}" if one.tokens else NONE


def _cut(lines: list[str], more: int) -> list[str]:
    return [*lines, f"and {more:,} more: see --requests"] if more > 0 else lines
