"""Every event reaches every listener, in their order, with the same arguments."""

import inspect
from typing import Any

import pytest

from kvobs.state.events import TransferListener, TransferListeners

EVENTS = [name for name, value in vars(TransferListener).items() if inspect.isfunction(value)]


class Noting(TransferListener):
    """Notes each event under its own name."""

    def __init__(self, name: str, noted: list[Any]) -> None:
        for event in EVENTS:
            setattr(self, event, lambda *args, event=event, **more: noted.append((name, event, args, more)))


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_reaches_each_listener_as_it_was_announced(event: str) -> None:
    noted: list[Any] = []
    listeners = TransferListeners([Noting("one", noted), Noting("two", noted)])
    parameters = list(inspect.signature(getattr(TransferListener, event)).parameters.values())[1:]
    args = tuple(object() for one in parameters if one.kind is not one.KEYWORD_ONLY)
    more = {one.name: object() for one in parameters if one.kind is one.KEYWORD_ONLY}
    getattr(listeners, event)(*args, **more)
    assert noted == [(name, event, args, more) for name in ("one", "two")]


def test_there_are_events_and_a_listener_need_not_record_any() -> None:
    assert {"looked_up", "allocated", "admitted", "load_ended", "promised", "saved", "aborted"} < set(EVENTS)
    for event in EVENTS:
        parameters = list(inspect.signature(getattr(TransferListener, event)).parameters.values())[1:]
        assert getattr(TransferListener(), event)(**{one.name: None for one in parameters}) is None


def test_lookups_are_timed_only_where_a_listener_looks_at_them() -> None:
    """vLLM repeats them in each step, for each request that waits."""

    class OfLookups(TransferListener):
        def looked_up(self, request: Any, began_ns: int, ended_ns: int) -> None: ...

    assert not TransferListeners([TransferListener(), TransferListener()]).wants_lookups
    assert TransferListeners([TransferListener(), OfLookups()]).wants_lookups
