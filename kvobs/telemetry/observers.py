"""Compose the observers of the router into one, and contain their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvobs.faults import contain
from kvobs.probe.pure import Call
from kvobs.state.events import EVENTS, Observer
from kvobs.telemetry.tracing.request_traces import Traces


class Composed(Observer):
    """Passes each event to those of the observers that record it, in their order."""

    def __init__(self, observers: Iterable[Observer | None]) -> None:
        self.observers = tuple([each for each in observers if each is not None])
        for event in EVENTS:
            nothing, calls = vars(Observer)[event], list[tuple[Call, bool]]()
            for each in self.observers:
                method = getattr(each, event)
                if getattr(method, "__func__", None) is not nothing:
                    calls.append((method, isinstance(each, Traces)))
            if calls:
                setattr(self, event, _announcement(calls))
        self.wants_lookups = "looked_up" in vars(self)


def _announcement(calls: Sequence[tuple[Call, bool]]) -> Call:
    """Return an event's calls as one; of each it is known whether it traces."""

    def announce(*args: Any, **kwargs: Any) -> None:
        for call, traces in calls:
            try:
                call(*args, **kwargs)
            except Exception:
                if traces:
                    contain("trace")
                else:
                    contain("record")

    return announce
