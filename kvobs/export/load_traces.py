"""Find the slow and failed loads among spans, and what belongs to each: its request, lookups, ranks and calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.filesize import decimal

from kvobs.export.texts import printable, took
from kvobs.schema import spans
from kvobs.schema.spans import CALL, LOAD, LOAD_RANK, LOAD_WRONG, LOOKUP, Record

LOADING = frozenset({"start_load_kv", "wait_for_layer_load", "get_finished", "update_state_after_alloc"})
"""Hooks whose slow or failed calls explain a load of the same connector that they were made in."""


class Found(NamedTuple):
    """A span of an engine, and the rank of the process that wrote it; None: the scheduler's."""

    engine: str
    rank: int | None
    record: Record


class Part(NamedTuple):
    """A part of a trace, by its depth below the first part. ``rank``: on which process, None for the scheduler's."""

    title: str
    depth: int
    start_ns: int
    end_ns: int
    words: str = ""
    is_bad: bool = False
    rank: int | None = None


@dataclass(frozen=True)
class LoadTrace:
    """A slow or failed load with its parts, in order; the first one is the request. Times are ns since the epoch."""

    engine: str
    connector: str
    request: str
    trace_id: str
    outcome: str
    mode: str
    start_ns: int
    end_ns: int
    parts: tuple[Part, ...]
    attributes: Mapping[str, Any]

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "connector": self.connector,
            "request": self.request,
            "trace_id": self.trace_id,
            "outcome": self.outcome,
            "mode": self.mode,
            "start": self.start_ns / 1e9,
            "seconds": self.duration_ns / 1e9,
            "attributes": dict(self.attributes),
            "parts": [
                {"part": part.title, "depth": part.depth, "rank": part.rank, "start": part.start_ns / 1e9,
                 "seconds": (part.end_ns - part.start_ns) / 1e9, "words": part.words, "failed": part.is_bad}
                for part in self.parts
            ],
        }  # fmt: skip


def load_traces(found: Iterable[Found]) -> list[LoadTrace]:
    """Return the slow and failed loads, in the order in which they began."""
    by_engine: defaultdict[str, dict[str, Found]] = defaultdict(dict)
    for each in found:
        by_engine[each.engine][each.record.span_id] = each
    traces = [trace for engine, known in by_engine.items() for trace in _of_engine(engine, list(known.values()))]
    return sorted(traces, key=lambda trace: trace.start_ns)


def _of_engine(engine: str, found: Sequence[Found]) -> Iterator[LoadTrace]:
    by_kind: defaultdict[str, list[Found]] = defaultdict(list)
    for each in found:
        if each.record.name != CALL.name or each.record.is_urgent:  # with level calls all calls are there
            by_kind[each.record.name].append(each)
    of_load: defaultdict[str, list[Found]] = defaultdict(list)
    for each in by_kind[LOAD_RANK.name]:
        of_load[each.record.parent_id].append(each)
    of_request: defaultdict[object, list[Found]] = defaultdict(list)
    for name in (LOOKUP.name, LOAD_WRONG.name, CALL.name):
        for each in by_kind[name]:
            of_request[each.record.attributes.get(spans.REQUEST)].append(each)
    for each in by_kind[LOAD.name]:
        if each.record.is_urgent:
            near = of_request[each.record.attributes.get(spans.REQUEST)]
            calls = [call for call in by_kind[CALL.name] if _is_within(call.record, each.record)]
            yield _trace(engine, each.record, of_load[each.record.span_id], [*near, *calls])


def _is_within(call: Record, load: Record) -> bool:
    """Return whether a call was made for a load, as far as can be seen: a worker's names no request."""
    same = call.attributes.get(spans.CONNECTOR) == load.attributes.get(spans.CONNECTOR)
    names_none = call.attributes.get(spans.REQUEST) is None
    is_loading = call.attributes.get(spans.HOOK) in LOADING
    return same and names_none and is_loading and _overlaps(call, load.start_ns, load.end_ns)


def _trace(engine: str, load: Record, ranks: Sequence[Found], near: Sequence[Found]) -> LoadTrace:
    has, near = _short(load), _once(near)
    connector, request = (printable(str(has.get(key, "?"))) for key in ("connector", "request.id"))
    lookups = [each.record for each in near if each.record.name == LOOKUP.name]
    lookups = [lookup for lookup in lookups if lookup.start_ns <= load.start_ns]
    arrived_ns = load.start_ns - _ns(has.get("queued"))
    begin_ns = min(arrived_ns, *(lookup.start_ns for lookup in lookups[-1:]), load.start_ns)
    is_async = has.get("mode") == "async"
    resumed_ns = load.start_ns + _ns(has.get("waited")) if is_async else load.end_ns
    end_ns = max(load.end_ns, resumed_ns)
    parts = [Part("request", 0, begin_ns, end_ns)]
    offers = _offers(has)
    if lookups:
        last = lookups[-1]
        if last.start_ns > begin_ns:
            parts.append(Part("queue", 1, begin_ns, last.start_ns))
        parts.append(Part("lookup", 1, last.start_ns, last.end_ns, _offers(_short(last)) or offers))
    elif begin_ns < load.start_ns:
        parts.append(Part("queue and lookup", 1, begin_ns, load.start_ns, offers))
    is_bad = has.get("outcome") == "failed"
    calls = [each for each in near if each.record.name == CALL.name and _overlaps(each.record, begin_ns, end_ns)]
    parts += [_call(each, 1) for each in calls if each.record.start_ns < load.start_ns]
    parts.append(Part(f"load {connector}", 1, load.start_ns, load.end_ns, ", ".join(_words(has)), is_bad))
    for each in sorted(ranks, key=lambda each: _rank(each.record)):
        rank = each.record
        failed = spans.ERROR_TYPE in rank.attributes
        number = _rank(rank)
        parts.append(Part(f"rank {number}", 2, rank.start_ns, rank.end_ns, _error(rank), failed, number))
    parts += [_call(each, 2) for each in calls if each.record.start_ns >= load.start_ns]
    if is_async and resumed_ns > load.end_ns:
        parts.append(Part("resume", 1, load.end_ns, resumed_ns))
    for wrong in (each.record for each in near if each.record.name == LOAD_WRONG.name):
        blocks = f"{wrong.attributes.get(spans.WRONG_BLOCKS)} blocks"
        parts.append(Part("wrong bytes", 1, wrong.start_ns, wrong.end_ns, blocks, is_bad=True))
    return LoadTrace(
        engine, connector, request, load.trace_id, str(has.get("outcome", "?")), str(has.get("mode", "?")),
        load.start_ns, load.end_ns, tuple(parts), load.attributes,
    )  # fmt: skip


def _overlaps(record: Record, begin_ns: int, end_ns: int) -> bool:
    return record.start_ns <= end_ns and record.end_ns >= begin_ns


def _call(each: Found, depth: int) -> Part:
    call, where = each.record, "" if each.rank is None else f" on rank {each.rank}"
    failed = spans.ERROR_TYPE in call.attributes
    title = f"{call.attributes.get(spans.HOOK, 'call')}{where}"
    return Part(printable(title), depth, call.start_ns, call.end_ns, _error(call) or "slow", failed, each.rank)


def _once(found: Iterable[Found]) -> list[Found]:
    """Return each span once, in the order of their start."""
    return sorted({each.record.span_id: each for each in found}.values(), key=lambda each: each.record.start_ns)


def _ns(seconds: object) -> int:
    return max(0, round(seconds * 1e9)) if isinstance(seconds, (int, float)) else 0


def _rank(record: Record) -> int:
    rank = record.attributes.get(spans.RANK, 0)
    return rank if isinstance(rank, int) else 0


def _error(record: Record) -> str:
    return printable(str(record.attributes.get(spans.ERROR_TYPE, "")))


def _short(record: Record) -> dict[str, Any]:
    """Return a span's attributes without their prefix."""
    return {key.removeprefix("kv_transfer."): value for key, value in record.attributes.items()}


def _offers(has: Mapping[str, Any]) -> str:
    offers = {key.removeprefix("offered_tokens."): n for key, n in has.items() if key.startswith("offered_tokens.")}
    return (
        "offered: " + " ".join(printable(f"{name} {n:,}" if isinstance(n, int) else name) for name, n in offers.items())
        if offers
        else ""
    )


def _words(has: Mapping[str, Any]) -> Iterator[str]:
    """Yield a load's main attributes."""
    tokens, whole = has.get("tokens"), has.get("prompt_tokens")
    if isinstance(tokens, int):
        yield f"{tokens:,} of {whole:,} tokens" if isinstance(whole, int) and whole else f"{tokens:,} tokens"
    if isinstance(size := has.get("bytes"), int) and size:
        yield decimal(size)
    if has.get("mode") == "sync":
        yield "within the step"
    if (outcome := has.get("outcome")) != "ok":
        yield printable(str(outcome))
    if "slowest_rank" in has:
        yield f"rank {has['slowest_rank']} last by {took(_ns(has.get('rank_skew')))}"
    if isinstance(lost := has.get("recomputed_tokens"), int):
        yield f"{lost:,} tokens computed"
    elif (saved := has.get("saved")) is not None:
        yield f"computing: {took(_ns(saved))}"
    if remote := has.get("remote.host") or has.get("remote.engine_id"):
        yield f"from {printable(str(remote))}"
