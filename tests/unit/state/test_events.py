"""A plain observer receives every event and does nothing; the base annotator adds nothing."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.state.events import EVENTS, Annotator, Observer, WorkerObserver


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_need_not_record_an_event(event: str) -> None:
    parameters = list(inspect.signature(getattr(Observer, event)).parameters.values())[1:]
    assert getattr(Observer(), event)(**{each.name: None for each in parameters}) is None


def test_lookups_transfers_connectors_and_ends_have_events() -> None:
    assert {"looked_up", "allocated", "admitted", "load_ended", "promised", "saved", "aborted"} < set(EVENTS)
    assert {"answered", "lapsed", "quarantined", "readmitted", "request_ended"} < set(EVENTS)


def test_without_telemetry_the_routers_messages_stay_the_same() -> None:
    annotator, request = Annotator(), SimpleNamespace()
    params: Any = {"key": 1}
    assert annotator.of_step(None, has_forward=True, has_sync_loads=False) is None
    assert annotator.of_load("r") is None
    assert annotator.of_client(request, params) is params
    observer = WorkerObserver()
    observer.step_begun(None, [])
    observer.step_ended()
