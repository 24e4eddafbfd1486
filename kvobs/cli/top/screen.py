"""Render rows as lines for a terminal of any width: fields without room for a column go to a line below the child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvobs.cli.top.rows import ConnectorRow, Server, ordered
from kvobs.cli.units import NONE, amount, duration, percent, whole

NAME_AT_MOST = 24
ADDRESS_AT_MOST = 40


@dataclass(frozen=True)
class View:
    """The user's choice of sorting and time."""

    by: str | None = None
    """The field that they are sorted by; None: as they are configured."""
    ascending: bool = False
    since_start: bool = False
    over: str = ""
    """The period of the numbers, as text."""


@dataclass(frozen=True)
class Column:
    """A number of each child."""

    title: str
    unit: str
    """Below the title."""
    by: str
    """The field that it is sorted by."""
    show: Callable[[ConnectorRow], str]
    width: int = 6
    words: str = ""
    """Its text in a line; "{}" is the number."""


def columns(*, since_start: bool) -> list[Column]:
    """Return all columns, in their order."""

    def stall(child: ConnectorRow) -> str:
        return duration(child.stall_s) if since_start or child.stall_s is None else amount(1e3 * child.stall_s)

    def scheduler(child: ConnectorRow) -> str:
        return duration(child.scheduler_s) if since_start else percent(child.scheduler_s)

    per_s, ms_per_s = ("", "") if since_start else ("/s", "ms/s")
    return [
        Column("hits", "", "hit_share", lambda c: percent(c.hit_share), 5),
        Column("lookups", per_s, "lookups", lambda c: amount(c.lookups), 7),
        Column("tokens", per_s, "load_tokens", lambda c: amount(c.load_tokens)),
        Column("loads", per_s, "loads", lambda c: amount(c.loads), 5),
        Column("load", "p50", "load_p50_s", lambda c: duration(c.load_p50_s)),
        Column("load", "p99", "load_p99_s", lambda c: duration(c.load_p99_s)),
        Column("sched", "" if since_start else "busy", "scheduler_s", scheduler),
        Column("stall", ms_per_s, "stall_s", stall),
        Column("loads", "open", "loads_open", lambda c: whole(c.loads_open), 5),
        Column("saves", "held", "saves_held", lambda c: whole(c.saves_held), 5, "saves held {}"),
        Column("oldest", "", "oldest_s", lambda c: duration(c.oldest_s)),
        Column("skew", "p99", "skew_p99_s", lambda c: duration(c.skew_p99_s), 6, "skew p99 {}"),
        Column("slowest", "rank", "slowest_rank_share", _slowest, 12, "slowest rank {}"),
        Column("errors", per_s, "errors", lambda c: amount(c.errors)),
    ]


LEFT_OUT = ("lookups", "loads", "slowest_rank_share", "skew_p99_s", "saves_held")
"""Columns that are omitted without room for all, in this order."""


def _slowest(child: ConnectorRow) -> str:
    return NONE if child.slowest_rank is None else f"{child.slowest_rank:.4} ({percent(child.slowest_rank_share)})"


SORTS: tuple[str | None, ...] = (None, *(column.by for column in columns(since_start=False)))
"""What they can be sorted by, in the order of the columns; None: as they are configured."""


def picture(servers: Sequence[Server], view: View, width: int, height: int | None = None) -> list[Text]:
    """Return all lines but the keys; where the height is known, as many as there is room for.

    Errors may run over the width.
    """
    title = Text.assemble(("kvobs top", "bold"), f"   {view.over}   {_order(view)}")
    above = [title, Text(), *server_lines(servers, width, None if height is None else max(2, height // 4))]
    room = None if height is None else max(1, height - len(above) - 3)
    return [*above, Text(), *children_lines(servers, view, width, room)]


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
    head, numbers = ["server", "model", "vLLM", "kvobs", "telemetry", "kvobs errors"], [8, 7, 9, 12]
    room = width - (3 if several else 0) - sum(numbers) - len(head)
    address = min(room - 5, ADDRESS_AT_MOST, max(6, *(cell_len(server.address) for server in servers)))
    model = min(room - address, max(5, *(cell_len(server.model) for server in servers)))
    widths = [address, model, *numbers]
    lines = [_line(several, "", _fields(head, widths), style="bold")]
    for i, server in numbered:
        if server.error is not None:
            lines.append(_line(several, str(i), f"{set_cell_size(server.address, address)}  {server.error}", "red"))
            continue
        spent = NONE if server.telemetry_s is None else duration(server.telemetry_s)
        spent += "" if server.telemetry_s is None or server.seconds is None else "/s"
        cells = [server.address, server.model, server.vllm_version, server.kvobs_version, spent]
        line = _line(several, str(i), _fields([*cells, str(server.internal_errors)], widths))
        if server.internal_errors:
            line.stylize("bold red", len(line) - len(str(server.internal_errors)))
        lines.append(line)
    if len(numbered) < len(servers):
        lines.append(Text(f"and {len(servers) - len(numbered)} more servers", style="dim"))
    return lines


def _line(several: bool, number: str, text: str, style: str = "") -> Text:
    return Text(f"{number:>2} {text}" if several else text, style=style)


def _fields(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Put the cells into fields of these widths: texts to the left, the last two, which are numbers, to the right."""
    texts = [set_cell_size(cell, width) for cell, width in zip(cells[:-2], widths, strict=False)]
    numbers = [f"{cell:>{width}}" for cell, width in zip(cells[-2:], widths[-2:], strict=True)]
    return f"{texts[0]}  {' '.join([*texts[1:], *numbers])}"


def children_lines(servers: Sequence[Server], view: View, width: int, at_most: int | None = None) -> list[Text]:
    """Return the children below their header of two lines; ``at_most`` is how many lines there is room for below it."""
    placed = ordered(servers, view.by, ascending=view.ascending)
    if not placed:
        return []
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
    before = f"{'':{3 if several else 0}}{'engine ' if has_engines else ''}{'connector':{names}}"
    lines = [_header(shown, "title", before, view.by), _header(shown, "unit", " " * len(before), view.by)]
    for done, (i, child) in enumerate(placed):
        where = (f"{i + 1:>2} " if several else "") + (f"{child.engine:>6.6} " if has_engines else "")
        entry = _entry(child, where, names, shown, left_out)
        last = done == len(placed) - 1
        if at_most is not None and len(lines) - 2 + len(entry) + (not last) > at_most:
            lines.append(Text(f"and {len(placed) - done} more: enlarge the window to see them", style="dim"))
            break
        lines += entry
    return lines


def _header(shown: Sequence[Column], part: str, before: str, by: str | None) -> Text:
    line = Text(before, style="bold")
    for column in shown:
        line.append(" ")
        line.append(f"{getattr(column, part):>{column.width}}", style="reverse" if column.by == by else "")
    return line


def _entry(
    child: ConnectorRow, where: str, names: int, shown: Sequence[Column], left_out: Sequence[Column]
) -> list[Text]:
    """Return a child's line, and a second one for further fields."""
    is_bad = child.quarantined or bool(child.errors)
    line = Text.assemble((where, "dim"), (set_cell_size(child.connector, names), "bold red" if is_bad else "bold"))
    for column in shown:
        cell = column.show(child)
        bad = column.by == "errors" and child.errors
        style = "bold red" if bad else "dim" if cell in (NONE, "0") else ""
        line.append(f" {cell:>{column.width}.{column.width}}", style=style)
    cells = [(column.words, column.show(child)) for column in left_out if column.words]
    said = ", ".join(words.format(cell) for words, cell in cells if cell not in (NONE, "0"))
    if not (said or child.quarantined):
        return [line]
    more = Text("     " if where else "  ")
    if child.quarantined:
        more.append("in quarantine" + (", " if said else ""), style="bold red")
    more.append(said, style="dim")
    return [line, more]
