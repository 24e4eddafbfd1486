"""The events of requests and transfers on the scheduler's side: the router announces them, telemetry listens.

An event comes after what it announces, in the scheduler's own thread. A listener must not raise, must not change what
it is given, and may keep it.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from typing import Any, Protocol

from kvobs.prediction.load_choice import Decision
from kvobs.state.transfers import Gain, Load, Save, Stray


class LookedUp(Protocol):
    """The part of vLLM's request that a listener may read. In vLLM 0.27 it has no ``trace_headers``."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None


class TransferListener:
    """Receives the events, and does nothing; a subclass overrides those it records."""

    wants_lookups = True
    """Whether ``looked_up`` must be called."""

    def looked_up(self, request: LookedUp, began_ns: int, ended_ns: int) -> None:
        """Receive a lookup of all connectors, with its wall-clock times; vLLM may repeat it."""

    def decided(self, request_id: str, decision: Decision) -> None:
        """Receive why a request's lookups end as they do, just before their end; only with a policy that predicts."""

    def allocated(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None:
        """Receive the end of a request's lookups: vLLM has allocated its blocks.

        ``offers`` are (child, tokens) of the last lookup; ``local`` tokens are in vLLM's own cache, and ``owner``, if
        there is one, loads ``tokens``.
        """

    def admitted(self, request_id: str, load: Load) -> None:
        """Receive a load that begins."""

    def load_ended(self, request_id: str, load: Load) -> None:
        """Receive a load that has ended on every rank."""

    def load_weighed(self, request_id: str, load: Load, gain: Gain) -> None:
        """Receive the gain of a finished load.

        For an async load this is called when its request is scheduled again, which may never happen.
        """

    def sync_loads_failed(self, child: int, loads: int, reset: Sequence[str]) -> None:
        """Receive the failed synchronous loads of a step, and the connectors whose cache was therefore reset."""

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        """Receive a load whose request ended first; the end of the load follows."""

    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        """Receive the saves, by child, that were promised for a finished request: open ones, and those done before."""

    def saved(self, request_id: str, child: int, save: Save, ended_ns: int) -> None:
        """Receive an open promised save that is done on every rank, or abandoned."""

    def stray(self, report: Stray) -> None:
        """Receive a report about a transfer that its child does not own."""

    def request_ended(self, request_id: str) -> None:
        """Receive the end of a request, after all its other events except the ends of its open transfers."""


class TransferListeners(TransferListener):
    """Passes every event to each of several listeners, in their order."""

    def __init__(self, listeners: Iterable[TransferListener]) -> None:
        self._listeners = tuple(listeners)
        for event, method in vars(TransferListener).items():
            if isfunction(method):
                setattr(self, event, partial(self._announce, event))
        nothing = TransferListener.looked_up
        self.wants_lookups = any(type(listener).looked_up is not nothing for listener in self._listeners)

    def _announce(self, event: str, *args: Any, **kwargs: Any) -> None:
        for listener in self._listeners:
            getattr(listener, event)(*args, **kwargs)
