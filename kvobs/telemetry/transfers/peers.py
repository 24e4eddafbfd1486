"""Count the loads from each other engine that a decode engine reads from."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from kvobs.probe.recorder import Recorder
from kvobs.schema import spans
from kvobs.schema.signals import OTHER_VALUE, PEER_LOAD_SECONDS, PEER_LOADS
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.transfers import Load, LookupResult
from kvobs.telemetry.tracing.trace_context import remote_of

NAME_AT_MOST = 128  # characters
PEERS_AT_MOST = 32  # the first ones; later ones are counted together


class Peers(Observer):
    """Counts loads by the engine that they read from; ``between_engines`` are the connectors that read from others."""

    def __init__(self, recorder: Recorder, between_engines: Container[int]) -> None:
        self._recorder = recorder
        self._between_engines = between_engines
        self._peers: set[str] = set()
        self._loading: dict[str, str] = {}  # request -> the peer that it loads from

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        # Connectors change the params once they have taken them.
        if owner in self._between_engines and (peer := peer_of(request.kv_transfer_params)):
            if len(self._peers) < PEERS_AT_MOST:
                self._peers.add(peer)
            self._loading[request.request_id] = peer if peer in self._peers else OTHER_VALUE

    def load_ended(self, request_id: str, load: Load) -> None:
        if not load.aborted:
            self._count(request_id, load, load.outcome)

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        self._count(request_id, load, "failed" if load.failed or by_error else "aborted")

    def _count(self, request_id: str, load: Load, outcome: str) -> None:
        if (peer := self._loading.pop(request_id, None)) is not None:
            self._recorder.count_dynamic(load.connector_index, PEER_LOADS, peer, outcome)
            if outcome == "ok":
                self._recorder.count_dynamic(load.connector_index, PEER_LOAD_SECONDS, peer, n=load.duration_ns)

    def request_ended(self, request: ObservedRequest) -> None:
        self._loading.pop(request.request_id, None)


def peer_of(params: Any) -> str | None:
    """Return the host, with its port, of the engine that ``kv_transfer_params`` name to read from; else its id.

    A client chooses these: what is too long for a label is cut.
    """
    remote = remote_of(params)
    peer = remote.get(spans.REMOTE_HOST)
    if peer is None:
        peer = remote.get(spans.REMOTE_ENGINE)
    elif isinstance(port := params.get("remote_port"), int):
        peer = f"{peer}:{port}"
    return peer[:NAME_AT_MOST] if peer is not None else None
