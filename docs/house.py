"""List the rooms of kvobs by floor, and print its sizes with their aims: ``python -m docs.house``.

A room is a folder or a module at the root of ``kvobs``. The floors are the layers of the contract in
``pyproject.toml``, which ``lint-imports`` checks. Sizes show a direction, and fail nothing.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import grimp

from docs.pages import FOLDER, ROOT, table
from docs.tables import options

PACKAGE = ROOT / "kvobs"
OUTSIDE_ENGINES = {"cli", "demo", "testing"}
"""Rooms that no engine imports."""


_WORD = re.compile(r"\S*\w\S*")  # not the bars of a table


class Measure(NamedTuple):
    """A figure of the house, and the most that it should be one day."""

    name: str
    value: int
    aim: int


def floors() -> list[list[str]]:
    """Return the rooms of each floor, the lowest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.split(" | ") for layer in reversed(layers)]


def purpose(room: str) -> str:
    """Return what a room does: the first line of its docstring, as Markdown."""
    folder = PACKAGE / room
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "`")


def packages() -> str:
    """Return the packages and modules of kvobs as a table, the highest first."""
    rows = [
        [str(floor), f"`{room}{'/' if (PACKAGE / room).is_dir() else ''}`", purpose(room)]
        for floor, rooms in reversed(list(enumerate(floors(), 1)))
        for room in rooms
    ]
    return table(["floor", "package or module", "what it does"], rows)


def measures() -> Iterator[Measure]:
    """Yield the figures of the house with their aims."""
    files = sorted(PACKAGE.rglob("*.py"))
    inside = [path for path in files if path.relative_to(PACKAGE).parts[0] not in OUTSIDE_ENGINES]
    graph = grimp.build_graph("kvobs", cache_dir=None)
    for room in graph.find_children("kvobs"):
        graph.squash_module(room)
    arrows = sum(len(graph.find_modules_directly_imported_by(room) - {room}) for room in graph.modules)
    yield Measure("kvobs, lines", _lines(files), 18_500)
    yield Measure("kvobs, files", len(files), 125)
    yield Measure("in an engine, lines", _lines(inside), 13_000)
    yield Measure("tests, lines", _lines((ROOT / "tests").rglob("*.py")), 40_000)
    yield Measure("rooms", len(graph.modules), 21)
    yield Measure("arrows", arrows, 70)
    yield Measure("options", sum(line.startswith("| `") for line in options().splitlines()), 20)
    yield Measure("README, lines", _lines([ROOT / "README.md"]), 120)
    words = sum(len(_WORD.findall(page.read_text(encoding="utf-8"))) for page in for_operators())
    yield Measure("operators, words", words, 20_000)


def for_operators() -> list[Path]:
    """Return the pages of ``docs/`` that its index lists for operators, without the changelog."""
    index = (FOLDER / "README.md").read_text(encoding="utf-8").partition("## For developers")[0]
    names = dict.fromkeys(re.findall(r"\]\((\w[\w-]*\.md)\)", index))
    return [FOLDER / name for name in names if name != "changelog.md"]


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


if __name__ == "__main__":
    for name, value, aim in measures():
        print(f"{name:20} {value:7,}  aim {aim:,}")  # noqa: T201
