"""Compose the observers of the router into one, and contain their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvobs.faults import contain
from kvobs.probe.recorder import Call
from kvobs.schema.signals import Where
from kvobs.state.events import EVENTS, Observer
from kvobs.telemetry.tracing.request_traces import Traces


def compose(observers: Iterable[Observer]) -> Observer:
    """Return an observer that passes each event to those that record it, in their order."""
    composed = Observer()
    given = tuple(observers)
    for event in EVENTS:
        if calls := [(getattr(each, event), _where(each)) for each in given if _records(each, event)]:
            setattr(composed, event, _announcement(calls))
    composed.wants_lookups = any(_records(each, "looked_up") for each in given)
    return composed


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
