"""What the tests of `kvobs timeline` share: processes made of records, and the command."""

from typing import Any

from kvobs.telemetry.timeline import open_table
from kvobs.telemetry.timeline.flight import LAYER_HOOKS, NAMES, layer_words
from kvobs.telemetry.timeline.open_table import OpenTable
from kvobs.telemetry.timeline.ring import Ring
from typer.testing import CliRunner

from kvobs.cli import commands as cli
from kvobs.cli.timeline.recordings import Process
from kvobs.cli.timeline.snapshot import read

CHILDREN = ["one", "two"]


def recorded(
    *records: tuple[int, int, int, int],
    rank: int | None = None,
    in_progress: dict[tuple[int, int, int], tuple[int, int]] | None = None,
    layer_times: bytes = b"",
    **more: Any,
) -> Process:
    """Return a process with these records: start, spent, what, more; ``in_progress``: key -> what, start.

    ``layer_times`` are the first live words.
    """
    about = {
        "run": "r", "engine": 0, "rank": rank, "pid": 7, "begun_ns": 10**18, "wall_offset": 10**18,
        "connectors": CHILDREN, "hooks": NAMES, "layer_hooks": LAYER_HOOKS, **more,
    }  # fmt: skip
    memory = bytearray(1 << 16)
    in_layers = layer_words(len(CHILDREN))
    writer = Ring(memory, about, in_layers + open_table.WORDS)
    for record in records:
        writer.add(*record)
    table = OpenTable(writer.words, writer.live + in_layers)
    for key, (what, start) in (in_progress or {}).items():
        table.begin(key, what, start)
    memory[writer.live * 8 : writer.live * 8 + len(layer_times)] = layer_times
    snapshot: Any = read(memory)
    return Process(snapshot, is_alive=False)


def run(*arguments: object, columns: int = 100) -> tuple[int, str]:
    """Run the command; return its exit code, and all that it printed."""
    result = CliRunner().invoke(cli.app, ["timeline", *map(str, arguments)], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output
