"""The command ``kvobs trace``: the slow and failed loads of the engines on this host, as waterfalls."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvobs.cli import chrome
from kvobs.cli.output import clock, count, examples, fail
from kvobs.cli.pages import engine_name, wanted_pages
from kvobs.cli.times import seconds_of
from kvobs.cli.trace.reading import spans_in
from kvobs.cli.waterfall import tree
from kvobs.export.load_traces import LoadTrace, load_traces
from kvobs.export.texts import printable, took

AT_MOST = 10
DAY_S = 86400

EXAMPLES = examples(
    "kvobs trace                            the slowest ten loads",
    "kvobs trace --newest --since 10m       the newest ones of ten minutes",
    "kvobs trace --id cmpl-8f56             the loads of a request",
    "kvobs trace 3c1e90aa                   the loads of one engine",
    "kvobs trace --chrome loads.json.gz     all of them, for a trace viewer",
)


def trace(
    wanted: Annotated[
        str | None,
        typer.Argument(metavar="ENGINE", help="Show only loads of this engine (its name as printed)."),
    ] = None,
    *,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only the request, or trace, whose id contains this.")
    ] = None,
    connector: Annotated[str | None, typer.Option(metavar="NAME", help="Only loads of this connector.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only loads of the last 90s, 10m, 2h.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Show the newest first, not the slowest.")] = False,
    at_most: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Show at most this many.")] = AT_MOST,
    chrome_file: Annotated[
        Path | None,
        typer.Option("--chrome", metavar="FILE", help="Also write all for https://ui.perfetto.dev; .gz compresses."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all as JSON.")] = False,
) -> None:
    """Show the slow and failed loads of the engines on this host: the request, its lookup, the load, its ranks.

    Nothing has to be switched on: engines keep these loads in shared memory, also of requests that are not sampled.
    """
    begin_s = time.time() - seconds_of(since, "--since") if since is not None else 0.0
    here = wanted_pages(wanted)
    names = {engine: engine_name(engine, page.process.engine) for engine, page in here}
    spans = spans_in(here)
    every = load_traces(spans.found)
    loads = chosen(every, id_, connector, begin_s, newest=newest)
    if not loads and every and (id_ is not None or connector is not None):
        raise fail(_none_such(every))
    if chrome_file is not None:
        pids = {(engine, page.rank): page.pid for engine, page in here}
        zero_ns = chrome.zero_of([], loads)
        tracks = [event for engine, page in here for event in chrome.process_events(page, names[engine])]
        chrome.write([*tracks, *chrome.load_events(loads, pids, zero_ns)], zero_ns, chrome_file)
    if as_json:
        typer.echo(json.dumps([load.as_dict() for load in loads], allow_nan=False))
        return
    of_time = f" of the last {since}" if since is not None else ""
    _print(loads, names, at_most, of_time, newest=newest, missed=spans.missed)


def chosen(
    loads: Sequence[LoadTrace], id_: str | None, connector: str | None, begin_s: float, *, newest: bool
) -> list[LoadTrace]:
    """Return those that are asked for, the slowest or the newest first."""
    found = [
        load
        for load in loads
        if (id_ is None or id_ in load.request or id_ in load.trace_id)
        and (connector is None or connector == load.connector)
        and load.end_ns >= begin_s * 1e9
    ]
    return sorted(found, key=lambda load: -load.end_ns if newest else -load.duration_ns)


def _none_such(loads: Sequence[LoadTrace]) -> str:
    """Return what there is in place of what was asked for."""
    by_connector = {load.connector: sum(one.connector == load.connector for one in loads) for load in loads}
    there = ", ".join(f"{n:,} of {name}" for name, n in by_connector.items())
    return f"no slow or failed load matches; there are {there}"


def heading(load: LoadTrace, engine: str, now_s: float) -> Text:
    """Return the lines above a waterfall."""
    style = "bold red" if load.outcome == "failed" else "bold"
    at = clock(load.start_ns)
    if now_s - load.start_ns / 1e9 > DAY_S:
        at = f"{dt.datetime.fromtimestamp(load.start_ns / 1e9).astimezone():%Y-%m-%d} {at}"
    text = f"{took(load.duration_ns)}  load of {load.connector}, {printable(load.outcome)}"
    return Text.assemble((text, style), (f"  {at}\nrequest {load.request}\nengine {engine}", "dim"))


def _print(
    loads: Sequence[LoadTrace], names: Mapping[str, str], at_most: int, of_time: str, *, newest: bool, missed: int
) -> None:
    console, now_s = Console(highlight=False, markup=False), time.time()
    if not loads:
        console.print(f"No load{of_time} was slow (option slow_load_ms) or failed.")
    for load in loads[:at_most]:
        console.print(tree(heading(load, names[load.engine], now_s), load.parts), "")
    if loads:
        order = "newest first" if newest else "slowest first"
        more = f" (all with -n {len(loads)})" if len(loads) > at_most else ""
        console.print(
            f"{count(len(loads), 'slow or failed load')}, {order}{more}; times since the request began, in ms"
        )
    if missed:
        console.print(f"{count(missed, 'older span')} of slow and failed loads and calls have been overwritten.")
