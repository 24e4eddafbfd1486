"""Loads by the engine that they read from: each is counted once, and only of connectors between engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.cli.check import vllm_source
from kvobs.connectors.specs import _words
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import OTHER_VALUE, PEER_LOAD_SECONDS, PEER_LOADS, UNKNOWN_VALUE
from kvobs.state.transfers import NO_RESULT, Load
from kvobs.telemetry.transfers.peers import (
    ADDRESSES,
    ASKS,
    ENGINE,
    NAME_AT_MOST,
    PEERS_AT_MOST,
    Peers,
    in_id,
    peer_of,
)
from kvobs.testing import BLOCK, Rig, Script
from tests.support.numbers import taken
from tests.support.rig import entry_for, observer_of

NIXL, CPU = 0, 1
PARAMS: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 5600}


class Observed:
    """Sends events to the observer, as the router does, and reads the recorder's counts."""

    def __init__(self) -> None:
        self._recorder = Recorder(2)
        self.peers = Peers(self._recorder, [NIXL])

    def allocate(self, request: str, params: Any = PARAMS, owner: int | None = NIXL) -> Any:
        observed: Any = SimpleNamespace(request_id=request, kv_transfer_params=params)
        self.peers.allocated(observed, NO_RESULT, owner, 64 if owner is not None else 0)
        return observed

    def end(self, request: str, *, failed: bool = False, aborted: bool = False, index: int = NIXL) -> None:
        load = Load(index, 64, True, 1, arrived_ns=7, failed_on={0} if failed else set(), aborted=aborted)
        self.peers.load_ended(request, load)

    def abort(self, request: str, *, failed: bool = False, by_error: bool = False) -> None:
        load = Load(NIXL, 64, True, 1, failed_on={0} if failed else set(), aborted=True)
        self.peers.aborted(request, load, by_error=by_error)

    @property
    def counted(self) -> dict[tuple[Any, ...], int]:
        return {tuple(key): n for *key, n in taken(self._recorder).opened}


def test_a_load_from_a_store_has_no_peer_even_after_a_preemption() -> None:
    """With async scheduling a request may be allocated again before the output of its step has ended its load."""
    observed = Observed()
    observed.allocate("r")
    observed.allocate("r", owner=CPU)
    observed.end("r", index=CPU)
    assert observed.counted == {}


@pytest.mark.parametrize(
    ("changed", "peer"),
    [
        ({}, "h:5600"),
        ({"remote_port": None}, "h"),
        ({"remote_port": "5600"}, "h"),
        ({"remote_port": None, "remote_handshake_port": 6301, "remote_notify_port": 61005}, "h:6301"),
        ({"remote_host": None}, "e"),
        ({"remote_host": ""}, "e"),
        ({"remote_host": "h\n"}, "e"),
        ({"remote_host": None, "remote_bootstrap_addr": "http://h:8998", "remote_port": None}, "http://h:8998"),
        ({"do_remote_prefill": False, "do_remote_decode": True}, "h:5600"),
        ({"remote_host": None, "remote_engine_id": None}, None),
        ({"remote_host": 7, "remote_engine_id": ["e"]}, None),
    ],
)
def test_a_peer_is_named_by_its_host_and_port_or_by_its_id(changed: dict[str, Any], peer: str | None) -> None:
    assert peer_of("r", PARAMS | changed) == peer
    assert peer_of("r", None) is peer_of("r", ["do_remote_prefill"]) is None


BY_PROXY = "cmpl-___prefill_addr_{}___decode_addr_10.0.0.2:14580_0123456789abcdef0123456789abcdef-0-a9a2cbf5"


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.1:14579", "10.0.0.1:14579"),  # P2pNcclConnector
        ("host:10.0.0.1,handshake:6301,notify:61005", "10.0.0.1:6301"),  # MoRIIOConnector
        ("host:::1,handshake:6301,notify:61005", "::1:6301"),
        ("host:h,notify:1", "host:h,notify:1"),
        ("h\n", None),
    ],
)
def test_a_requests_id_names_a_peer_if_no_param_has_an_address(address: str, peer: str | None) -> None:
    request = BY_PROXY.format(address)
    assert in_id(request) == peer
    assert peer_of(request, None) == peer_of(request, {"transfer_id": "t"}) == peer
    assert peer_of(request, {ENGINE: "e"}) == (peer or "e")
    assert peer_of(request, PARAMS) == "h:5600"


@pytest.mark.parametrize("listed", [row for row in ADDRESSES if row[2]], ids=lambda row: row[2])
def test_vllms_connectors_read_the_keys_of_the_table(listed: tuple[str, str | None, str]) -> None:
    host, port, names = listed
    class_of = vllm_source.finder()
    assert class_of is not None
    ours = [name for name in names.split(", ") if name != "MooncakeConnectorV1"]  # it is vllm-ascend's
    assert ours
    for name in ours:
        assert {ASKS, ENGINE, host, port or host} <= _words(class_of(name, None)), name


@pytest.mark.parametrize("long", [{"remote_host": "h" * 300}, {"remote_host": None, "remote_engine_id": "e" * 300}])
def test_a_peer_whose_name_is_long_is_cut_and_keeps_its_outcome(long: dict[str, Any]) -> None:
    """A client chooses it, and a row of a page has so much room for all of its labels."""
    observed = Observed()
    observed.allocate("r", PARAMS | long)
    observed.end("r", failed=True)
    ((name, _, peer, outcome),) = observed.counted
    assert (name, outcome) == (PEER_LOADS.name, "failed")
    assert peer == str(long.get("remote_host") or long["remote_engine_id"])[:NAME_AT_MOST]


def test_each_load_is_counted_once_with_its_outcome() -> None:
    observed = Observed()
    for number in range(6):
        observed.allocate(str(number))
    observed.allocate("0", owner=None)  # for the step that resumes it
    observed.end("0")
    observed.end("0")
    observed.end("1", failed=True)
    observed.abort("2")
    observed.end("2", aborted=True)
    observed.abort("3", by_error=True)
    observed.abort("4", failed=True)
    loads = PEER_LOADS.name, NIXL, "h:5600"
    ends = {(*loads, "ok"): 1, (*loads, "failed"): 3, (*loads, "aborted"): 1}
    assert observed.counted == ends | {(PEER_LOAD_SECONDS.name, NIXL, "h:5600"): 7}
    assert observed.peers._loading.keys() == {"5"}


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_load_in_the_last_step_of_its_request_is_counted(tokens: int) -> None:
    """The request ends before the ranks' reports are read."""
    script = Script("p2p", {"r": (BLOCK, False)})
    rig = Rig("kvobs", script, connectors=[entry_for(script, "PeerConnector")], kvobs={"names": ["p2p"]})
    rig.add("r", max_tokens=tokens, **PARAMS)
    rig.run(4)
    counted = taken(rig.connector._telemetry._recorders.recorder).opened
    assert [key for *key, _ in counted if key[0] == PEER_LOADS.name] == [[PEER_LOADS.name, 0, "h:5600", "ok"]]
    peers = observer_of(rig, Peers)
    assert peers is not None
    assert peers._loading == {}


def test_a_store_that_loads_instead_of_the_peer_is_not_the_peer() -> None:
    observed = Observed()
    observed.allocate("r", owner=CPU)
    observed.end("r", index=CPU)
    assert observed.counted == {}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text"])
def test_a_load_whose_request_names_nobody_is_of_an_unknown_peer(params: Any) -> None:
    observed = Observed()
    for outcome in ("ok", "failed"):
        observed.allocate(outcome, params)
        observed.end(outcome, failed=outcome == "failed")
    loads = PEER_LOADS.name, NIXL, UNKNOWN_VALUE
    seconds = {(PEER_LOAD_SECONDS.name, NIXL, UNKNOWN_VALUE): 7}
    assert observed.counted == {(*loads, "ok"): 1, (*loads, "failed"): 1} | seconds


def test_further_peers_are_counted_together() -> None:
    observed = Observed()
    observed.allocate("unnamed", {})  # takes no place of a peer
    for number in [*range(PEERS_AT_MOST + 2), 0]:
        observed.allocate(f"r{number}", PARAMS | {"remote_port": number})
        observed.end(f"r{number}")
    loads = {peer: n for (name, _, peer, *_), n in observed.counted.items() if name == PEER_LOADS.name}
    assert loads == {f"h:{number}": 1 for number in range(1, PEERS_AT_MOST)} | {"h:0": 2, OTHER_VALUE: 2}
