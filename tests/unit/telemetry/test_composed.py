"""Each event reaches the observers that record it, and an error of one no other."""

import inspect
from typing import Any

import pytest

from kvobs import faults
from kvobs.state.events import Observer
from kvobs.telemetry.composed import Composed
from kvobs.telemetry.events import EVENTS, TelemetryObserver
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.urgent_loads import UrgentLoads


class Noting(Observer):
    """Notes each event under its own name."""

    def __init__(self, name: str, noted: list[Any]) -> None:
        for event in EVENTS:
            setattr(self, event, lambda *args, event=event, **more: noted.append((name, event, args, more)))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_each_observer_as_it_was_announced(event: str) -> None:
    noted: list[Any] = []
    composed = Composed([Noting("one", noted), None, Noting("two", noted)])
    parameters = list(inspect.signature(getattr(TelemetryObserver, event)).parameters.values())[1:]
    args = tuple(object() for each in parameters if each.kind is not each.KEYWORD_ONLY)
    more = {each.name: object() for each in parameters if each.kind is each.KEYWORD_ONLY}
    getattr(composed, event)(*args, **more)
    assert noted == [(name, event, args, more) for name in ("one", "two")]


class OfLookups(Observer):
    def looked_up(self, request: Any, began_ns: int, ended_ns: int) -> None: ...


def test_lookups_are_timed_only_where_an_observer_records_them() -> None:
    """vLLM repeats them in each step, for each request that waits."""
    assert not Composed([Observer(), Observer()]).wants_lookups
    assert Composed([Observer(), OfLookups()]).wants_lookups


def test_an_observer_that_records_costs_the_others_nothing() -> None:
    composed = Composed([OfLookups()])
    assert [event for event in EVENTS if event in vars(composed)] == ["looked_up"]


class Broken(Observer):
    def quarantined(self, index: int) -> None:
        raise LookupError(index)


class BrokenTraces(Traces):
    quarantined = Broken.quarantined

    def __init__(self) -> None: ...


class BrokenUrgentLoads(UrgentLoads):
    quarantined = Broken.quarantined

    def __init__(self) -> None: ...


@pytest.mark.usefixtures("in_production")
@pytest.mark.parametrize(
    ("broken", "where"), [(Broken(), "record"), (BrokenTraces(), "trace"), (BrokenUrgentLoads(), "trace")]
)
def test_an_observers_error_is_counted_and_others_get_the_event(broken: Observer, where: str) -> None:
    noted: list[Any] = []
    Composed([broken, Noting("one", noted)]).quarantined(1)
    assert noted == [("one", "quarantined", (1,), {})]
    assert faults.take() == {where: 1}
