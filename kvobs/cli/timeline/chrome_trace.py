"""Write the recordings of an engine as one Chrome trace for Perfetto: a track for each process and connector.

Calls and steps are slices; lookups, loads, saves and resumptions are spans that may overlap; and arrows go from the
scheduler's step that ordered a load or save to the step of each rank that received the order.
"""

import gzip
import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvobs.cli.timeline.recordings import Process, Slice, process_names, request_name
from kvobs.telemetry.timeline.flight import OWN, ROUTED

Event = dict[str, Any]
Key = tuple[str, int, str, int, int]  # run, engine, and of a load or save: kind, connector, request
ORDERING = ROUTED[0]  # the scheduler's step that builds the orders for the ranks


def write(processes: Sequence[Process], path: Path) -> int:
    """Write the trace of these processes, compressed if ``path`` ends with .gz; return the number of events."""
    n = 0
    with gzip.open(path, "wt", 5) if path.suffix == ".gz" else path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for n, event in enumerate(events(processes), 1):
            file.write(("\n" if n == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    return n


def events(processes: Sequence[Process]) -> Iterator[Event]:
    """Return the events of these processes, in time order on each track; times are microseconds since the first."""
    origin = min((process.begin_ns for process in processes), default=0)
    arrows = _arrows(processes)
    for pid, (name, process) in enumerate(zip(process_names(processes), processes, strict=True), 1):
        yield from _named(process, pid, f"{name}, process {process.pid}")
        of_process = [*_slices(process), *_transfers(process), *arrows[pid - 1]]
        for event in sorted(of_process, key=lambda event: int(event["ts"])):
            yield event | {"pid": pid, "ts": (event["ts"] - origin) / 1000}


def _named(process: Process, pid: int, name: str) -> Iterator[Event]:
    """Return the events that name and order the process and its tracks."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for track in sorted({0, *(call.track for call in process.slices)}):
        of = {"ph": "M", "pid": pid, "tid": track}
        yield of | {"name": "thread_name", "args": {"name": process.track_name(track)}}
        yield of | {"name": "thread_sort_index", "args": {"sort_index": track}}


def _slices(process: Process) -> Iterator[Event]:
    """Return the calls and steps; one without an end lasts until the next on its track, or its process's end."""
    following: dict[int, int] = {}
    for call in reversed(process.slices):
        until = following.get(call.track, process.last_ns)
        following[call.track] = call.start
        end, args = call.end, call.args
        if end is None:
            end, args = max(call.start, until), {**args, "ended": False}
        event = {"ph": "X", "tid": call.track, "name": call.name, "ts": call.start, "dur": (end - call.start) / 1000}
        yield event | {"args": args} if args else event


def _transfers(process: Process) -> Iterator[Event]:
    """Return lookups, loads, saves and resumptions; those in progress last until the process's end."""
    for number, transfer in enumerate(process.transfers, 1):
        args: Event = {"request": request_name(transfer.request), "outcome": transfer.outcome}
        args |= {"tokens": transfer.tokens} if transfer.tokens else {}
        name, track = transfer.kind, 0
        if transfer.connector != OWN:
            name, track = f"{name} {process.connectors[transfer.connector]}", transfer.connector + 1
        same = {"cat": transfer.kind, "name": name, "tid": track, "id2": {"local": f"{number:#x}"}}
        end = process.last_ns if transfer.end is None else transfer.end
        yield {"ph": "b", "ts": transfer.start, **same, "args": args}
        yield {"ph": "e", "ts": max(transfer.start, end), **same}


def _arrows(processes: Sequence[Process]) -> list[list[Event]]:
    """Return the arrows' end points by process: from the ordering step to the step that received the order."""
    points: list[list[Event]] = [[] for _ in processes]
    ordered: dict[Key, list[tuple[int, int]]] = defaultdict(list)  # when a transfer was begun, and in which process
    for i, process in enumerate(processes):
        if process.rank is None:
            for key, begun in _begun(process):
                ordered[key].append((begun, i))
    for orders in ordered.values():
        orders.sort()
    steps = [[call for call in process.slices if call.track == 0] for process in processes]
    building = [[call for call in calls if call.name == ORDERING] for calls in steps]
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
            points[scheduler].append({"ph": "s", "ts": order.start, **same})
            points[i].append({"ph": "f", "bp": "e", "ts": receiving.start, **same})
    return points


def _begun(process: Process) -> Iterator[tuple[Key, int]]:
    for transfer in process.transfers:
        if transfer.begun is not None:
            yield (process.run, process.engine, *transfer.key), transfer.begun


def _around(slices: Sequence[Slice], time: int) -> Slice | None:
    """Return the slice that contains this time."""
    at = bisect_right(slices, time, key=lambda call: call.start) - 1
    if at < 0:
        return None
    end = slices[at].end
    return slices[at] if end is None or time <= end else None


def _after(slices: Sequence[Slice], time: int) -> Slice | None:
    """Return the first slice that had not ended then: slices don't overlap."""
    at = bisect_left(slices, time, key=lambda call: call.start if call.end is None else call.end)
    return slices[at] if at < len(slices) else None
