"""Find out what ended an engine's previous life: its dead processes have left their pages."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns
from typing import NamedTuple

from kvobs import faults
from kvobs.log import log
from kvobs.page.description import End, ProcessInfo, process_name
from kvobs.page.layout import LOOKED
from kvobs.page.reader import Page, pages

SHOWN_S = 15 * 60.0
"""How long the end of the previous life is shown, and how old it is at most at the start."""
LONG_NS = 10**9
"""A process that was killed in a call that had lasted so long is taken to have ended because of it."""
UNKNOWN = "unknown"


@faults.contained("record")
def noted(process: ProcessInfo, server: str) -> ProcessInfo:
    """Return the description of an engine's scheduler with the unexpected end of the life before, which is logged."""
    if (found := _end(process, server)) is None:
        return process
    end, ago_s = found
    log.warning("the previous engine ended%s, %.0f s ago", described(end), ago_s)
    return replace(process, previous=end, previous_ago_s=ago_s)


def _end(process: ProcessInfo, server: str) -> tuple[End, float] | None:
    """Return the last end of an engine of the same server and number, and how many seconds ago it was."""
    lives: dict[str, list[_Found]] = {}
    for name, page in pages():
        life = name.partition("-")[0]
        if life != server and _is_same(page, process) and (found := _end_of(page)) is not None:
            lives.setdefault(life, []).append(found)
    # Of a life an exception is the cause, and the first one.
    ends = [min(life, key=lambda found: found[:2]) for life in lives.values()]
    last = max(ends, key=lambda found: found.at_ns, default=None)
    return (last.end, last.ago_s) if last is not None and last.is_shown else None


@faults.contained("record")
def sought(process: ProcessInfo) -> list[str]:
    """Return the names of pages whose end the next life of their engine will look for: a scheduler's own has, now."""
    looks = process.rank is None
    return [
        name
        for name, page in pages()
        if not (looks and _is_same(page, process)) and (found := _end_of(page)) is not None and found.is_shown
    ]


class _Found(NamedTuple):
    """The end of a process: whether it only hung, and when."""

    has_hung: bool
    at_ns: int
    end: End

    @property
    def ago_s(self) -> float:
        return (perf_counter_ns() - self.at_ns) / 1e9

    @property
    def is_shown(self) -> bool:
        return 0 <= self.ago_s < SHOWN_S


def _is_same(page: Page, process: ProcessInfo) -> bool:
    """Return whether a page is of a life of the engine of a process."""
    one, other = page.process.engine, process.engine
    return (one.launch, one.model, one.index) == (other.launch, other.model, other.index)


def _end_of(page: Page) -> _Found | None:
    """Return the unexpected end of a process in a call."""
    if page.has_ended_well or page.is_alive:
        return None
    if (raised := page.raised()) is not None:
        return _Found(False, raised.since_ns, End(raised.connector, raised.hook, raised.rank, raised.error))
    looked_ns = page.words[LOOKED]
    hung = next((call for call in page.calls() if looked_ns - call.since_ns > LONG_NS), None)
    return _Found(True, looked_ns, End(hung.connector, hung.hook, hung.rank, UNKNOWN)) if hung is not None else None


def described(end: End) -> str:
    """Return the end of an engine as the end of a sentence."""
    where = process_name(end.rank)
    if end.connector:
        return f" in {end.hook} of connector {end.connector!r} on {where}: {end.reason}"
    return f" outside any connector's call ({where}: {end.reason})"
