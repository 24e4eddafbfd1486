"""MoRIIO's real scheduler side on vLLM's real scheduler, as a producer; its worker, AMD's library, has a stand-in."""

from __future__ import annotations

import importlib
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvobs.testing import Script
from tests.connectors.engine import Beside
from tests.connectors.plug import Idle

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.moriio"
PATIENCE = 60.0
"""Seconds after which MoRIIO no longer waits for the decode engine to acknowledge."""


class Clock:
    """Stands for the module ``time``; it goes on when the test lets it."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


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
        self.clock, self.sibling = Clock(), sibling
        moriio = importlib.import_module(f"{MODULE}.moriio_connector")  # needs a package that is fetched by then
        common = importlib.import_module(f"{MODULE}.moriio_common")
        patch.setattr(common.RoleManager, "_instance", None)  # the role is that of the whole process
        patch.setattr(moriio, "MoRIIOConnectorWorker", Acknowledged)
        patch.setattr(moriio, "time", self.clock)
        extra = {"host_ip": "127.0.0.1", "read_mode": read, "defer_timeout": PATIENCE}
        config = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
        super().__init__(router, config, sibling, is_first=is_first, ranks=ranks)

    def prefill(self, request: str, max_tokens: int = 1) -> None:
        """Add a request that a decode engine will take over."""
        remote: dict[str, Any] = {"remote_host": "h", "remote_handshake_port": 1, "remote_notify_port": 2}
        remote |= {"remote_engine_id": "d", "remote_block_ids": []}
        self.add(request, max_tokens=max_tokens, do_remote_decode=True, transfer_id=f"t-{request}", **remote)

    def acknowledge(self, request: str) -> None:
        """Let the decode engine acknowledge, on each rank."""
        for worker in self.workers:
            self.real(worker).connector_worker.said.add(request)
        self.step()

    def saved(self, request: str) -> None:
        """Let the sibling have saved, on each rank."""
        for rank in range(len(self.workers)):
            self.sibling.say(rank, saved=request)
        self.step()

    def wait(self) -> None:
        """Let MoRIIO's patience end."""
        self.clock.now += PATIENCE + 1
        self.step()

    @property
    def left(self) -> list[str]:
        """Return what is left in an idle engine."""
        return self.left_in(
            self.real(self.connector).connector_scheduler,
            *("_deferred_send_deadlines", "_pending_sent_acks", "_reqs_need_save", "_reqs_need_send"),
            *("_reqs_need_pending_save", "_req_kv_params", "transfer_id_to_request_id"),
        )
