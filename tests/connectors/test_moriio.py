"""MoRIIO beside a sibling that saves: blocks are free once, after both, and neither takes the other's reports back.

Its real scheduler side is on vLLM's real scheduler, as a producer; its worker, AMD's library, has a stand-in.
"""

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvobs.testing import Script
from tests.connectors.engine import Beside
from tests.connectors.plug import Idle

FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
RANKS = pytest.mark.parametrize("ranks", [1, 2])
HELD = "FINISHED_LENGTH_CAPPED"

BOTH, OURS = ("stock", "kvobs"), ("kvobs",)
RIGHT = {
    "acknowledged, then saved": (BOTH, "r", "prefill 2:held acknowledge:held saved:gone"),
    "saved, then acknowledged": (BOTH, "r", "prefill 2:held saved:held acknowledge:gone"),
    "no decode engine wants it": (OURS, "r", "add 2:held saved:gone wait wait"),
    "acknowledged early": (BOTH, "", "prefill-long 2 acknowledge:RUNNING 4:gone"),
    "acknowledged early, saved at last": (OURS, "r", "prefill-long 2 acknowledge 4:held saved:gone"),
    "never acknowledged": (BOTH, "", "prefill 5:held wait:gone"),
    "acknowledged too late": (BOTH, "", "prefill 2 wait:gone acknowledge wait prefill 2:held acknowledge:gone"),
    "given up, and saved at last": (OURS, "r", "prefill 2 wait:held 3:held saved:gone wait"),
}
"""By name: with which routers, what the sibling saves, and what happens to a request, with its status then."""

CASES = [
    pytest.param(name, router, read, id=f"{name}-{router}-{'read' if read else 'write'}")
    for name, (routers, _, life) in RIGHT.items()
    for router in routers
    for read in ((True,) if "wait" in life else (True, False))
]
"""vLLM 0.33 gives nothing up in write mode."""

WRONG_IN_STOCK = {
    "the sibling's save is taken back": "add 2 saved wait wait wait:held",
    "free when acknowledged early": "prefill-long 2 acknowledge 4:gone",
    "free when given up": "prefill-long 2 4 wait:gone",
}
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.moriio"
PATIENCE = 60.0
"""Seconds after which MoRIIO no longer waits for the decode engine to acknowledge."""


class Acknowledged(Idle):
    """Stands in for the worker: it reports what the test lets the decode engine acknowledge."""

    def __init__(self, *_: Any) -> None:
        self.said: set[str] = set()

    def get_finished(self, *_: Any) -> tuple[set[str], set[str]]:
        said, self.said = self.said, set()
        return said, set()

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Report as vLLM 0.33 asks for it."""
        return KVConnectorTransferResults(finished_sending=self.get_finished()[0])


class Prefill(Beside):
    """A prefill engine of MoRIIO and a scripted sibling."""

    def __init__(self, router: str, patch: Any, sibling: Script, *, is_first: bool, read: bool, ranks: int) -> None:
        self.clock, self.sibling = SimpleNamespace(now=time.monotonic()), sibling
        self.clock.monotonic = self.clock.perf_counter = lambda: self.clock.now  # it goes on when the test lets it
        moriio = importlib.import_module(f"{MODULE}.moriio_connector")  # needs a package that is fetched by then
        common = importlib.import_module(f"{MODULE}.moriio_common")
        patch.setattr(common.RoleManager, "_instance", None)  # the role is that of the whole process
        patch.setattr(moriio, "MoRIIOConnectorWorker", Acknowledged)
        patch.setattr(moriio, "time", self.clock)
        extra = {"host_ip": "127.0.0.1", "read_mode": read, "defer_timeout": PATIENCE}
        config = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
        super().__init__(router, config, sibling, is_first=is_first, ranks=ranks)

    def prefill(self, request: str, max_tokens: int = 1) -> None:
        remote: dict[str, Any] = {"remote_host": "h", "remote_handshake_port": 1, "remote_notify_port": 2}
        remote |= {"remote_engine_id": "d", "remote_block_ids": []}
        self.add(request, max_tokens=max_tokens, do_remote_decode=True, transfer_id=f"t-{request}", **remote)

    def acknowledge(self, request: str) -> None:
        for worker in self.workers:
            self.real(worker).connector_worker.said.add(request)
        self.step()

    def saved(self, request: str) -> None:
        for rank in range(len(self.workers)):
            self.sibling.say(rank, saved=request)
        self.step()

    def wait(self) -> None:
        self.clock.now += PATIENCE + 1
        self.step()

    @property
    def left(self) -> list[str]:
        return self.left_in(
            self.real(self.connector).connector_scheduler,
            *("_deferred_send_deadlines", "_pending_sent_acks", "_reqs_need_save", "_reqs_need_send"),
            *("_reqs_need_pending_save", "_req_kv_params", "transfer_id_to_request_id"),
        )


def _live(
    life: str, router: str, saves: str, patch: pytest.MonkeyPatch, *, is_first: bool, read: bool, ranks: int = 1
) -> Prefill:
    sibling = Script("sibling", promises=set(saves.split()))
    engine = Prefill(router, patch, sibling, is_first=is_first, read=read, ranks=ranks)
    for happening in life.split():
        what, _, status = happening.partition(":")
        match what:
            case "add":
                engine.add("r", max_tokens=1)
            case "prefill" | "prefill-long":
                engine.prefill("r", max_tokens=1 if what == "prefill" else 4)
            case "acknowledge":
                engine.acknowledge("r")
            case "saved":
                engine.saved("r")
            case "wait":
                engine.wait()
            case _:
                engine.run(int(what))
        assert not status or engine.status("r") == {"held": HELD}.get(status, status), happening
    return engine


@FIRST
@RANKS
@pytest.mark.parametrize(("name", "router", "read"), CASES)
def test_blocks_are_free_once_after_both(
    name: str, router: str, ranks: int, *, read: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, saves, life = RIGHT[name]
    engine = _live(life, router, saves, monkeypatch, is_first=is_first, read=read, ranks=ranks)
    engine.run(3)
    assert engine.left == []


@FIRST
@pytest.mark.parametrize("name", WRONG_IN_STOCK)
def test_stock_frees_too_early_or_never(name: str, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(WRONG_IN_STOCK[name], "stock", "r", monkeypatch, is_first=is_first, read=True)
