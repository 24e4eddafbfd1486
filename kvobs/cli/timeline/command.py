"""The command ``kvobs timeline``."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvobs.cli.output import examples, fail, show, warn
from kvobs.cli.timeline import recordings, tables
from kvobs.cli.timeline.chrome_trace import write
from kvobs.cli.timeline.recordings import Process
from kvobs.cli.timeline.transfers import Joined, join

EXAMPLES = examples(
    "kvobs timeline /dev/shm/kvobs --last 10s",
    "kvobs timeline /dev/shm/kvobs --all -o all.json.gz --force",
)
OUTPUT = Path("timeline.json.gz")
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS_NS)})")


def timeline(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the recordings (option timeline.dir).")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"File to write: .json or .json.gz; {OUTPUT} unless given.")
    ] = None,
    last: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only the last part, such as 500ms, 10s or 2m.")
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Include every run, not only the newest.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write the recorded calls of all processes of an engine, running or not, as a trace for https://ui.perfetto.dev."""
    last_ns = None if last is None else nanoseconds(last)
    output = output or OUTPUT
    if output.exists() and not force:
        raise fail(f"{output} exists; --force overwrites it, -o names another file")
    problems: list[str] = []
    try:
        processes = recordings.load(folder, all_runs=all_runs, problems=problems)
    except ValueError as error:
        raise fail(str(error)) from None
    for problem in problems:
        warn(problem)
    joined = join(processes)
    if last_ns is not None:
        joined = _keep_last(processes, joined, last_ns)
    _write(processes, joined, output)


def nanoseconds(text: str) -> int:
    """Return a duration such as 500ms, 10s or 2m in nanoseconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a duration; use e.g. 500ms, 10s or 2m", param_hint="--last")
    return int(float(match[1]) * _UNITS_NS[match[2]])


def _keep_last(processes: Sequence[Process], joined: Sequence[Joined], last_ns: int) -> list[Joined]:
    """Keep what goes on in the last part of each run, before its newest record."""
    since: dict[str, int] = {}
    for process in processes:
        since[process.run] = max(since.get(process.run, 0), process.last_ns - last_ns)
    for process in processes:
        process.keep_from(since[process.run])
    return [transfer for transfer in joined if transfer.end is None or transfer.end >= since[transfer.run]]


def _write(processes: Sequence[Process], joined: Sequence[Joined], output: Path) -> None:
    try:
        events = write(processes, output)
    except OSError as error:
        raise fail(f"{output} can't be written: {error.strerror}") from None
    console = Console()
    show(console, tables.of_processes(processes))
    for line in tables.of_calls(processes):
        console.print(line, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    for part in (tables.in_progress(joined), tables.slowest_loads(joined)):
        if part:
            console.print()
            show(console, part)
    console.print(f"\n{output}: {events:,} events; open it at https://ui.perfetto.dev", highlight=False, soft_wrap=True)
