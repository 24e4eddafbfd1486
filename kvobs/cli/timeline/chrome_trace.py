"""Write the recordings of an engine as one Chrome trace for Perfetto: a track for each process and child.

Calls and steps are slices, loads and saves are spans that may overlap, and arrows go from the scheduler's step that
ordered a load or save to the step of each rank that received the order.
"""

from __future__ import annotations

import datetime as dt
import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from kvobs.cli.timeline.recordings import Process, Slice, Transfer
from kvobs.telemetry.flight import OUTCOMES, ROUTED

Event = dict[str, Any]
Key = tuple[str, int, str, int, int]  # run, engine, and of a load or save: kind, child, request
ORDERING = ROUTED[0]  # the scheduler's step that builds the orders for the ranks


def write(processes: Sequence[Process], path: Path) -> int:
    """Write the trace of these processes, compressed if ``path`` ends with .gz; return the number of events."""
    with gzip.open(path, "wt", 5) if path.suffix == ".gz" else path.open("w") as file:
        return _write(processes, file)


def _write(processes: Sequence[Process], file: TextIO) -> int:
    n = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for n, event in enumerate(events(processes), 1):
        file.write(("\n" if n == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return n


def events(processes: Sequence[Process]) -> Iterator[Event]:
    """Return the events of these processes, in time order on each track; times are microseconds since the first."""
    origin = min((process.first_ns for process in processes), default=0)
    arrows = _arrows(processes)
    for pid, (name, process) in enumerate(zip(names(processes), processes, strict=True), 1):
        yield from _named(process, pid, f"{name}, process {process.pid}")
        of_process = [*_slices(process), *_transfers(process), *arrows[pid - 1]]
        for event in sorted(of_process, key=lambda event: int(event["ts"])):
            yield event | {"pid": pid, "ts": (event["ts"] - origin) / 1000}


def _named(process: Process, pid: int, name: str) -> Iterator[Event]:
    """Return the events that name and order the process and its tracks."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for track in sorted({0, *(one.track for one in process.slices)}):
        of = {"ph": "M", "pid": pid, "tid": track}
        yield of | {"name": "thread_name", "args": {"name": process.track_name(track)}}
        yield of | {"name": "thread_sort_index", "args": {"sort_index": track}}


def _slices(process: Process) -> Iterator[Event]:
    """Return the calls and steps; one without an end lasts until the next on its track, or its process's end."""
    following: dict[int, int] = {}
    for one in reversed(process.slices):
        until = following.get(one.track, process.last_ns)
        following[one.track] = one.start
        end, args = one.end, one.args
        if end is None:
            end, args = max(one.start, until), {**args, "ended": False}
        event = {"ph": "X", "tid": one.track, "name": one.name, "ts": one.start, "dur": (end - one.start) / 1000}
        yield event | {"args": args} if args else event


def _transfers(process: Process) -> Iterator[Event]:
    """Return the loads and saves; open ones last until the process's end."""
    opened: dict[tuple[str, int, int], Transfer] = {}
    numbers = count(1)
    for one in process.transfers:
        key = one.kind, one.child, one.request
        begun = opened.pop(key, None)
        if one.end is None:
            if begun is not None:  # replaced by another one
                yield from _span(process, begun, one.start, next(numbers), tokens=begun.n)
            opened[key] = one
        else:
            tokens = begun.n if begun is not None else 0
            yield from _span(process, one, one.end, next(numbers), tokens=tokens, outcome=OUTCOMES[one.n])
    for one in opened.values():
        yield from _span(process, one, process.last_ns, next(numbers), tokens=one.n)


def _span(
    process: Process, one: Transfer, end: int, number: int, *, tokens: int, outcome: str = "open"
) -> Iterator[Event]:
    args: Event = {"request": f"{one.request & (1 << 64) - 1:016x}", "outcome": outcome}
    args |= {"tokens": tokens} if tokens else {}
    same = {"cat": one.kind, "name": f"{one.kind} {process.children[one.child]}", "tid": one.child + 1}
    same |= {"id2": {"local": f"{number:#x}"}}
    yield {"ph": "b", "ts": one.start, **same, "args": args}
    yield {"ph": "e", "ts": max(one.start, end), **same}


def _arrows(processes: Sequence[Process]) -> list[list[Event]]:
    """Return the arrows' end points by process: from the ordering step to the step that received the order."""
    found: list[list[Event]] = [[] for _ in processes]
    ordered: dict[Key, list[tuple[int, int]]] = defaultdict(list)  # when a transfer was begun, and in which process
    for i, process in enumerate(processes):
        if process.rank is None:
            for key, one in _begun(process):
                ordered[key].append((one.start, i))
    for orders in ordered.values():
        orders.sort()
    steps = [[one for one in process.slices if one.track == 0] for process in processes]
    building = [[one for one in own if one.name == ORDERING] for own in steps]
    numbers = count(1)
    for i, process in enumerate(processes):
        for key, one in _begun(process) if process.rank is not None else ():
            orders = ordered.get(key, [])
            at = bisect_right(orders, (one.start, len(processes))) - 1
            told = _around(steps[i], one.start)
            if at < 0 or told is None:
                continue
            begun, scheduler = orders[at]
            order = _after(building[scheduler], begun)
            if order is None or order.start > told.start:
                continue
            same = {"id": next(numbers), "cat": one.kind, "name": one.kind, "tid": 0}
            found[scheduler].append({"ph": "s", "ts": order.start, **same})
            found[i].append({"ph": "f", "bp": "e", "ts": told.start, **same})
    return found


def _begun(process: Process) -> Iterable[tuple[Key, Transfer]]:
    for one in process.transfers:
        if one.end is None:
            yield (process.run, process.engine, one.kind, one.child, one.request), one


def _around(slices: Sequence[Slice], time: int) -> Slice | None:
    """Return the slice that contains this time."""
    at = bisect_right(slices, time, key=lambda one: one.start) - 1
    if at < 0:
        return None
    end = slices[at].end
    return slices[at] if end is None or time <= end else None


def _after(slices: Sequence[Slice], time: int) -> Slice | None:
    """Return the first slice that had not ended then: slices don't overlap."""
    at = bisect_left(slices, time, key=lambda one: one.start if one.end is None else one.end)
    return slices[at] if at < len(slices) else None


def names(processes: Sequence[Process]) -> list[str]:
    """Return the shortest distinct name for each process."""
    runs = list(dict.fromkeys(one.run for one in processes))
    engines = {one.engine for one in processes}
    return [
        (f"run {runs.index(one.run) + 1}, " if len(runs) > 1 else "")
        + (f"engine {one.engine} " if len(engines) > 1 else "")
        + one.name
        for one in processes
    ]


def lay_out(processes: Sequence[Process]) -> Table:
    """Return a table of how much is recorded of each process."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("process", "pid", "state", "calls", "loads", "saves", "time", "until"):
        is_text = heading in ("process", "state")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for name, one in zip(names(processes), processes, strict=True):
        kinds = [transfer.kind for transfer in one.transfers if transfer.end is not None]
        counts = (len(one.slices), kinds.count("load"), kinds.count("save"))
        time = f"{(one.last_ns - one.first_ns) / 1e9:.1f} s"
        state = "running" if one.is_alive else "ended"
        table.add_row(name, str(one.pid), state, *(f"{n:,}" for n in counts), time, _clock(one.last_ns))
    return table


def not_ended(processes: Sequence[Process]) -> list[str]:
    """Return a line for each call that was still running at the end of its process's recording."""
    return [
        f"{name} was in {slice_.name}{of} since {_clock(slice_.start)}"
        for name, one in zip(names(processes), processes, strict=True)
        for slice_ in one.open
        for of in [f" of {one.track_name(slice_.track).partition(':')[0]}" if slice_.track else ""]
    ]


def _clock(ns: int) -> str:
    return dt.datetime.fromtimestamp(ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
