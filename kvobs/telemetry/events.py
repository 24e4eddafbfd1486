"""Add to the router's events those that observers announce to each other."""

from inspect import isfunction

from kvobs.state.events import EVENTS as OF_THE_ROUTER
from kvobs.state.events import Observer
from kvobs.state.transfers import Gain, Load


class TelemetryObserver(Observer):
    """Receives the events of the router and of the estimates."""

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        """Receive the gain of a finished load.

        For an async load this is called when its request is scheduled again, which may never happen.
        """

    def reused(self, request_id: str, tokens: int) -> None:
        """Receive how many of a prompt's tokens were in earlier prompts and answers."""


EVENTS = (*OF_THE_ROUTER, *(name for name, method in vars(TelemetryObserver).items() if isfunction(method)))
