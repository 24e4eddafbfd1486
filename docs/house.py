"""List the packages of kvobs, find broken walls, and print its sizes with their aims: ``python -m docs.house``.

A room is a folder or a module at the root of ``kvobs``. Its floor is above those of all rooms that it imports from. A
wall is an import that may never be. Broken walls and circles of rooms fail; sizes only show a direction.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from docs.pages import FOLDER, ROOT, part

PACKAGE = ROOT / "kvobs"

TIERS: tuple[dict[str, str], ...] = (
    {
        "clock": "Reads the wall clock without its jumps.",
        "log": "Logs through vLLM's logger, repeated messages once.",
        "vllm_api": "Lists vLLM's hooks and the differences between its versions.",
        "state": "Holds one request's truth, offers to transfers, and the events of the router: pure, without vLLM.",
    },
    {
        "schema": "Lists options, metrics and spans; checks the options: declared once, read by all.",
        "topology": "Maps decode ranks to the prefill ranks and KV heads that they read; vLLM's class of that name.",
    },
    {
        "faults": "Contains internal errors and counts them.",
        "blocks": "Copies KV blocks within host memory, and to and from a device; needs torch and numpy only.",
    },
    {"page": "Holds all that a process counts and notes in shared memory; others read it there."},
    {
        "probe": "Times and counts each call into a connector, in the page of the process.",
        "aggregation": "Combines the outputs of the workers rank by rank, instead of vLLM's class.",
    },
    {
        "connectors": "Builds, names and calls the configured connectors; makes all hooks of vLLM as one dict.",
        "telemetry": "Observes the router: counts, spans, estimates, reports; carries the connectors' own stats.",
    },
    {
        "routing": "Holds both sides of the connector: who loads, who saves, their messages, isolation.",
        "export": "Makes metrics, spans and a status page of the pages: in the API server, or a process without vLLM.",
    },
    {"connector": "Defines `MultiConnector`, the class that vLLM loads, and wires router and telemetry together."},
    {"plugin": "Enables kvobs by an environment variable: vLLM's entry point."},
    {"cli": "Implements the command `kvobs`."},
    {"testing": "Runs vLLM's scheduler around a connector, and its server on a tiny model: for tests and the demo."},
    {"demo": "Loads a real engine on a CPU, and shows what it did with the commands' own code."},
)
"""Packages and modules of kvobs with what each does, the lowest first: each imports from lower ones only.

``kvobs/__init__.py`` imports the connector late and stands outside."""

NEVER: dict[str, tuple[str, ...]] = {
    "routing": ("telemetry", "export"),
    "state": ("telemetry", "export", "routing"),
    "connectors": ("telemetry", "export"),
    "cli": ("demo",),
    "testing": ("demo",),
}
"""The walls: what no module of a room imports."""

NO_CIRCLES = {"telemetry"}
"""Rooms whose folders and modules never import each other in a circle."""

OUTSIDE_ENGINES = {"cli", "demo", "testing"}
"""Rooms that no engine imports."""


class Measure(NamedTuple):
    """A figure of the house, and the most that it should be one day."""

    name: str
    value: int
    aim: int


def modules() -> dict[str, Path]:
    """Return the file of each module, by its name without ``kvobs.``."""
    return {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the room that a module is in; of ``kvobs`` itself the empty name."""
    return module.partition(".")[0]


def imported(path: Path, known: Iterable[str]) -> set[str]:
    """Return the modules of kvobs that a file imports, at its top or later."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvobs":
            base = (node.module or "").partition(".")[2]
            inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {name if name in known else base for name in inner}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "kvobs"}
    return found


def arrows() -> dict[str, set[str]]:
    """Return the rooms that each room imports from."""
    imports = _imports()
    graph: dict[str, set[str]] = {room(name): set() for name in imports}
    for name, others in imports.items():
        graph[room(name)] |= {room(other) for other in others} - {room(name)}
    return graph


def _imports() -> dict[str, set[str]]:
    files = modules()
    return {name: imported(path, files) for name, path in files.items()}


def broken_walls() -> dict[str, set[str]]:
    """Return the modules that a module imports and never may, by its name."""
    imports = _imports()
    graph: dict[str, set[str]] = {}
    for name, others in imports.items():
        graph.setdefault(_part(name), set()).update(_part(other) for other in others)
    broken = {
        name: {
            other for other in others if _is_forbidden(name, other) or _is_in_circle(_part(name), _part(other), graph)
        }
        for name, others in imports.items()
    }
    return {name: others for name, others in broken.items() if others}


def _part(module: str) -> str:
    """Return the folder or module, directly in its room, that a module is in."""
    return ".".join(module.split(".")[:2])


def _is_forbidden(name: str, other: str) -> bool:
    places = NEVER.get(room(name), ())
    return any(other == place or other.startswith(place if place.endswith(".") else f"{place}.") for place in places)


def _is_in_circle(part: str, other: str, graph: Mapping[str, set[str]]) -> bool:
    """Return whether an arrow between parts of a room without circles has a way back."""
    if part == other or room(part) != room(other) or room(part) not in NO_CIRCLES:
        return False
    ahead, seen = [other], {other}
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead += new
    return part in seen


def floors(graph: dict[str, set[str]]) -> int:
    """Return the number of floors; CycleError names rooms that import each other in a circle."""
    heights: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        heights[name] = 1 + max((heights[lower] for lower in graph[name]), default=0)
    return max(heights.values())


def measures() -> Iterator[Measure]:
    """Yield the figures of the house with their aims."""
    files, graph = modules(), arrows()
    inside = [path for name, path in files.items() if room(name) not in OUTSIDE_ENGINES]
    options = part((ROOT / "docs/options.md").read_text(encoding="utf-8"), "table", "options")
    yield Measure("kvobs, lines", _lines(files.values()), 18_500)
    yield Measure("kvobs, files", len(files), 125)
    yield Measure("in an engine, lines", _lines(inside), 13_000)
    yield Measure("tests, lines", _lines((ROOT / "tests").rglob("*.py")), 40_000)
    yield Measure("rooms", len(graph), 21)
    yield Measure("floors", floors(graph), 9)
    yield Measure("arrows", sum(map(len, graph.values())), 70)
    yield Measure("options", sum(line.startswith("| `") for line in options.splitlines()), 20)
    yield Measure("README, lines", _lines([ROOT / "README.md"]), 120)
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in for_operators())
    yield Measure("operators, words", words, 20_000)


def for_operators() -> list[Path]:
    """Return the pages of ``docs/`` that its index lists for operators, without the changelog."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8").partition("## For developers")[0]
    names = dict.fromkeys(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    return [FOLDER / name for name in names if name != "changelog.md"]


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> int:
    """Print broken walls and all figures; return 1 if a wall is broken."""
    walls = broken_walls()
    lines = [f"{name} must not import {', '.join(sorted(others))}" for name, others in sorted(walls.items())]
    lines += [f"{name:20} {value:7,}  aim {aim:,}" for name, value, aim in measures()]
    print("\n".join(lines))  # noqa: T201
    return 1 if walls else 0


if __name__ == "__main__":
    sys.exit(main())
