"""Show servers and connectors as rich's tables, with states and further numbers below each connector's row."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kvobs.export.connector_columns import MEANINGS, Column, columns, problems_of
from kvobs.export.connector_rows import ConnectorRow, Server
from kvobs.export.texts import NONE, amount, duration, integer, percent

WIDTH_NARROW, WIDTH, WIDTH_AT_MOST = 68, 80, 90
"""Of a window that has room for all columns, of one with room for the longest form of each number, and of tables: names
share what numbers leave."""
CELL = 6
"""The width of a number's longest form: columns stay where they are."""
FAILED = "bold red"


def legend() -> Table:
    """Return a table of the meanings."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title, meaning in MEANINGS.items():
        table.add_row(Text(title, "bold"), meaning)
    return table


SORTS: tuple[str | None, ...] = (None, *(column.by for column in columns(since_start=False)))
"""Fields to sort by; None: as connectors are configured."""


@dataclass(frozen=True)
class Picture:
    """Servers and their connectors, sorted by a field; rich gives the width, and in a terminal the height."""

    servers: Sequence[Server]
    interval_s: float
    by: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        since_start = any(server.error is None and server.seconds is None for server in self.servers)
        narrow = options.max_width < WIDTH_NARROW
        shown, rows = columns(since_start=since_start, narrow=narrow), sort_rows(self.servers, self.by)
        period = "since the servers' start" if since_start else f"the last {self.interval_s:g} s"
        titles = {column.by: column.title.replace("\n", " ").strip() for column in shown}
        order = f"by {titles[self.by]}, largest first" if self.by else "as configured"
        yield Text.assemble(("kvobs top", "bold"), f"   {period}   {order}\n", no_wrap=True, overflow="ellipsis")
        height, options = options.height or 10**6, options.reset_height()
        upper = _lay_out_servers(self.servers, narrow=narrow).lines(console, options, max(2, height // 4))
        room = max(1, height - len(upper) - 5)  # title, empty lines and header
        lower = _lay_out_connectors(rows, shown, self.by, several=len(self.servers) > 1).lines(console, options, room)
        for line in [*upper, [], *(lower if rows else ())]:
            yield from line
            yield Segment.line()


def sort_rows(servers: Sequence[Server], by: str | None) -> list[tuple[int, ConnectorRow]]:
    """Return all connectors with their server's number, the largest value of a field first, missing ones last."""

    def value(entry: tuple[int, ConnectorRow]) -> float:
        found = getattr(entry[1], by or "")
        return -math.inf if found is None else found

    rows = [(number, row) for number, server in enumerate(servers, 1) for row in server.connectors]
    return sorted(rows, key=value, reverse=True) if by else rows


class _Rows:
    """A table with a text below each row, of the rows that have room."""

    def __init__(self, things: str, names: Sequence[str], numbers: Iterable[str], sorted_by: str = "") -> None:
        self._things, self._below = things, list[Text]()
        self._table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True)
        for name in names:
            self._table.add_column(name, ratio=1, no_wrap=True)
        for title in numbers:
            style = "bold reverse" if title == sorted_by else "bold"
            self._table.add_column(title, header_style=style, justify="right", no_wrap=True, min_width=CELL)

    def add(self, cells: Iterable[Text], below: Text) -> None:
        self._table.add_row(*cells)
        self._below.append(below)

    def lines(self, console: Console, options: ConsoleOptions, at_most: int) -> list[list[Segment]]:
        """Return the header and as many rows as have room; if some are left out, their number is the last line."""

        def render(part: RenderableType) -> list[list[Segment]]:
            return console.render_lines(part, options, pad=False)

        self._table.width = min(WIDTH_AT_MOST, options.max_width)
        if options.max_width < WIDTH:
            for column in self._table.columns:
                column.min_width = None
        table, n = render(self._table), len(self._below)
        texts = [render(Padding(text, (0, 0, 0, 2))) if text else [] for text in self._below]
        entries = [[row, *text] for row, text in zip(table[len(table) - n :], texts, strict=True)]
        while entries and sum(map(len, entries)) + (len(entries) < n) > at_most:
            entries.pop()
        if len(entries) < n:
            entries.append(render(Text(f"and {n - len(entries)} more {self._things}", "dim")))
        return [line for entry in [table[: len(table) - n], *entries] for line in entry]


def _lay_out_servers(servers: Sequence[Server], *, narrow: bool) -> _Rows:
    """Return a row for each server, those first that can't be read; a narrow window has models below."""
    several = len(servers) > 1
    titles = ("run", "wait", "TTFT\np50", "TTFT\np99", "telemetry", "errors\nin it")
    rows = _Rows("servers", ["   server" if several else "server", *([] if narrow else ["model"])], titles)
    for number, server in sorted(enumerate(servers, 1), key=lambda entry: entry[1].error is None):
        name = server.address.removeprefix(f"{server.model} at ")  # a cut name keeps its port: the model is next to it
        address = Text(f"{number:>2} {name}" if several else name)
        if server.error is not None:
            rows.add([address], Text(server.error, "red"))
            continue
        numbers = [integer(server.running), integer(server.waiting)]
        numbers += [duration(server.ttft_p50_s), duration(server.ttft_p99_s)]
        numbers.append(duration(server.telemetry_s_per_s) + ("/s" if server.seconds else ""))
        errors = Text(str(server.internal_errors), FAILED if server.internal_errors else "")
        further = [server.model] * narrow + [_describe(server)] * (not several)
        names = [address] if narrow else [address, Text(server.model)]
        rows.add([*names, *map(Text, numbers), errors], Text("; ".join(further), "dim"))
    return rows


def _describe(server: Server) -> str:
    """Return a server's versions, and how much of its prompts a cache could serve."""
    text = f"vLLM {server.vllm_version}, kvobs {server.kvobs_version}"
    if server.seen_share is not None:
        text += f"; {percent(server.seen_share)} of the prompts' tokens were used before"
        if server.half_within_tokens is not None:
            text += f", half of them within {amount(server.half_within_tokens)} tokens"
        if server.local_cache_tokens:
            text += f"; vLLM's own cache has {amount(server.local_cache_tokens)}"
    return text


def _lay_out_connectors(
    connectors: Sequence[tuple[int, ConnectorRow]], shown: Sequence[Column], by: str | None, *, several: bool
) -> _Rows:
    has_engines = len({(number, row.engine) for number, row in connectors}) > len({number for number, _ in connectors})
    head = ("   " if several else "") + ("engine " if has_engines else "") + "connector"
    sorted_by = next((column.title for column in shown if column.by == by), "")
    rows = _Rows("connectors", [head], [column.title for column in shown if not column.words], sorted_by)
    for number, row in connectors:
        where = (f"{number:>2} " if several else "") + (f"{row.engine:>6.6} " if has_engines else "")
        below = [Text(problem, FAILED) for problem in problems_of(row)]
        cells = [Text.assemble((where, "dim"), (row.connector, FAILED if below or row.errors_per_s else "bold"))]
        for column in shown:
            text = column.show(row)
            is_empty = text in (NONE, "0")
            if not column.words:
                is_bad = column.by == "errors_per_s" and row.errors_per_s
                cells.append(Text(text, FAILED if is_bad else "dim" if is_empty else ""))
            elif not is_empty:
                below.append(Text(column.words.format(text), "dim"))
        rows.add(cells, Text(", ").join(below))
    return rows
