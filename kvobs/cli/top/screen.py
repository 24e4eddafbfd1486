"""Render rows as lines for a terminal of any width: fields without room for a column go to a line below the child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text

from kvobs.cli.top.columns import LEFT_OUT, OF_SERVERS, VERSIONS, Column, ServerColumn, columns, fit
from kvobs.cli.top.rows import ConnectorRow, Placed, Server, ordered
from kvobs.cli.units import NONE

NAME_AT_MOST = 24
ADDRESS_AT_MOST = 40


@dataclass(frozen=True)
class View:
    """The user's choice of sorting, rows and time."""

    by: str | None = None
    """The field that they are sorted by; None: as they are configured."""
    ascending: bool = False
    since_start: bool = False
    over: str = ""
    """The period of the numbers, as text."""
    only: str = ""
    """Part of the connector, its class, the server's address or model, of the children to show."""
    first: int = 0
    """The first child to show, where there is no room for all."""


def picture(servers: Sequence[Server], view: View, width: int, height: int | None = None) -> list[Text]:
    """Return all lines but the keys; where the height is known, as many as there is room for.

    Errors may run over the width.
    """
    only = f"   only {view.only}" if view.only else ""
    title = Text.assemble(("kvobs top", "bold"), f"   {view.over}   {_order(view)}{only}")
    above = [title, Text(), *server_lines(servers, width, None if height is None else max(2, height // 4)), Text()]
    room = None if height is None else max(1, height - len(above) - 2)
    return [*above, *children_lines(servers, view, width, room)]


def _order(view: View) -> str:
    if view.by is None:
        return "as configured" + (", last first" if view.ascending else "")
    column = next(column for column in columns(since_start=True) if column.by == view.by)
    return f"by {column.title} {column.unit}".rstrip() + (", smallest first" if view.ascending else ", largest first")


def server_lines(servers: Sequence[Server], width: int, at_most: int | None = None) -> list[Text]:
    """Return a line for each server, below their header; those that are not read come first where not all fit."""
    several = len(servers) > 1
    numbered = list(enumerate(servers, 1))
    if at_most is not None and len(servers) > at_most:
        numbered = sorted(sorted(numbered, key=lambda entry: entry[1].error is None)[: at_most - 1])
    address = min(ADDRESS_AT_MOST, max(6, *(cell_len(server.address) for server in servers)))
    model = max(5, *(cell_len(server.model) for server in servers))
    room = width - (3 if several else 0) - sum(column.width + 1 for column in OF_SERVERS) - 3
    versions: list[ServerColumn] = []
    for column in VERSIONS:
        if address + model + sum(one.width + 1 for one in (*versions, column)) > room:
            break
        versions.append(column)
    room -= sum(column.width + 1 for column in versions)
    address = min(address, room - 5)
    model = min(model, room - address)
    heads = [f"{column.title:{column.width}}" for column in versions] + [
        f"{column.title:>{column.width}}" for column in OF_SERVERS
    ]
    head = f"{'server':{address}}  {' '.join(['model'.ljust(model), *heads])}"
    lines = [_line(several, "", head, style="bold")]
    for i, server in numbered:
        if server.error is not None:
            lines.append(_line(several, str(i), f"{fit(server.address, address)}  {server.error}", "red"))
            continue
        named = [fit(server.model, model), *(fit(column.show(server), column.width) for column in versions)]
        numbers = [f"{column.show(server):>{column.width}}" for column in OF_SERVERS]
        line = _line(several, str(i), f"{fit(server.address, address)}  {' '.join([*named, *numbers])}")
        if server.internal_errors:
            line.stylize("bold red", len(line) - len(str(server.internal_errors)))
        lines.append(line)
    if len(numbered) < len(servers):
        lines.append(Text(f"and {len(servers) - len(numbered)} more servers", style="dim"))
    return lines


def _line(several: bool, number: str, text: str, style: str = "") -> Text:
    return Text(f"{number:>2} {text}" if several else text, style=style)


@dataclass(frozen=True)
class Layout:
    """How children are laid out in a width."""

    several: bool
    """Whether there are several servers."""
    has_engines: bool
    names: int
    """Width of the names."""
    shown: Sequence[Column]
    left_out: Sequence[Column]
    width: int

    @property
    def before(self) -> str:
        return f"{'':{3 if self.several else 0}}{'engine ' if self.has_engines else ''}{'connector':{self.names}}"


def _lay_out(servers: Sequence[Server], placed: Sequence[Placed], view: View, width: int) -> Layout:
    several = len(servers) > 1
    has_engines = len({(i, child.engine) for i, child in placed}) > len({i for i, _ in placed})
    names = min(NAME_AT_MOST, max(len("connector"), *(cell_len(child.connector) for _, child in placed)))
    fixed = (3 if several else 0) + (7 if has_engines else 0)
    shown, left_out = columns(since_start=view.since_start), []
    for by in LEFT_OUT:
        if fixed + names + sum(column.width + 1 for column in shown) <= width:
            break
        left_out += [column for column in shown if column.by == by]
        shown = [column for column in shown if column.by != by]
    room = width - fixed - sum(column.width + 1 for column in shown)
    names = max(len("connector"), min(names, room))
    if room >= names + len(shown):
        shown = [replace(column, width=column.width + 1) for column in shown]
    return Layout(several, has_engines, names, shown, left_out, width)


def chosen(servers: Sequence[Server], view: View) -> list[Placed]:
    """Return the children to show, in their order."""
    only = view.only.casefold()
    return [
        (i, child)
        for i, child in ordered(servers, view.by, ascending=view.ascending)
        if not only
        or any(
            only in text.casefold()
            for text in (child.connector, child.connector_class, servers[i].address, servers[i].model)
        )
    ]


def children_lines(servers: Sequence[Server], view: View, width: int, at_most: int | None = None) -> list[Text]:
    """Return the children below their header of two lines; ``at_most`` is how many lines there is room for below it."""
    placed = chosen(servers, view)
    if not placed:
        return [Text(f"no connector matches {view.only}", style="dim")] if view.only else []
    layout = _lay_out(servers, placed, view, width)
    entries = [_entry(i, child, layout) for i, child in placed]
    lines = [
        _header(layout, "title", layout.before, view.by),
        _header(layout, "unit", " " * len(layout.before), view.by),
    ]
    shown = _window([len(entry) for entry in entries], view.first, at_most)
    for at in shown:
        lines += entries[at]
    if len(shown) < len(entries):
        where = f"{shown.start + 1} to {shown.stop}" if len(shown) > 1 else f"{shown.start + 1}"
        lines.append(Text(f"{where} of {len(entries)}: arrows scroll, / filters", style="dim"))
    return lines


def visible(servers: Sequence[Server], view: View, width: int, height: int) -> tuple[range, int]:
    """Return which children ``picture`` shows in a window, and how many there are."""
    placed = chosen(servers, view)
    if not placed:
        return range(0), 0
    layout = _lay_out(servers, placed, view, width)
    above = 3 + len(server_lines(servers, width, max(2, height // 4)))
    sizes = [len(_entry(i, child, layout)) for i, child in placed]
    return _window(sizes, view.first, max(1, height - above - 2)), len(placed)


def _window(sizes: Sequence[int], first: int, at_most: int | None) -> range:
    """Return which entries of these heights fit, from ``first`` on; the last line says which, unless all do.

    The end of the list stays at the end of the window.
    """
    if at_most is None or sum(sizes) <= at_most:
        return range(len(sizes))
    room = at_most - 1
    last_first = len(sizes)
    while last_first > 0 and sum(sizes[last_first - 1 :]) <= room:
        last_first -= 1
    start = max(0, min(first, last_first, len(sizes) - 1))
    stop = start
    while stop < len(sizes) and sum(sizes[start : stop + 1]) <= room:
        stop += 1
    return range(start, stop)


def _header(layout: Layout, part: str, before: str, by: str | None) -> Text:
    line = Text(before, style="bold")
    for column in layout.shown:
        line.append(" ")
        line.append(f"{getattr(column, part):>{column.width}}", style="reverse" if column.by == by else "")
    return line


def _entry(i: int, child: ConnectorRow, layout: Layout) -> list[Text]:
    """Return a child's line, and further ones for what has no column."""
    where = (f"{i + 1:>2} " if layout.several else "") + (f"{child.engine:>6.6} " if layout.has_engines else "")
    is_bad = child.quarantined or bool(child.errors)
    line = Text.assemble((where, "dim"), (fit(child.connector, layout.names), "bold red" if is_bad else "bold"))
    for column in layout.shown:
        cell = column.show(child)
        bad = column.by == "errors" and child.errors
        style = "bold red" if bad else "dim" if cell in (NONE, "0") else ""
        line.append(f" {cell:>{column.width}.{column.width}}", style=style)
    cells = [(column.words, column.show(child)) for column in layout.left_out if column.words]
    said = [(words.format(cell), "dim") for words, cell in cells if cell not in (NONE, "0")]
    return [
        line,
        *_packed([("in quarantine", "bold red")] * child.quarantined + said, "     " if where else "  ", layout),
    ]


def _packed(parts: Sequence[tuple[str, str]], indent: str, layout: Layout) -> list[Text]:
    """Put the parts into lines of the width."""
    lines: list[Text] = []
    for text, style in parts:
        if not lines or len(lines[-1]) + len(text) + 2 > layout.width:
            lines.append(Text(indent))
        else:
            lines[-1].append(", ", style="dim")
        lines[-1].append(text, style=style)
    return lines
