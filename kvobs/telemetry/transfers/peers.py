"""Name the engine that a load reads from, and count the loads from each."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import OTHER_VALUE, PEER_LOAD_SECONDS, PEER_LOADS, UNKNOWN_VALUE
from kvobs.state.events import ObservedRequest, Observer
from kvobs.state.transfers import Load, LookupResult

NAME_AT_MOST = 128  # characters
PEERS_AT_MOST = 32  # the first ones; later ones are counted together

ASKS = "do_remote_prefill"
"""The key of ``kv_transfer_params`` by which a request asks a decode engine to load its prompt."""

ADDRESSES: tuple[tuple[str, str | None, str], ...] = (
    ("remote_host", "remote_port", "NixlConnector, NixlPullConnector, NixlPushConnector, MooncakeConnectorV1"),
    ("remote_host", "remote_handshake_port", "MoRIIOConnector"),
    ("remote_host", None, ""),
    ("remote_bootstrap_addr", None, "MooncakeConnector"),
)
"""The keys of ``kv_transfer_params`` that have the host and the port of the other engine, and whose they are.

The first row counts whose keys are there. A connector of another package is named by the same keys, if it has them.
"""

ENGINE = "remote_engine_id"
"""The key that names it where no address does."""

_IN_ID = re.compile(r"___prefill_addr_(.+?)___decode_addr_")  # for P2pNcclConnector and MoRIIOConnector
_PARTS = re.compile(r"host:(?P<host>[^,]+),handshake:(?P<port>\d+)(,|$)")  # the address of the latter


class Peers(Observer):
    """Counts loads by the engine that they read from; ``between_engines`` are the connectors that read from others."""

    def __init__(self, recorder: Recorder, between_engines: Container[int]) -> None:
        self._recorder = recorder
        self._between_engines = between_engines
        self._peers: set[str] = set()
        # Request -> the peer that it loads from, until then; a synchronous load may end after its request.
        self._loading: dict[str, str] = {}

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        # Connectors change the params once they have taken them.
        if owner in self._between_engines:
            self._loading[request.request_id] = self._label(peer_of(request.request_id, request.kv_transfer_params))
        elif owner is not None:  # this load takes the place of an earlier one
            self._loading.pop(request.request_id, None)

    def _label(self, peer: str | None) -> str:
        if peer is None:
            return UNKNOWN_VALUE
        if len(self._peers) < PEERS_AT_MOST:
            self._peers.add(peer)
        return peer if peer in self._peers else OTHER_VALUE

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


def peer_of(request_id: str, params: Any) -> str | None:
    """Return the host, with its port, of the engine that a request names to read from; else its id; None without one.

    A client chooses these: what is too long for a label is cut, and what can't be read does not count.
    """
    given = params if isinstance(params, Mapping) else {}
    peer = _address(given) or in_id(request_id) or _text(given.get(ENGINE))
    return peer[:NAME_AT_MOST] if peer else None


def in_id(request_id: str) -> str | None:
    """Return the address of the prefill engine that a proxy has written into a request's id; None without one."""
    found = _text(match[1]) if (match := _IN_ID.search(request_id)) else None
    parts = _PARTS.match(found) if found else None
    return f"{parts['host']}:{parts['port']}" if parts else found


def _address(params: Mapping[str, Any]) -> str | None:
    for host_key, port_key, _ in ADDRESSES:
        host, port = _text(params.get(host_key)), params.get(port_key) if port_key else None
        if host and (port_key is None or isinstance(port, int)):
            return host if port_key is None else f"{host}:{port}"
    return None


def _text(value: Any) -> str | None:
    return value[:NAME_AT_MOST] if isinstance(value, str) and value and value.isprintable() else None
