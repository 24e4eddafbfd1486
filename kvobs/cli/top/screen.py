"""Render rows as lines for a terminal of any width: what has no room as a column goes to a line below the connector."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvobs.cli.output import NONE, amount, duration, percent, signed, whole
from kvobs.cli.top.rows import ConnectorRow, Placed, Server, ordered
from kvobs.schema.verdicts import HANGS, IDLE, WELL

NAME_AT_MOST = 24
ADDRESS_AT_MOST = 40


class Column(NamedTuple):
    """A number of each connector; connectors are sorted by the field ``by``; "{}" is the number in ``words``."""

    title: str
    unit: str
    by: str
    show: Callable[[ConnectorRow], str]
    width: int = 6
    words: str = ""


def columns(*, since_start: bool) -> list[Column]:
    def stall(row: ConnectorRow) -> str:
        return duration(row.stall_s) if since_start else amount(1e3 * row.stall_s)

    def scheduler(row: ConnectorRow) -> str:
        return duration(row.scheduler_s) if since_start else percent(row.scheduler_s)

    per_s, ms_per_s = ("", "") if since_start else ("/s", "ms/s")
    return [
        Column("hits", "", "hit_share", lambda c: percent(c.hit_share), 5),
        Column("lookups", per_s, "lookups", lambda c: amount(c.lookups), 7),
        Column("tokens", per_s, "load_tokens", lambda c: amount(c.load_tokens)),
        Column("bytes", per_s, "load_bytes", lambda c: amount(c.load_bytes), 6, f"{{}} bytes{per_s}"),
        Column("unused", per_s, "unused_tokens", lambda c: amount(c.unused_tokens), 6, f"{{}} tokens{per_s} unused"),
        Column("loads", per_s, "loads", lambda c: amount(c.loads), 5),
        Column("load", "p50", "load_p50_s", lambda c: duration(c.load_p50_s)),
        Column("load", "p99", "load_p99_s", lambda c: duration(c.load_p99_s)),
        Column("sched", "" if since_start else "busy", "scheduler_s", scheduler),
        Column("stall", ms_per_s, "stall_s", stall),
        Column("gain", "s" if since_start else "s/s", "gain_s", lambda c: signed(c.gain_s), 7, "gain {}"),
        Column("loads", "open", "loads_open", lambda c: whole(c.loads_open), 5),
        Column("saves", "held", "saves_held", lambda c: whole(c.saves_held), 5, "saves held {}"),
        Column("oldest", "", "oldest_s", lambda c: duration(c.oldest_s)),
        Column("skew", "p99", "skew_p99_s", lambda c: duration(c.skew_p99_s), 6, "skew p99 {}"),
        Column("slowest", "rank", "slowest_rank_share", _slowest, 12, "slowest rank {}"),
        Column("errors", per_s, "errors", lambda c: amount(c.errors)),
    ]


# fmt: off
LEFT_OUT = ("gain_s", "lookups", "loads", "slowest_rank_share", "skew_p99_s", "unused_tokens", "saves_held",
            "load_bytes")
# fmt: on
"""Columns that are omitted without room, in this order; those with words are then in a line below the connector."""


def _slowest(row: ConnectorRow) -> str:
    return NONE if row.slowest_rank is None else f"{row.slowest_rank:.4} ({percent(row.slowest_rank_share)})"


SORTS: tuple[str | None, ...] = (None, *(column.by for column in columns(since_start=False)))
"""What they can be sorted by, in the order of the columns; None: as they are configured."""


class ServerColumn(NamedTuple):
    title: str
    width: int
    show: Callable[[Server], str]


VERSIONS = (
    ServerColumn("vLLM", 8, lambda server: server.vllm_version),
    ServerColumn("kvobs", 7, lambda server: server.kvobs_version),
)
"""Where there is room for both."""
OF_SERVERS = (
    ServerColumn("run", 5, lambda server: whole(server.running)),
    ServerColumn("wait", 5, lambda server: whole(server.waiting)),
    ServerColumn("TTFT p50", 8, lambda server: duration(server.ttft_p50_s)),
    ServerColumn("p99", 6, lambda server: duration(server.ttft_p99_s)),
    ServerColumn("telemetry", 9, lambda server: duration(server.telemetry_s) + ("/s" if server.seconds else "")),
    ServerColumn("errors in it", 12, lambda server: str(server.internal_errors)),
)


def fit(text: str, width: int) -> str:
    """Return text of this width; what is cut ends with a mark."""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def picture(
    servers: Sequence[Server], interval_s: float, width: int, height: int | None = None, by: str | None = None
) -> list[Text]:
    """Return all lines but the keys, sorted by a field; where the height is known, as many as there is room for.

    Errors may run over the width.
    """
    since_start = any(server.error is None and server.seconds is None for server in servers)
    period = "since the servers' start" if since_start else f"the last {interval_s:g} s"
    title = Text.assemble(("kvobs top", "bold"), f"   {period}   {_order(by)}")
    above = [title, Text(), *_server_lines(servers, width, None if height is None else max(2, height // 4)), Text()]
    placed = ordered(servers, by)
    if not placed:
        return above
    table = _Table(columns(since_start=since_start), len(servers) > 1, placed, by, width)
    entries = [table.entry(i, row) for i, row in placed]
    room = None if height is None else max(1, height - len(above) - 2)
    return [*above, table.header("title"), table.header("unit"), *_fitting(entries, room)]


def _order(by: str | None) -> str:
    column = next((column for column in columns(since_start=True) if column.by == by), None)
    return "as configured" if column is None else f"by {f'{column.title} {column.unit}'.rstrip()}, largest first"


def _server_lines(servers: Sequence[Server], width: int, at_most: int | None) -> list[Text]:
    """Return a line for each server, below their header; those that are not read come first where not all fit."""
    numbered = list(enumerate(servers, 1))
    if at_most is not None and len(servers) > at_most:
        numbered = sorted(sorted(numbered, key=lambda entry: entry[1].error is None)[: at_most - 1])
    several = "   " if len(servers) > 1 else ""
    address = min(ADDRESS_AT_MOST, max(6, *(cell_len(server.address) for server in servers)))
    model = max(5, *(cell_len(server.model) for server in servers))
    shown = list(OF_SERVERS)
    room = width - len(several) - sum(column.width + 1 for column in shown) - 3
    while room < len("server") + len("model") and len(shown) > 1:
        room += shown.pop(-2).width + 1
    versions = VERSIONS if address + model + sum(column.width + 1 for column in VERSIONS) <= room else ()
    room -= sum(column.width + 1 for column in versions)
    address = max(len("server"), min(address, room - 5))
    model = max(len("model"), min(model, room - address))
    titles = [f"{column.title:{column.width}}" for column in versions]
    titles += [f"{column.title:>{column.width}}" for column in shown]
    lines = [Text(f"{several}{'server':{address}}  {' '.join(['model'.ljust(model), *titles])}", style="bold")]
    for i, server in numbered:
        start = (f"{i:>2} " if several else "") + fit(server.address, address)
        if server.error is not None:
            lines.append(Text(f"{start}  {server.error}", style="red"))
            continue
        cells = [fit(server.model, model), *(fit(column.show(server), column.width) for column in versions)]
        cells += [f"{column.show(server):>{column.width}}" for column in shown]
        line = Text(f"{start}  {' '.join(cells)}")
        if server.internal_errors:
            line.stylize("bold red", len(line) - len(str(server.internal_errors)))
        lines.append(line)
        if not several and server.seen_share is not None:
            lines.append(Text(fit(_reuse(server), width), style="dim"))
    if len(numbered) < len(servers):
        lines.append(Text(f"and {len(servers) - len(numbered)} more servers", style="dim"))
    return lines


def _reuse(server: Server) -> str:
    half, cache = server.half_within_tokens, server.local_cache_tokens
    within = f", half of them within {amount(half)} tokens" if half is not None else ""
    own = f"; vLLM's own cache has {amount(cache)}" if cache else ""
    return f"{percent(server.seen_share)} of the prompts' tokens were used before{within}{own}"


class _Table:
    """The connectors' lines in a width: the columns that have room, and what becomes of the others."""

    def __init__(
        self, shown: list[Column], several: bool, placed: Sequence[Placed], by: str | None, width: int
    ) -> None:
        self._several, self._by, self._width = several, by, width
        self._has_engines = len({(i, row.engine) for i, row in placed}) > len({i for i, _ in placed})
        names = min(NAME_AT_MOST, max(len("connector"), *(cell_len(row.connector) for _, row in placed)))
        fixed = (3 if self._several else 0) + (7 if self._has_engines else 0)
        self._left_out: list[Column] = []
        for field in LEFT_OUT:
            if fixed + names + sum(column.width + 1 for column in shown) <= width:
                break
            self._left_out += [column for column in shown if column.by == field]
            shown = [column for column in shown if column.by != field]
        room = width - fixed - sum(column.width + 1 for column in shown)
        self._names = max(len("connector"), min(names, room))
        self._shown = shown

    def header(self, part: str) -> Text:
        """Return the line of the titles, or of the units."""
        before = f"{'   ' if self._several else ''}{'engine ' if self._has_engines else ''}{'connector':{self._names}}"
        line = Text(before if part == "title" else " " * len(before), style="bold")
        for column in self._shown:
            style = "reverse" if column.by == self._by else ""
            line.append(" ").append(f"{getattr(column, part):>{column.width}}", style=style)
        return line

    def entry(self, i: int, row: ConnectorRow) -> list[Text]:
        """Return a connector's line, and further ones for what has no column."""
        where = (f"{i + 1:>2} " if self._several else "") + (f"{row.engine:>6.6} " if self._has_engines else "")
        age = f": {row.state_by} for {duration(row.state_value)}" if row.state == HANGS.name else ""
        state = [f"{row.state}{age}"] * (row.state not in {WELL.name, IDLE.name})
        state += [f"in {row.call}" + f" for {duration(row.call_s)}" * (not age)] * bool(row.call)
        is_bad = bool(state or row.errors)
        line = Text.assemble((where, "dim"), (fit(row.connector, self._names), "bold red" if is_bad else "bold"))
        for column in self._shown:
            cell = column.show(row)
            style = "bold red" if column.by == "errors" and row.errors else "dim" if cell in (NONE, "0") else ""
            line.append(f" {cell:>{column.width}.{column.width}}", style=style)
        cells = [(column.words, column.show(row)) for column in self._left_out if column.words]
        parts = [(words.format(cell), "dim") for words, cell in cells if cell not in (NONE, "0")]
        lines = [line]
        room = self._width - 5
        said = [(words if cell_len(words) <= room else fit(words, room), "bold red") for words in state]
        for text, style in [*said, *parts]:
            if len(lines) == 1 or lines[-1].cell_len + cell_len(text) + 2 > self._width:
                lines.append(Text("     " if where else "  "))
            else:
                lines[-1].append(", ", style="dim")
            lines[-1].append(text, style=style)
        return lines


def _fitting(entries: Sequence[Sequence[Text]], at_most: int | None) -> list[Text]:
    """Return the lines of the entries that fit; where not all do, the last line says how many are left out."""
    lines = [line for entry in entries for line in entry]
    if at_most is None or len(lines) <= at_most:
        return lines
    shown = 0
    while sum(map(len, entries[: shown + 1])) < at_most:
        shown += 1
    more = Text(f"and {len(entries) - shown} more connectors", style="dim")
    return [*(line for entry in entries[:shown] for line in entry), more]
