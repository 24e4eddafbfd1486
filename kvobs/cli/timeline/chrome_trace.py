"""Write the recordings of an engine as one Chrome trace for Perfetto: a track for each process and child.

Calls and steps are slices; lookups, loads, saves and resumptions are spans that may overlap; and arrows go from the
scheduler's step that ordered a load or save to the step of each rank that received the order.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from kvobs.cli.timeline.names import of_processes, of_request
from kvobs.cli.timeline.recordings import Process, Slice
from kvobs.telemetry.timeline.flight import OWN, ROUTED

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
    origin = min((process.begin_ns for process in processes), default=0)
    arrows = _arrows(processes)
    for pid, (name, process) in enumerate(zip(of_processes(processes), processes, strict=True), 1):
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
    """Return lookups, loads, saves and resumptions; those in progress last until the process's end."""
    for number, one in enumerate(process.transfers, 1):
        args: Event = {"request": of_request(one.request), "outcome": one.outcome}
        args |= {"tokens": one.tokens} if one.tokens else {}
        has_child = one.child != OWN
        name = f"{one.kind} {process.children[one.child]}" if has_child else one.kind
        same = {"cat": one.kind, "name": name, "tid": one.child + 1 if has_child else 0}
        same |= {"id2": {"local": f"{number:#x}"}}
        yield {"ph": "b", "ts": one.start, **same, "args": args}
        yield {"ph": "e", "ts": max(one.start, process.last_ns if one.end is None else one.end), **same}


def _arrows(processes: Sequence[Process]) -> list[list[Event]]:
    """Return the arrows' end points by process: from the ordering step to the step that received the order."""
    found: list[list[Event]] = [[] for _ in processes]
    ordered: dict[Key, list[tuple[int, int]]] = defaultdict(list)  # when a transfer was begun, and in which process
    for i, process in enumerate(processes):
        if process.rank is None:
            for key, begun in _begun(process):
                ordered[key].append((begun, i))
    for orders in ordered.values():
        orders.sort()
    steps = [[one for one in process.slices if one.track == 0] for process in processes]
    building = [[one for one in own if one.name == ORDERING] for own in steps]
    numbers = count(1)
    for i, process in enumerate(processes):
        for key, begun in _begun(process) if process.rank is not None else ():
            orders = ordered.get(key, [])
            at = bisect_right(orders, (begun, len(processes))) - 1
            receiving = _around(steps[i], begun)
            if at < 0 or receiving is None:
                continue
            ordered_at, scheduler = orders[at]
            order = _after(building[scheduler], ordered_at)
            if order is None or order.start > receiving.start:
                continue
            same = {"id": next(numbers), "cat": key[2], "name": key[2], "tid": 0}
            found[scheduler].append({"ph": "s", "ts": order.start, **same})
            found[i].append({"ph": "f", "bp": "e", "ts": receiving.start, **same})
    return found


def _begun(process: Process) -> Iterable[tuple[Key, int]]:
    for one in process.transfers:
        if one.begun is not None:
            yield (process.run, process.engine, one.kind, one.child, one.request), one.begun


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
