"""The connectors of a soak: each does what a request's plan says, and remembers live requests only."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.testing import BLOCK, Script
from tests.engine.children_steered import SteeredChild
from tests.engine.steering import Agenda, Due
from tests.soak.ledger import Ledger, Report
from tests.soak.plans import Plan
from tests.support.scripted import MeteredConnector, Stats

STATS_EVERY = 8
"""Steps in which a worker has stats of its own once."""


@dataclass
class Part(Script):
    """Which of its life's children a connector is, the books of the life, and what each rank reports at which step."""

    ledger: Ledger = field(kw_only=True)
    index: int = field(kw_only=True)
    agendas: defaultdict[int, Agenda] = field(default_factory=lambda: defaultdict(Agenda))


@dataclass
class SoakMetadata(KVConnectorMetadata):
    """The number of a step: a worker reports what is due in those that it has been told of."""

    step: int


@dataclass
class Tracked:
    """What the scheduler's side knows of a live request."""

    plan: Plan
    lookups: int = 0
    loads: int = 0
    local: int = 0


class OddStats(KVConnectorStats):
    """Stats that nobody can merge."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data


class SoakChild(MeteredConnector):
    """Follows the plans of its life's requests."""

    script: Part

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._ledger, self._index = self.script.ledger, self.script.index
        self._live: dict[str, Tracked] = {}
        self._step = 0
        self._holes: dict[str, frozenset[int]] = {}

    def _note(self, hook: str, detail: Any = None) -> Any:
        """Keep no calls: memory must stay flat."""

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._ledger.called(self._index, "on_new_request")
        self._live[request.request_id] = Tracked(Plan(*request.kv_transfer_params["soak"][self._index]))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
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
        request_id, tracked = request.request_id, self._live[request.request_id]
        plan = tracked.plan
        self._ledger.allocated(request_id, self._index, num_external_tokens, plan.is_async, self._step)
        if num_external_tokens:
            tracked.loads += 1
            first, end = (n // BLOCK for n in (tracked.local, tracked.local + num_external_tokens))
            self._load(request_id, plan, blocks.get_block_ids()[0][first:end])
        if plan.stray:
            tracked.plan = plan._replace(stray="")  # once
            name = f"stranger-{request_id}" if plan.stranger else request_id
            for rank in range(self._ledger.ranks):
                self._plan(Due(plan.stray, name), rank, 0)

    def _load(self, request: str, plan: Plan, blocks: Sequence[int]) -> None:
        """Let each rank report the load, unless it ends within its step, and how it has failed there."""
        bad = frozenset(blocks[min(plan.good_blocks, len(blocks) - 1) :]) if plan.fails == "blocks" else frozenset()
        for rank, after in enumerate(plan.received):
            fails = plan.fails if rank in plan.fails_on else ""
            kind = "holes" if not plan.is_async else "failure" if fails == "whole" else "load"
            self._plan(Due(kind, request, bad if fails else frozenset()), rank, after if plan.is_async else 0)
            if after is not None and plan.again and plan.is_async:
                self._plan(Due(kind, request), rank, after + plan.again)

    def build_connector_meta(self, scheduler_output: Any) -> SoakMetadata:
        if self._index == 0:
            self._ledger.scheduled(self._step)
        self._step += 1
        return SoakMetadata(self._step - 1)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        plan = self._live.pop(request.request_id).plan
        self._ledger.finished(request.request_id, self._index, promises=plan.promises)
        for rank, after in enumerate(plan.saved):
            self._plan(Due("save", request.request_id), rank, after)
        return plan.promises, None

    def _plan(self, due: Due, rank: int, after: int | None) -> None:
        """Let a rank report this after so many steps, if at all."""
        if after is not None:
            self.script.agendas[rank].add(self._step + after, due)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._index == 0:
            self._ledger.take_in()

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta: Any = self._get_connector_metadata()
        self._step = meta.step

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        for due in self.script.agendas[self.rank].take(math.inf if self._ledger.is_over else self._step):
            if due.kind == "save":
                results.finished_sending.add(due.request)
                continue
            if due.bad_blocks:
                self._holes[due.request] = due.bad_blocks
            if due.kind != "holes":
                results.finished_recving.add(due.request)
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


class ForgetfulChild(SteeredChild):
    """Does what each request's plan says on a server, and keeps no copies of blocks, so that its memory stays flat."""

    def _blocks_to_save(self, tracked: Any) -> list[tuple[int, str]]:
        return []
