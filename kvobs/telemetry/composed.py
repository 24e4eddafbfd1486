"""Pass each event of the router to all that record it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from kvobs.faults import contain
from kvobs.probe.pure import Call
from kvobs.state.events import Observer
from kvobs.telemetry.events import EVENTS, TelemetryObserver
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.urgent_loads import UrgentLoads


class Composed(TelemetryObserver):
    """Passes each event to the observers that record it, in their order."""

    def __init__(self, observers: Iterable[Observer | None]) -> None:
        self.observers = tuple([each for each in observers if each is not None])
        for event in EVENTS:
            nothing, calls = getattr(TelemetryObserver, event), list[tuple[Call, bool]]()
            for each in self.observers:
                method = getattr(each, event, nothing)
                if getattr(method, "__func__", method) is not nothing:
                    calls.append((method, isinstance(each, Traces | UrgentLoads)))
            if calls:
                setattr(self, event, partial(_announce, calls))
        self.wants_lookups = "looked_up" in vars(self)


def _announce(calls: Sequence[tuple[Call, bool]], *args: Any, **kwargs: Any) -> None:
    """Make the calls of an event; of each it is known whether it traces."""
    for call, traces in calls:
        try:
            call(*args, **kwargs)
        except Exception:
            if traces:
                contain("trace")
            else:
                contain("record")
