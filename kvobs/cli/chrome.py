"""Write a trace that https://ui.perfetto.dev opens: processes, and the requests and loads in them."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from kvobs.cli.output import count, fail
from kvobs.clock import WALL_OFFSET
from kvobs.export.load_traces import LoadTrace, Part
from kvobs.page.description import process_name
from kvobs.page.reader import Page

FIRST_LANE = 10_000
"""Of the rows of requests and loads: below the connectors' rows."""
Event = dict[str, Any]


def write(events: Iterable[Event], zero_ns: int, path: Path) -> None:
    """Write events, with times since ``zero_ns``, to a new file, compressed if it ends with .gz; print their number."""
    number = 0
    try:
        with path.open("xb") as file, gzip.GzipFile(fileobj=file, mode="wb") if path.suffix == ".gz" else file as out:
            out.write(b'{"traceEvents": [')
            for event in events:
                out.write((",\n" if number else "\n").encode() + json.dumps(event).encode())
                number += 1
            out.write(f'\n], "otherData": {{"begin_unix_ns": {zero_ns + WALL_OFFSET}}}}}\n'.encode())
    except FileExistsError:
        raise fail(f"{path} already exists: name another file") from None
    except OSError as error:
        raise fail(f"{path} can't be written: {error.strerror}") from None
    typer.echo(f"{path}: {count(number, 'event')}; open it at https://ui.perfetto.dev", err=True)


def order_of(rank: int | None) -> int:
    """Return where a process is among the processes of its engine: the scheduler is the first."""
    return -1 if rank is None else rank


def process_events(page: Page, engine: str) -> Iterator[Event]:
    """Yield what names the track of a process of an engine, and puts it in its place."""
    name, order = f"{process_name(page.rank)}, pid {page.pid}, engine {engine}", order_of(page.rank)
    yield {"ph": "M", "pid": page.pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": page.pid, "name": "process_sort_index", "args": {"sort_index": order}}


def zero_of(begins: Iterable[int], loads: Iterable[LoadTrace]) -> int:
    """Return the first of times of the monotonic clock, and of the begins of requests; 0 without any."""
    return min([*begins, *(part.start_ns - WALL_OFFSET for load in loads for part in load.parts)], default=0)


def load_events(
    loads: Iterable[LoadTrace], pids: Mapping[tuple[str, int | None], int], zero_ns: int
) -> Iterator[Event]:
    """Yield the slices of requests and loads, on the tracks of the processes that they were in, by engine and rank.

    Slices that overlap get separate rows. A process that is on another host is shown on the scheduler's track.
    """
    by_pid: defaultdict[int, list[tuple[LoadTrace, Sequence[Part]]]] = defaultdict(list)
    for load in loads:
        scheduler = pids.get((load.engine, None), next((p for (e, _), p in pids.items() if e == load.engine), 0))
        by_pid[scheduler].append((load, [part for part in load.parts if part.rank is None]))
        for part in load.parts:
            if part.rank is not None:
                by_pid[pids.get((load.engine, part.rank), scheduler)].append((load, [part]))
    for pid, groups in by_pid.items():
        lanes: list[int] = []
        for load, parts in sorted(groups, key=lambda group: group[1][0].start_ns):
            begin_ns, end_ns = parts[0].start_ns, max(part.end_ns for part in parts)
            lane = next((i for i, free_ns in enumerate(lanes) if free_ns <= begin_ns), len(lanes))
            if lane == len(lanes):
                lanes.append(0)
                name = {"name": f"requests and loads {lane + 1}"}
                yield {"ph": "M", "pid": pid, "tid": FIRST_LANE + lane, "name": "thread_name", "args": name}
            lanes[lane] = end_ns
            for part in parts:
                yield _slice(load, part, pid, FIRST_LANE + lane, zero_ns)


def _slice(load: LoadTrace, part: Part, pid: int, lane: int, zero_ns: int) -> Event:
    title = f"{part.title} {load.request}" if not part.depth else part.title
    args = {"request": load.request, "connector": load.connector, "trace_id": load.trace_id, "is": part.words}
    return {
        "ph": "X", "name": title, "cat": "load", "pid": pid, "tid": lane, "args": args,
        "ts": (part.start_ns - WALL_OFFSET - zero_ns) / 1e3, "dur": (part.end_ns - part.start_ns) / 1e3,
    }  # fmt: skip
