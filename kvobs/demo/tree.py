"""Render one trace as a tree in the terminal, with start times and durations."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvobs.demo.collector import ReceivedSpan

BAR = 16
"""Characters that stand for the whole trace."""
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

    A line has the span's start in milliseconds since the first span, its duration, its position in the whole, and its
    main attributes. A span without its parent is a root.
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


def lines(rows: Sequence[Row]) -> Iterator[Table]:
    """Yield each row as a line whose columns stand below those of the row before, however deep each is."""
    if not rows:
        return
    begin, end = min(row.span.start_ns for row in rows), max(row.span.end_ns for row in rows)
    width = max(GUIDE * row.depth + cell_len(row.title) for row in rows)
    digits = len(milliseconds(end - begin))
    services = [str(row.span.resource.get("service.name", "")) for row in rows]
    for row, service in zip(rows, services, strict=True):
        span = row.span
        start, stop = span.start_ns - begin, span.end_ns - begin
        words = [service] * (len({*services}) > 1) + list(details(span, row.above))
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=width - GUIDE * row.depth, no_wrap=True)
        line.add_column(width=digits, justify="right", no_wrap=True, style="dim")
        line.add_column(width=digits + len(" ms"), justify="right", no_wrap=True)
        line.add_column(width=BAR, no_wrap=True, style="" if span.error else "cyan")
        line.add_column(overflow="fold")
        times = milliseconds(start), f"{milliseconds(stop - start)} ms", bar(start, stop, end - begin)
        said = Text(", ".join(filter(None, words)))
        line.add_row(Text(row.title), *times, said, style="red" if span.error else "")
        yield line


def milliseconds(ns: int) -> str:
    """Return a time with enough digits to distinguish short calls."""
    return f"{ns / 1e6:,.2f}"


def bar(begin: int, end: int, whole: int) -> str:
    """Return a bar from begin to end in a line that stands for the whole; never empty."""
    scale = BAR / (whole or 1)
    first = min(int(begin * scale), BAR - 1)
    last = max(first + 1, round(end * scale))
    return " " * first + "█" * (last - first)
