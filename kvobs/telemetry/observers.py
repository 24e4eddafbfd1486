"""Compose the observers of the router into one, and contain their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvobs.faults import contain
from kvobs.probe.recorder import Call
from kvobs.schema.signals import Where
from kvobs.state.events import EVENTS, Observer
from kvobs.telemetry.tracing.request_traces import Traces


class Composed(Observer):
    """Passes each event to those of the observers that record it, in their order."""

    def __init__(self, observers: Iterable[Observer | None]) -> None:
        self.observers = tuple(each for each in observers if each is not None)
        for event in EVENTS:
            if calls := [(getattr(each, event), _where(each)) for each in self.observers if _records(each, event)]:
                setattr(self, event, _announcement(calls))
        self.wants_lookups = any(_records(each, "looked_up") for each in self.observers)


def _records(observer: Observer, event: str) -> bool:
    return getattr(getattr(observer, event), "__func__", None) is not vars(Observer)[event]


def _where(observer: Observer) -> Where:
    """Return where an observer's errors are counted."""
    return "trace" if isinstance(observer, Traces) else "record"


def _announcement(calls: Sequence[tuple[Call, Where]]) -> Call:
    def announce(*args: Any, **kwargs: Any) -> None:
        for call, where in calls:
            try:
                call(*args, **kwargs)
            except Exception:
                contain(where)

    return announce
