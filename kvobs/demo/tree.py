"""Render one trace as a tree in the terminal, with start times and durations."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvobs.demo.collector import ReceivedSpan

BAR = 16
"""Characters that stand for the whole trace, where a window has room for them."""
BAR_AT_LEAST = 4
WORDS = 20
"""Characters that a line's words need next to the times."""
LONG_NS = 10 * 10**9
GUIDE = 4
"""Characters by which rich indents each level of a tree."""
CONNECTOR, RANK, OFFERED = "kv_transfer.connector", "kv_transfer.rank", "kv_transfer.offered_tokens."


class Row(NamedTuple):
    """A span at its place in the tree, with its parent's attributes."""

    span: ReceivedSpan
    depth: int
    title: str
    above: Mapping[str, Any]


def tree(spans: Sequence[ReceivedSpan]) -> Tree:
    """Return the tree of the spans of one trace, siblings in order of start; errors are red.

    A line has the span's start in milliseconds since the first span (in seconds from 10 s on), its duration, its
    position in the whole, and its main attributes. A span without its parent is a root.
    """
    known = {span.span_id: span for span in spans}  # once each: a sender without an answer sends again
    by_parent = defaultdict(list)
    for span in sorted(known.values(), key=lambda span: span.start_ns):
        by_parent[span.parent_id if span.parent_id in known else ""].append(span)
    rows = list(rows_under(None, by_parent))
    out = Tree(heading(known.values()), guide_style="dim")
    branches = [out]
    for row, line in zip(rows, lines(rows), strict=True):
        del branches[row.depth :]
        branches.append(branches[-1].add(line))
    return out


def rows_under(
    parent: ReceivedSpan | None, by_parent: Mapping[str, Sequence[ReceivedSpan]], depth: int = 1
) -> Iterator[Row]:
    """Yield the spans under one, each followed by those under it."""
    for span in by_parent.get(parent.span_id if parent else "", ()):
        above = parent.attributes if parent else {}
        yield Row(span, depth, title(span, above), above)
        yield from rows_under(span, by_parent, depth + 1)


def heading(spans: Iterable[ReceivedSpan]) -> Text:
    traces = dict.fromkeys(span.trace_id for span in spans)
    requests = dict.fromkeys(str(span.attributes.get("gen_ai.request.id", "")) for span in spans)
    return Text.assemble(("trace ", "dim"), ", ".join(traces), "  ", (", ".join(filter(None, requests)), "bold"))


def title(span: ReceivedSpan, above: Mapping[str, Any]) -> str:
    """Return a span's name, with its connector and rank unless they are in the name or its parent."""
    words = span.name
    connector, rank = (span.attributes.get(key, "") for key in (CONNECTOR, RANK))
    if words.endswith(".rank"):
        words, rank = f"{words} {rank}", ""
    if connector not in (*words.split(), "", above.get(CONNECTOR)):
        words += f" {connector}"
    return words if rank in ("", above.get(RANK)) else f"{words} rank {rank}"


def details(span: ReceivedSpan, above: Mapping[str, Any]) -> Iterator[str]:
    """Yield a span's main attributes that are neither in its title nor on its parent."""
    has = {key.removeprefix("kv_transfer."): n for key, n in span.attributes.items() if above.get(key) != n}
    if offers := {key.removeprefix(OFFERED): n for key, n in span.attributes.items() if key.startswith(OFFERED)}:
        yield "offered: " + " ".join(f"{name} {tokens:,}" for name, tokens in offers.items())
    if "tokens" in has:
        yield f"{has['tokens']:,} tokens"
    if "bytes" in has:
        yield decimal(has["bytes"])
    for key in ("mode", "outcome", "error.type"):
        if key in has:
            yield str(has[key])
    if "slowest_rank" in has:
        behind = f" by {1e3 * has['rank_skew']:,.1f} ms" if "rank_skew" in has else ""
        yield f"rank {has['slowest_rank']} last{behind}"
    if has.get("sampling.reason", "parent") != "parent":  # a client's wish needs no reason
        yield f"sampled: {has['sampling.reason']}"
    for trace_id, _span_id in span.links:
        if trace_id != span.trace_id:
            yield f"linked to trace {trace_id[:8]}"


def lines(rows: Sequence[Row]) -> Iterator["Line"]:
    """Yield each row as a line whose columns are aligned with the row before, however deep each is."""
    if not rows:
        return
    begin, end = min(row.span.start_ns for row in rows), max(row.span.end_ns for row in rows)
    width = max(GUIDE * row.depth + cell_len(row.title) for row in rows)
    services = [str(row.span.resource.get("service.name", "")) for row in rows]
    times = [(time_of(row.span.start_ns - begin), took(row.span.end_ns - row.span.start_ns)) for row in rows]
    widths = max(len(start) for start, _ in times), max(len(whole) for _, whole in times)
    for row, service, both in zip(rows, services, times, strict=True):
        words = [service] * (len({*services}) > 1) + list(details(row.span, row.above))
        ends = row.span.start_ns - begin, row.span.end_ns - begin, end - begin
        yield Line(row, width - GUIDE * row.depth, both, widths, ends, ", ".join(filter(None, words)))


@dataclass(frozen=True)
class Line:
    """A line of the tree. Its times are never cut: in a narrow window the bar goes first, then its words go below."""

    row: Row
    title_width: int
    times: tuple[str, str]
    widths: tuple[int, int]
    ends: tuple[int, int, int]
    """Start and end of the span, and of the whole trace, in ns."""
    words: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fixed = sum(self.widths) + 2 * len(self.widths)
        title_width = max(1, min(self.title_width, options.max_width - fixed))
        room = options.max_width - fixed - title_width - 2
        bar_width = min(BAR, room - 2 - WORDS)
        if bar_width < BAR_AT_LEAST:
            bar_width = 0
        style = "red" if self.row.span.error else ""
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=title_width, no_wrap=True)
        line.add_column(width=self.widths[0], justify="right", no_wrap=True, style="dim")
        line.add_column(width=self.widths[1], justify="right", no_wrap=True)
        cells: list[RenderableType] = [Text(self.row.title), *self.times]
        if bar_width:
            line.add_column(width=bar_width, no_wrap=True, style="" if style else "cyan")
            cells.append(bar(*self.ends, bar_width))
        if room >= WORDS:
            line.add_column(overflow="fold")
            cells.append(Text(self.words))
        line.add_row(*cells, style=style)
        yield line
        if self.words and room < WORDS:
            yield Padding(Text(self.words, style), (0, 0, 0, 2))


def time_of(ns: int) -> str:
    """Return a time in milliseconds, with enough digits to distinguish short calls; from 10 s on in seconds."""
    return f"{ns / 1e9:,.2f} s" if ns >= LONG_NS else f"{ns / 1e6:,.2f}"


def took(ns: int) -> str:
    """Return the same with its unit."""
    return time_of(ns) if ns >= LONG_NS else f"{time_of(ns)} ms"


def bar(begin: int, end: int, whole: int, width: int = BAR) -> str:
    """Return a bar from begin to end in a line that stands for the whole; never empty."""
    scale = width / (whole or 1)
    first = min(int(begin * scale), width - 1)
    last = max(first + 1, round(end * scale))
    return " " * first + "█" * (last - first)
