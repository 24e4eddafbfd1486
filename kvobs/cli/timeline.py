"""The command ``kvobs timeline``: what the processes of an engine, running or dead, are in, and their last minute."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvobs.cli import chrome
from kvobs.cli.output import clock, count, examples
from kvobs.cli.pages import engine_name, wanted_pages
from kvobs.cli.trace.reading import spans_in
from kvobs.clock import WALL_OFFSET, wall_ns
from kvobs.export.load_traces import load_traces
from kvobs.export.texts import duration, printable
from kvobs.page.description import process_name
from kvobs.page.layout import LOOKED
from kvobs.page.reader import Call, CallRecord, Page
from kvobs.vllm_api.hooks import HOOKS, Cadence

MINUTE_NS = 60 * 10**9
ROWS_AT_MOST = 8


class Sums(NamedTuple):
    """The calls of a hook of a connector."""

    connector: str
    hook: str
    calls: int
    spent_ns: int
    slowest_ns: int
    failed: int


class Process:
    """A process of an engine, as it was when its page was read; times are of the monotonic clock."""

    def __init__(self, engine: str, page: Page) -> None:
        self.engine, self.page = engine, page
        self.calls, self.raised, self.records = page.calls(), page.raised(), page.records()
        # When the last call ended; 0 if no call ended.
        self.last_ns = max((record.begin_ns + record.spent_ns for record in self.records), default=0)
        begins = [call.since_ns for call in (*self.calls, self.raised) if call is not None]
        # Until now, or when a dead process was last seen to run.
        self.state, self.until_ns = "died", max([page.words[LOOKED], self.last_ns, *begins])
        if page.has_ended_well:
            self.state = "ended well"
        elif page.is_alive:
            self.state, self.until_ns = "stopped" if page.is_stopped else "alive", wall_ns() - WALL_OFFSET

    @property
    def name(self) -> str:
        return f"{process_name(self.page.rank)}, pid {self.page.pid}"

    @property
    def engine_name(self) -> str:
        return engine_name(self.engine, self.page.process.engine)

    @property
    def window_ns(self) -> int:
        """The time before the end of its last call, of at most a minute, whose calls are all in the ring."""
        if len(self.records) < self.page.process.calls - 1:  # one may be incomplete
            return MINUTE_NS
        return min(MINUTE_NS, self.last_ns - self.records[0].begin_ns)

    def sums(self) -> list[Sums]:
        """Return the calls of this time, those that took longest in all first."""
        since_ns = self.last_ns - self.window_ns
        recent = [record for record in self.records if record.begin_ns + record.spent_ns >= since_ns]
        found = []
        for (connector, hook), group in groupby(sorted(recent), lambda record: record[:2]):
            same = list(group)
            spent = [record.spent_ns for record in same]
            calls, failed = sum(record.calls for record in same), sum(record.has_raised for record in same)
            found.append(Sums(connector, hook, calls, sum(spent), max(spent), failed))
        return sorted(found, key=lambda sums: -sums.spent_ns)

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "model": self.page.process.engine.model or None,
            "port": self.page.process.engine.port,
            "pid": self.page.pid,
            "rank": self.page.rank,
            "state": self.state,
            "until": _wall_s(self.until_ns),
            "in_progress": [
                {"connector": call.connector, "hook": call.hook, "since": _wall_s(call.since_ns),
                 "seconds": (self.until_ns - call.since_ns) / 1e9}
                for call in self.calls
            ],
            "raised": None if self.raised is None else {
                "connector": self.raised.connector, "hook": self.raised.hook, "error": self.raised.error,
                "at": _wall_s(self.raised.since_ns),
            },
            "last": _wall_s(self.last_ns) if self.last_ns else None,
            "window_seconds": self.window_ns / 1e9,
            "calls": [
                {"connector": sums.connector, "hook": sums.hook, "calls": sums.calls, "failed": sums.failed,
                 "seconds": sums.spent_ns / 1e9, "slowest_seconds": sums.slowest_ns / 1e9}
                for sums in self.sums()
            ],
        }  # fmt: skip


def _wall_s(ns: int) -> float:
    return (ns + WALL_OFFSET) / 1e9


EXAMPLES = examples(
    "kvobs timeline                          all engines, running or dead",
    "kvobs timeline 21469                    a process by its pid, with all rows",
    "kvobs timeline --chrome calls.json.gz   calls and slow loads, to view",
)


def timeline(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="ENGINE|PID", help="Show only this engine (its name as printed) or this process (its pid)."
        ),
    ] = None,
    *,
    chrome: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write calls and loads for https://ui.perfetto.dev; .gz compresses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the call that each process of an engine is in, or ended in, its last exception, and its last minute."""
    processes = _read(wanted)
    if chrome is not None:
        _write(processes, chrome)
    if as_json:
        typer.echo(json.dumps([process.as_dict() for process in processes]))
        return
    console = Console(highlight=False, markup=False)
    for _, group in groupby(processes, lambda process: process.engine):
        first, *others = group
        console.print(f"engine {first.engine_name}\n", style="bold", soft_wrap=True)
        for process in (first, *others):
            for part in _lay_out(process, ROWS_AT_MOST if wanted != str(process.page.pid) else None):
                console.print(part, soft_wrap=isinstance(part, str))
            console.print()


def _read(wanted: str | None) -> list[Process]:
    """Return the wanted processes, by engine, the scheduler first."""
    found = [Process(engine, page) for engine, page in wanted_pages(wanted)]
    return sorted(found, key=lambda process: (process.engine, chrome.order_of(process.page.rank), process.page.pid))


def _write(processes: Sequence[Process], trace: Path) -> None:
    loads = load_traces(spans_in((process.engine, process.page) for process in processes).found)
    begins = [record.begin_ns for process in processes for record in process.records[:1]]
    begins += [call.since_ns for process in processes for call in process.calls]
    zero_ns = chrome.zero_of(begins, loads)
    pids = {(process.engine, process.page.rank): process.page.pid for process in processes}
    events = chain(*(_events(process, zero_ns) for process in processes), chrome.load_events(loads, pids, zero_ns))
    chrome.write(events, zero_ns, trace)


def _events(process: Process, zero_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a track, with a row for each connector, and one for each of its layer hooks.

    The calls of a layer hook in a step are one slice, which ends with the last of them.
    """
    pid = process.page.pid
    yield from chrome.process_events(process.page, process.engine_name)
    rows: dict[str, int] = {}
    calls: list[CallRecord | Call] = [*process.records, *process.calls]
    for call in calls:
        is_of_layers = HOOKS[call.hook].cadence is Cadence.LAYER
        row = f"{call.connector}: {call.hook}" if is_of_layers else call.connector
        if row not in rows:
            rows[row] = len(rows) + 1
            yield {"ph": "M", "pid": pid, "tid": rows[row], "name": "thread_name", "args": {"name": row}}
        event = {"name": call.hook, "pid": pid, "tid": rows[row]}
        if isinstance(call, Call):  # its end is missing
            yield event | {"ph": "B", "ts": (call.since_ns - zero_ns) / 1e3}
        else:
            times = {"ts": (call.begin_ns - zero_ns) / 1e3, "dur": call.spent_ns / 1e3}
            yield event | times | {"ph": "X", "args": {"calls": call.calls, "failed": call.has_raised}}


# --- what is printed


def _lay_out(process: Process, rows_at_most: int | None) -> Iterator[str | Table]:
    """Yield lines and a table about a process."""
    at = "" if process.state in ("alive", "stopped") else f", last seen at {clock(process.until_ns + WALL_OFFSET)}"
    yield f"{process.name}: {process.state}{at}"
    verb, for_ = ("is", "for") if not at else ("was", "for at least")
    for call in process.calls:
        age = duration((process.until_ns - call.since_ns) / 1e9)
        yield f"  {verb} in {_of(call)} {for_} {age}, since {clock(call.since_ns + WALL_OFFSET)}"
    if not process.calls:
        yield f"  {verb} in no call"
    if process.raised is not None:
        at = clock(process.raised.since_ns + WALL_OFFSET)
        yield f"  raised {printable(process.raised.error)} in {_of(process.raised)} at {at}"
    if sums := process.sums():
        window, at = duration(process.window_ns / 1e9), clock(process.last_ns + WALL_OFFSET)
        yield f"  calls of the {window} until {at}:"
        yield _table(sums[:rows_at_most])
        if more := len(sums[rows_at_most:]) if rows_at_most else 0:
            yield f"  and {count(more, 'row')} more: kvobs timeline {process.page.pid}"


def _of(call: Call) -> str:
    return f"{call.hook} of connector '{printable(call.connector)}'"


def _table(rows: Iterable[Sums]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    table.add_column("connector", overflow="fold")
    table.add_column("hook", no_wrap=True)
    for head in ("calls", "in all", "slowest", "failed"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        times = duration(row.spent_ns / 1e9), duration(row.slowest_ns / 1e9)
        cells = printable(row.connector), row.hook, f"{row.calls:,}", *times, f"{row.failed:,}"
        table.add_row(*map(Text, cells), style="bold red" if row.failed else None)
    return table
