"""Lookups of the past on an engine whose costs are known."""

from __future__ import annotations

from typing import Any

from kvobs.cli.whatif.comparison import Comparison, compare
from kvobs.cli.whatif.history import History, PastLoad, PastLookup
from kvobs.cli.whatif.replay import Settings
from kvobs.options import Options
from kvobs.state.lookup import NOBODY, Answer
from kvobs.telemetry.flight import OWN

MS = 10**6
S = 1000 * MS
CHILDREN = ["near", "far"]
PROMPT = 1024
QUEUED, FIXED, RESUME = 3, 10, 2
"""Milliseconds: before the lookup, of any load, and from an asynchronous load's end to its request's step."""


def load_ms(child: int, tokens: int) -> float:
    return FIXED + tokens * (0.01, 0.05)[child]


def computing_ms(tokens: int) -> float:
    return 5 + tokens * 0.2


def lookup(at: int, *offers: int | None, chosen: int = NOBODY, **more: Any) -> PastLookup:
    """Return a lookup at this second, and all that followed it."""
    answers = {child: Answer(child, n, bool(n)) for child, n in enumerate(offers)}
    took = more.pop("took_ms", 1)
    found = PastLookup(at, at * S, at * S + took * MS, 0, answers, chosen, missing=PROMPT)
    found.computing = {OWN: computing_ms(PROMPT) / 1000}
    for child, n in enumerate(offers):
        if n:
            found.computing[child] = computing_ms(PROMPT - n) / 1000
    loaded = offers[chosen] if chosen != NOBODY else 0
    spent_ms = QUEUED + took + computing_ms(PROMPT - (loaded or 0))
    if loaded:
        ms = load_ms(chosen, loaded)
        ended_ns = found.ended_ns + int(ms * MS)
        found.load = PastLoad(chosen, loaded, ended_ns, "ok", ms / 1000, (ms + RESUME) / 1000)
        spent_ms += ms + RESUME
    found.arrived_ns = found.began_ns - QUEUED * MS
    found.first_token_ns = found.arrived_ns + int(spent_ms * MS)
    for key, value in more.items():
        setattr(found, key, value)
    return found


def compared(
    *lookups: PastLookup, order: list[str] | None = None, recorded: dict[str, Any] | None = None, **settings: Any
) -> Comparison:
    was = {"load_policy": "first", "wait_for": "all", "lookup_timeout_ms": None, **(recorded or {})}
    history = History(CHILDREN, was, lookups, [RESUME / 1000])
    return compare([history], [Settings(tuple(order or CHILDREN), Options(**{**was, **settings}))])


def both(times: int = 20) -> list[PastLookup]:
    """Both connectors are loaded from in turns, and "far" always offers more."""
    return [lookup(i, *((256, 512), (0, 512))[i % 2], chosen=i % 2) for i in range(times)]
