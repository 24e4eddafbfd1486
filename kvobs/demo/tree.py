"""Render one trace as a tree in the terminal, with start times and durations."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.filesize import decimal
from rich.text import Text
from rich.tree import Tree

from kvobs.cli import waterfall
from kvobs.export.load_traces import Part
from kvobs.testing.collector import ReceivedSpan

CONNECTOR, RANK, OFFERED = "kv_transfer.connector", "kv_transfer.rank", "kv_transfer.offered_tokens."


class Placed(NamedTuple):
    """A span at its place in the tree, with its parent's attributes."""

    span: ReceivedSpan
    depth: int
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
    placed = list(under(None, by_parent))
    services = [str(each.span.resource.get("service.name", "")) for each in placed]
    rows = []
    for (span, depth, above), service in zip(placed, services, strict=True):
        words = ", ".join(filter(None, [service] * (len({*services}) > 1) + list(details(span, above))))
        rows.append(Part(title(span, above), depth, span.start_ns, span.end_ns, words, span.error))
    return waterfall.tree(heading(known.values()), rows)


def under(
    parent: ReceivedSpan | None, by_parent: Mapping[str, Sequence[ReceivedSpan]], depth: int = 0
) -> Iterator[Placed]:
    """Yield the spans under one, each followed by those under it."""
    for span in by_parent.get(parent.span_id if parent else "", ()):
        above = parent.attributes if parent else {}
        yield Placed(span, depth, above)
        yield from under(span, by_parent, depth + 1)


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
