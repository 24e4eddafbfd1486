"""The connector that a soak runs three of: it does what each request's plan says, and remembers live requests only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.testing import BLOCK, Script, ScriptedConnector
from tests.engine.steering import Agenda, Due
from tests.soak.ledger import Ledger, Report
from tests.soak.plans import Plan
from tests.support.scripted import Stats, Things

STATS_EVERY = 8
"""Steps in which a worker has stats of its own once."""


@dataclass
class Part(Script):
    """Which of its life's children a connector is, and the books of the life."""

    ledger: Ledger = field(kw_only=True)
    index: int = field(kw_only=True)


class Order(NamedTuple):
    """What a child's scheduler side sends its workers."""

    kind: str  # "load", "save" or "stray"
    request: str
    plan: Plan
    blocks: tuple[int, ...] = ()  # that a load fills


@dataclass
class SoakMetadata(KVConnectorMetadata):
    """One step's orders."""

    step: int
    orders: list[Order] = field(default_factory=list)


@dataclass
class Tracked:
    """What the scheduler's side knows of a live request."""

    plan: Plan
    lookups: int = 0
    loads: int = 0
    local: int = 0
    told_stray: bool = False


class OddStats(KVConnectorStats):
    """Stats that nobody can merge."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data


class SoakChild(ScriptedConnector):
    """Follows the plans of its life's requests."""

    script: Part

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._ledger, self._index = self.script.ledger, self.script.index
        # Scheduler's side
        self._live: dict[str, Tracked] = {}
        self._orders: list[Order] = []
        self._step = 0
        # Worker's side
        self._agenda = Agenda()
        self._holes: dict[str, frozenset[int]] = {}

    def _called(self, hook: str) -> None:
        self._ledger.called(self._index, hook)

    def _note(self, hook: str, detail: Any = None) -> Any:
        """Keep no calls: memory must stay flat."""

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._called("on_new_request")
        self._live[request.request_id] = Tracked(Plan(*request.kv_transfer_params["soak"][self._index]))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._called("get_num_new_matched_tokens")
        tracked = self._live[request.request_id]
        tracked.lookups += 1
        tracked.local = num_computed_tokens
        tokens: int | None = None
        if tracked.lookups > tracked.plan.not_yet:
            room = (request.num_tokens - 1) // BLOCK * BLOCK - num_computed_tokens
            tokens = max(0, min(tracked.plan.blocks * BLOCK, room)) if tracked.loads < tracked.plan.loads else 0
        self._ledger.answered(request.request_id, self._index, tokens)
        return tokens, bool(tokens and tracked.plan.is_async)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._called("update_state_after_alloc")
        request_id, tracked = request.request_id, self._live[request.request_id]
        plan = tracked.plan
        self._ledger.allocated(request_id, self._index, num_external_tokens, plan.is_async, self._step)
        if num_external_tokens:
            tracked.loads += 1
            first, end = (n // BLOCK for n in (tracked.local, tracked.local + num_external_tokens))
            ids = tuple(blocks.get_block_ids()[0][first:end])
            self._orders.append(Order("load", request_id, plan, ids))
        if plan.stray and not tracked.told_stray:
            tracked.told_stray = True
            self._orders.append(Order("stray", f"stranger-{request_id}" if plan.stranger else request_id, plan))

    def build_connector_meta(self, scheduler_output: Any) -> SoakMetadata:
        meta, self._orders = SoakMetadata(self._step, self._orders), []
        if self._index == 0:
            self._ledger.scheduled(self._step)
        self._step += 1
        return meta

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._called("request_finished_all_groups")
        plan = self._live.pop(request.request_id).plan
        self._ledger.finished(request.request_id, self._index, promises=plan.promises)
        if plan.promises:
            self._orders.append(Order("save", request.request_id, plan))
        return plan.promises, None

    def update_connector_output(self, connector_output: Any) -> None:
        if self._index == 0:
            self._ledger.take_in()

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta: Any = self._get_connector_metadata()
        self._step = meta.step
        for order in meta.orders:
            self._take(order)

    def _take(self, order: Order) -> None:
        plan, request = order.plan, order.request
        if order.kind == "stray":
            self._agenda.add(self._step, Due(plan.stray, request))
            return
        fails = plan.fails if order.kind == "load" and self.rank in plan.fails_on else ""
        first_bad = min(plan.good_blocks, len(order.blocks) - 1)
        bad = frozenset(order.blocks[first_bad:]) if fails == "blocks" else frozenset()
        if order.kind == "load" and not plan.is_async:
            self._spoil(request, bad)
            return
        after = (plan.received if order.kind == "load" else plan.saved)[self.rank]
        if after is None:
            return
        kind = "failure" if fails == "whole" else order.kind
        self._agenda.add(self._step + after, Due(kind, request, bad))
        if plan.again and order.kind == "load":
            self._agenda.add(self._step + after + plan.again, Due(kind, request))

    def _spoil(self, request: str, bad: frozenset[int]) -> None:
        if bad:
            self._holes[request] = bad

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for due in self._agenda.take(math.inf if self._ledger.is_over else self._step):
            if due.kind == "save":
                results.finished_sending.add(due.request)
                continue
            results.finished_recving.add(due.request)
            self._spoil(due.request, due.bad_blocks)
            if due.kind == "failure":
                results.failed_recving.add(due.request)
        self._tell("failure", results.failed_recving)
        self._tell("load", results.finished_recving - results.failed_recving)
        self._tell("save", results.finished_sending)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        holes, self._holes = self._holes, {}
        self._tell("holes", holes)
        return set().union(*holes.values())

    def _tell(self, kind: str, requests: Iterable[str]) -> None:
        self._ledger.reports += [Report(self.rank, self._index, kind, request) for request in requests]

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is KVConnectorRole.SCHEDULER or self._index == 2 or self._step % STATS_EVERY:
            return None
        self._ledger.told_stats(self._index, odd=self._index == 1)
        return OddStats(data={"n": 1}) if self._index == 1 else Stats(data={"n": 1})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> Things:
        return Things(*args)
