"""One line for each request: its lookup, the load it waited for, the ranks, its resumption, and its saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs.cli import table
from kvobs.cli.timeline import names
from kvobs.cli.timeline.summary import last_rank
from kvobs.cli.timeline.transfers import Joined
from kvobs.cli.units import NONE, clock, duration


@dataclass
class Passage:
    """The way of a request from one lookup on; a preempted request has several."""

    first: Joined
    lookup: Joined | None = None
    load: Joined | None = None
    resume: Joined | None = None
    saves: list[Joined] = field(default_factory=list)


def passages(joined: Iterable[Joined]) -> list[Passage]:
    """Return each request's passages, in the order of their begin; ``joined`` is in order too."""
    found: list[Passage] = []
    last: dict[tuple[str, int, int], Passage] = {}
    for one in joined:
        key = one.run, one.engine, one.request
        passage = last.get(key)
        is_next = passage is None or one.kind == "lookup" or (one.kind == "load" and passage.load is not None)
        if passage is None or is_next:
            passage = last[key] = Passage(one)
            found.append(passage)
        if one.kind == "save":
            passage.saves.append(one)
        else:
            setattr(passage, one.kind, one)
    return found


def lines(found: Sequence[Passage]) -> list[str]:
    """Return a table with a line for each passage; times of what is in progress begin with >."""
    places = names.of_engines([one.first for one in found])
    heads = ("at", "request", "lookup", "wait", "last rank", "resume", "tokens", "connector")
    rows = [_row(one, place) for one, place in zip(found, places, strict=True)]
    return table.lines(heads, rows, texts=("at", "request", "last rank", "connector"), gap=1)


def _row(one: Passage, place: str) -> tuple[str, ...]:
    load = one.load
    at, request = clock(one.first.start), names.short(one.first.request)
    rank = NONE if load is None else last_rank(load)
    tokens = f"{load.tokens:,}" if load is not None and load.tokens else NONE
    parts = [place, _loaded(load), *(f"save {_of(save)} {_time(save)}" for save in one.saves)]
    if one.lookup is not None and one.lookup.outcome == "aborted":
        parts.insert(1, "aborted")
    said = ", ".join(part for part in parts if part) or NONE
    return at, request, _time(one.lookup), _time(load), rank, _time(one.resume), tokens, said


def _loaded(load: Joined | None) -> str:
    if load is None:
        return ""
    waits = f": rank {', '.join(map(str, load.waits_for))}" if load.waits_for else ""
    return load.connector if load.outcome == "ok" else f"{load.connector} {load.outcome}{waits}"


def _of(save: Joined) -> str:
    return save.connector if save.outcome in ("ok", "open") else f"{save.connector} {save.outcome}"


def _time(one: Joined | None) -> str:
    if one is None:
        return NONE
    return (">" if one.is_open else "") + duration(one.spent_ns / 1e9)


def as_dict(one: Passage) -> dict[str, Any]:
    """Return a passage as ``--json`` prints it."""
    first = one.first
    return {
        "at": first.start / 1e9,
        "request": names.of_request(first.request),
        "run": first.run,
        "engine": first.engine,
        "lookup": None if one.lookup is None else _plain(one.lookup),
        "load": None if one.load is None else _transfer(one.load),
        "resume": None if one.resume is None else _plain(one.resume),
        "saves": [_transfer(save) for save in one.saves],
    }


def _plain(one: Joined) -> dict[str, Any]:
    return {"s": one.spent_ns / 1e9, "outcome": one.outcome}


def _transfer(one: Joined) -> dict[str, Any]:
    last, skew_ns = one.slowest or (None, None)
    return {
        "connector": one.connector,
        **_plain(one),
        "tokens": one.tokens or None,
        "ranks": [
            {"rank": part.rank, "s": None if part.spent_ns is None else part.spent_ns / 1e9, "outcome": part.outcome}
            for part in one.parts
        ],
        "last_rank": last,
        "skew_s": None if skew_ns is None else skew_ns / 1e9,
        "waits_for": one.waits_for,
    }
