"""Connectors that hand KV from a prefill to a decode engine: their schedulers are real, their workers' wire a stand-in.

The stand-in gets what the real worker gets, the step's metadata; it copies blocks from the prefill engine's memory into
the decode engine's when they are due, and reports as the real one does.
"""

import random
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as nixl_connector

from tests.connectors.engine import Engine
from tests.connectors.lives import PATIENCE, Ending, Prompts
from tests.connectors.memory import Memory, Truth
from tests.connectors.offloading import Offloading
from tests.connectors.plug import Plug, Wire, entries


class Handoff(Plug):
    """One side of a pair; ``peer`` is the other."""

    peer: "Handoff"

    def __init__(self, connector: str, name: str, *, is_prefill: bool, seed: int = 0) -> None:
        super().__init__(name, seed)
        self.connector = connector
        self.is_prefill, self.role = is_prefill, "kv_producer" if is_prefill else "kv_consumer"
        self.ready: dict[str, list[int]] = {}  # prefill: a transfer -> its blocks, held until they are read
        self.dropped: set[str] = set()  # prefill: transfers that will never be ready
        self.asked: list[tuple[int, str, str, list[int], bool]] = []  # decode: due, request, transfer, blocks, reports
        self.sent: set[str] = set()
        self.names: dict[str, str] = {}  # transfer -> the prefill engine's request

    def install(self, patch: Any) -> None:
        patch.setattr(nixl_connector, "NixlPullConnectorWorker", NixlWire)
        patch.setattr(nixl_connector, "NixlPushConnectorWorker", NixlWire)
        patch.setattr(mooncake_connector, "MooncakeConnectorWorker", MooncakeWire)

    def attach_worker(self, connector: Any, memory: Memory, truth: Truth, rank: int) -> None:
        super().attach_worker(connector, memory, truth, rank)
        connector.connector_worker.plug = self

    def pull(self, request: str, transfer: str, blocks: list[int], *, reports: bool) -> None:
        self.asked.append((self.now + self.delay(), request, transfer, blocks, reports))

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self.is_prefill:
            results.finished_sending, self.sent = self.sent, set()
            return results
        waiting, self.asked = self.asked, []
        for due, request, transfer, blocks, reports in waiting:
            has_failed = transfer in self.peer.dropped
            if due > self.now or not (has_failed or transfer in self.peer.ready):
                self.asked.append((due, request, transfer, blocks, reports))
                continue
            if not has_failed:
                source = self.peer.ready.pop(transfer)
                for theirs, ours in zip(source[len(source) - len(blocks) :], blocks, strict=True):
                    self.memories[0].put(ours, self.peer.memories[0].page(theirs))
                    self.loaded += 1
                self.peer.sent.add(self.peer.names[transfer])
            if reports:
                results.finished_recving.add(request)
                if has_failed:
                    results.failed_recving.add(request)
        return results

    def leftovers(self) -> list[str]:
        scheduler = self.on_scheduler.connector_scheduler
        books = [
            *("_reqs_need_recv", "_reqs_need_save", "_reqs_need_send", "_reqs_not_processed", "_reqs_in_batch"),
            *("_heartbeat_req_engine", "_push_pending_registrations", "_finished_request_blocks"),
        ]  # of which each class has some
        left = entries(scheduler, *(book for book in books if hasattr(scheduler, book)))
        return left + [f"blocks of {t}" for t in self.ready] + [f"load of {request}" for _, request, *_ in self.asked]


class NixlWire(Wire):
    """Pull and push: a transfer is named by the prefill engine's request."""

    def start_load_kv(self, meta: Any) -> None:
        plug = self.plug
        for request in meta.reqs_to_send:
            plug.names[request] = request
        for request, (blocks, *_) in meta.push_finished_blocks.items():
            plug.ready[request] = list(blocks)
        for request, need in meta.reqs_to_recv.items():
            (blocks,) = need.local_block_ids or ([],)
            is_push = request in meta.push_registrations
            if need.remote.block_ids:  # pull: the decode engine knows which
                (plug.peer.ready[need.remote.request_id],) = [list(group) for group in need.remote.block_ids]
            plug.pull(request, need.remote.request_id, list(blocks), reports=need.awaiting_kvs or is_push)


class MooncakeWire(Wire):
    """A transfer is named by the router."""

    def start_load_kv(self, meta: Any) -> None:
        plug = self.plug
        plug.dropped |= meta.reqs_not_processed
        for request, (transfer, blocks) in meta.reqs_to_send.items():
            plug.names[transfer] = request
            if blocks:
                plug.ready[transfer] = list(blocks[0])
        for requests in meta.reqs_to_recv.values():
            for request, need in requests.items():
                blocks = list(need.local_block_ids[0]) if need.local_block_ids else []
                plug.pull(request, need.transfer_id, blocks, reports=bool(blocks))


def build_pair(connector: str, router: str, patch: Any, seed: int, *, is_first: bool) -> tuple[Engine, Engine]:
    """Build a prefill and a decode engine, each with an offloading sibling before or after the connector."""
    engines, ends = [], []
    for name, is_prefill in (("prefill", True), ("decode", False)):
        end = Handoff(connector, name, is_prefill=is_prefill, seed=seed)
        sibling = Offloading(f"{name}-sibling", seed)
        plugs: list[Plug] = [end, sibling] if is_first else [sibling, end]
        for plug in plugs:
            plug.install(patch)
        engines.append(Engine(router, plugs, blocks=40))
        ends.append(end)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return engines[0], engines[1]


class Router:
    """Sends each request to the prefill engine, and then, with what that said, to the decode engine."""

    def __init__(self, prefill: Engine, decode: Engine, connector: str, seed: int) -> None:
        self.prefill, self.decode, self.connector = prefill, decode, connector
        self.random = random.Random(seed)
        self.prompts = Prompts(self.random)
        self.sent: list[list[int]] = []
        self.doomed: list[tuple[int, str]] = []  # step, request

    def serve(self, requests: int) -> None:
        """Serve so many; some are aborted on the second engine."""
        for _ in range(PATIENCE + 40 * requests):
            if len(self.sent) == requests and not (self.prefill.is_busy or self.decode.is_busy):
                return
            if len(self.sent) < requests and self.random.random() < 0.4:
                number = len(self.sent)
                self.sent.append(self.prompts.next())
                self.prefill.add(f"p{number}", self.sent[-1], 1, do_remote_decode=True, transfer_id=f"t{number}")
            ended = []
            for engine in (self.prefill, self.decode):
                if engine.is_busy:
                    engine.step()
                    ended += [each for each in engine.request_outputs if each.finished and engine is self.prefill]
            for each in ended:
                self.pass_on(int(each.request_id[1:]), each.kv_transfer_params or {})
            for at, request in [entry for entry in self.doomed if entry[0] <= self.decode.steps]:
                self.doomed.remove((at, request))
                if request in self.decode.scheduler.requests:
                    self.decode.abort(request)

    def pass_on(self, number: int, noted: dict[str, Any]) -> None:
        by_router = {"do_remote_prefill": True, "transfer_id": f"t{number}"}
        by_router |= {"remote_engine_id": "prefill", "remote_bootstrap_addr": ""}
        params = by_router if self.connector == "MooncakeConnector" else noted
        self.decode.add(f"d{number}", self.sent[number], self.random.choice((1, 4, 20)), **params)
        if self.random.random() < 0.25:
            self.doomed.append((self.decode.steps + self.random.choice((0, 1, 3)), f"d{number}"))


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("router", ["stock", "kvobs"])
@pytest.mark.parametrize("connector", ["NixlPullConnector", "NixlPushConnector", "MooncakeConnector"])
def test_handed_over_kv_is_right_and_nothing_is_left(
    connector: str, router: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = build_pair(connector, router, monkeypatch, 1, is_first=is_first)
    Router(prefill, decode, connector, 1).serve(16)
    endings = [Ending(prefill), Ending(decode)]
    assert [line for ending in endings for line in ending.faults] == []
    assert not is_first or endings[1].loaded["decode"] > 20
