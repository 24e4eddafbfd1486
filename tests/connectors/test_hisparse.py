"""HiSparse beside a sibling that loads asynchronously: its coordinator is given the end of every load."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector

from kvobs.testing import BLOCK, Rig, Script
from tests.connectors.handoff import Wire
from tests.connectors.hisparse import Imports, build, coordinator_of, leftovers

ROUTERS = ["stock", "kvobs"]
FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])


@FIRST
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("has_failed", [False, True], ids=["received", "failed"])
def test_it_is_given_the_end_of_a_siblings_load(
    has_failed: bool, router: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = Imports()
    imports.install(monkeypatch)
    sibling = Script("sibling", offers={"r": [(3 * BLOCK, True), (0, False)]})
    engine = build(router, monkeypatch, sibling, is_first=is_first)
    request = engine.add("r", max_tokens=4)
    engine.run(2)
    assert (engine.status("r"), imports.recorded) == ("WAITING_FOR_REMOTE_KVS", [("r", 3 * BLOCK)])
    sibling.say(0, **{"failed" if has_failed else "received": "r"})
    engine.step()
    assert imports.ended == [("r", has_failed)]
    assert imports.ready == {"r": 0 if has_failed else 3}
    assert coordinator_of(engine)._pending_imports == {}
    engine.run(12)
    assert (engine.status("r"), request.num_output_tokens) == ("gone", 4)
    assert leftovers(engine) == []


def _live(router: str, seed: int, *, is_first: bool) -> tuple[dict[str, bool], Imports, list[str]]:
    """Run one random life: hits, loads that end or fail, aborts, preemptions, prompts that share a prefix.

    Returns:
        the loads that the sibling reported and whether each has failed, the coordinator's imports, what is left.
    """
    with pytest.MonkeyPatch.context() as patch:
        imports, sibling, rng = Imports(), Script("sibling"), random.Random(seed)
        imports.install(patch)
        engine = build(router, patch, sibling, is_first=is_first, blocks=44)
        due: list[tuple[int, str]] = []
        said: dict[str, bool] = {}
        seen = 0
        for step in range(260):
            if step < 150 and rng.random() < 0.3:
                name = f"r{step}"
                if rng.random() < 0.7:
                    sibling.offers[name] = [(BLOCK * rng.randint(1, 5), True), (0, False)]
                tokens = BLOCK * rng.randint(2, 8) + rng.choice((0, 1, 5))
                engine.add(name, tokens, rng.choice((1, 4, 30)), prompt_of=rng.choice(("a", "b", name)))
            live = sorted(engine.scheduler.requests)
            if live and rng.random() < 0.06:
                engine.abort(rng.choice(live))
            # One at a time: vLLM goes through a set, whose order no router promises.
            for at, name in [entry for entry in due if entry[0] <= step][:1]:
                due.remove((at, name))
                said[name] = rng.random() < 0.35
                sibling.say(0, **{"failed" if said[name] else "received": name})
            engine.step()
            loads = sibling.called("update_state_after_alloc")
            for name, tokens, _ in loads[seen:]:
                if tokens and name in engine.scheduler.requests and engine.status(name) == "WAITING_FOR_REMOTE_KVS":
                    due.append((step + rng.choice((1, 2, 5)), name))
            seen = len(loads)
        return said, imports, leftovers(engine)


@pytest.mark.parametrize("seed", [1, 2])
@FIRST
@pytest.mark.parametrize("router", ROUTERS)
def test_each_load_ends_once_and_nothing_is_left(router: str, is_first: bool, seed: int) -> None:
    said, imports, left = _live(router, seed, is_first=is_first)
    assert sorted(imports.ended) == sorted(said.items())
    assert set(said) == {name for name, _ in imports.recorded}
    assert set(said.values()) == {False, True}
    assert left == []


class Pull(Wire):
    """NIXL's worker on the decode side: a load is over two steps after it was ordered."""

    failing: frozenset[str] = frozenset()

    def __init__(self, *_: Any) -> None:
        self.now = 0
        self.ordered: list[tuple[int, str]] = []
        self.blocks: dict[str, Any] = {}

    def start_load_kv(self, meta: Any) -> None:
        self.now += 1
        for request, need in meta.reqs_to_recv.items():
            self.blocks[request] = need.local_block_ids
            self.ordered.append((self.now + 2, request))

    def get_transfer_results(self) -> KVConnectorTransferResults:
        done = {request for due, request in self.ordered if due <= self.now}
        self.ordered = [entry for entry in self.ordered if entry[1] not in done]
        return KVConnectorTransferResults(finished_recving=done, failed_recving=done & self.failing)


def _decode(engine: Rig, request: str) -> Any:
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": f"p-{request}"}
    params |= {"remote_host": "h", "remote_port": 1, "tp_size": 1, "remote_block_ids": [[7, 8, 9, 10, 11]] * 2}
    return engine.add(request, max_tokens=3, **params)


@FIRST
@pytest.mark.parametrize("router", ROUTERS)
def test_it_is_given_the_ends_of_nixls_loads(router: str, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Imports()
    imports.install(monkeypatch)
    monkeypatch.setattr(nixl_connector, "NixlPullConnectorWorker", Pull)
    monkeypatch.setattr(Pull, "failing", frozenset({"bad"}))
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    engine = build(router, monkeypatch, nixl, is_first=is_first)
    requests = {name: _decode(engine, name) for name in ("good", "bad")}
    engine.run(20)
    assert dict(imports.ended) == {"good": False, "bad": True}
    assert [request.num_output_tokens for request in requests.values()] == [3, 3]
    assert leftovers(engine) == []
