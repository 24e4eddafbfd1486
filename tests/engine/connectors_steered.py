"""A connector connector whose loads, saves, delays, failures and lies each request steers (see ``steering``).

What it saves is real: its workers keep a copy of every full prompt block, so that a load of "stored" tokens gives the
same output as computing them. Blocks that were never saved are left as they are. One KV cache group only.

Options in ``kv_connector_extra_config``: ``tag`` (default "steered"), ``plan`` (orders for every request),
``finished_count`` (answer of ``get_finished_count``), ``journal`` (file that gets a JSON line per event).
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from .connectors_stats import IdleConnector
from .steering import Agenda, Due, Plan, at_rank, block_keys, plan_for

Copies = tuple[tuple[int, str | None], ...]
"""(block id, key of its content) pairs; no key for a block whose content no store can have."""


class Load(NamedTuple):
    """One admitted load, for the workers."""

    request: str
    plan: Plan
    blocks: Copies


@dataclass
class SteeredMetadata(KVConnectorMetadata):
    """What the workers are to do in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[tuple[int, str]] = field(default_factory=list)
    promises: list[tuple[str, Plan]] = field(default_factory=list)
    stray: list[tuple[str, Plan]] = field(default_factory=list)
    raising: list[Plan] = field(default_factory=list)
    sleeping: list[Plan] = field(default_factory=list)


@dataclass
class Tracked:
    """What the scheduler's side knows of a live request."""

    plan: Plan
    keys: list[str]
    first_lookup: float | None = None
    lookups: int = 0
    loads: int = 0
    local_tokens: int = 0
    told_stray: bool = False
    has_run: bool = False
    blocks: list[int] = field(default_factory=list)
    saved_blocks: int = 0


class SteeredConnector(IdleConnector):
    """Does what each request's plan says."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        self._tag: str = option("tag", "steered")
        self._defaults: dict[str, Any] = option("plan", {})
        self._finished_count: int | None = option("finished_count", None)
        self._journal: str | None = option("journal", None)
        self._block_size: int = vllm_config.cache_config.block_size
        self._rank: int = vllm_config.parallel_config.rank
        # Scheduler's side
        self._requests: dict[str, Tracked] = {}
        self._stored: set[str] = set()
        self._next = SteeredMetadata()
        # Worker's side
        self._caches: list[Any] = []
        self._copies: dict[str, list[Any]] = {}
        self._agenda = Agenda()
        self._bad_blocks: set[int] = set()

    # Scheduler

    def get_finished_count(self) -> int | None:
        return self._finished_count

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        self._raise_if("get_num_new_matched_tokens", (tracked.plan,))
        self._sleep_if("get_num_new_matched_tokens", (tracked.plan,))
        now = time.monotonic()
        tracked.lookups += 1
        tracked.first_lookup = tracked.first_lookup or now
        waited_ms = (now - tracked.first_lookup) * 1000
        if tracked.lookups <= tracked.plan.not_yet or waited_ms < tracked.plan.not_yet_ms:
            return None, False
        tracked.local_tokens = num_computed_tokens
        offer = self._offer(request, tracked, num_computed_tokens) if tracked.loads < tracked.plan.offers else 0
        self._note("lookup", request.request_id, tokens=offer)
        return offer, tracked.plan.is_async and offer > 0

    def _offer(self, request: Any, tracked: Tracked, computed: int) -> int:
        if tracked.plan.offer == "stored":
            held = next((i for i, key in enumerate(tracked.keys) if key not in self._stored), len(tracked.keys))
            end = held * self._block_size
        else:
            end = computed + int(tracked.plan.offer)
        # One token at least is left to compute: a synchronous load of all of them would leave nothing to schedule.
        last_full_block = (request.num_tokens - 1) // self._block_size * self._block_size
        return max(0, min(end, last_full_block) - computed)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracked = self._track(request)
        self._note("alloc", request.request_id, tokens=num_external_tokens)
        self._raise_if("update_state_after_alloc", (tracked.plan,))
        if num_external_tokens > 0:
            tracked.loads += 1
            ids = blocks.get_block_ids()[0]
            first = tracked.local_tokens // self._block_size
            end = -(-(tracked.local_tokens + num_external_tokens) // self._block_size)
            keys: Sequence[str | None] = [*tracked.keys, *[None] * (end - len(tracked.keys))]
            self._next.loads.append(
                Load(request.request_id, tracked.plan, tuple((ids[i], keys[i]) for i in range(first, end)))
            )
        elif tracked.plan.stray and not tracked.told_stray:
            tracked.told_stray = True
            self._next.stray.append((request.request_id, tracked.plan))

    def build_connector_meta(self, scheduler_output: Any) -> SteeredMetadata:
        meta, self._next = self._next, SteeredMetadata()
        running = self._follow(scheduler_output)
        for tracked in running:
            meta.saves += self._blocks_to_save(tracked)
            if tracked.plan.sleep_in and not tracked.has_run:
                meta.sleeping.append(tracked.plan)
            tracked.has_run = True
        plans = [tracked.plan for tracked in running]
        plans += [load.plan for load in meta.loads] + [plan for _, plan in (*meta.promises, *meta.stray)]
        meta.raising = [plan for plan in plans if plan.raise_in]
        self._raise_if("build_connector_meta", meta.raising)
        return meta

    def _follow(self, scheduler_output: Any) -> list[Tracked]:
        """Bring the block lists up to date and return the requests that run in this step."""
        running = []
        cached = scheduler_output.scheduled_cached_reqs
        new_requests = scheduler_output.scheduled_new_reqs
        steps = [(new.req_id, new.block_ids, new.num_computed_tokens, True) for new in new_requests]
        steps += [
            (request, new_blocks, computed, request in cached.resumed_req_ids)
            for request, new_blocks, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        for request, block_ids, computed, all_anew in steps:
            tracked = self._requests[request]
            new = list(block_ids[0]) if block_ids else []
            tracked.blocks = new if all_anew else tracked.blocks + new
            done = computed + scheduler_output.num_scheduled_tokens[request]
            tracked.saved_blocks = min(done // self._block_size, len(tracked.keys))
            running.append(tracked)
        return running

    def _blocks_to_save(self, tracked: Tracked) -> list[tuple[int, str]]:
        full = zip(tracked.blocks[: tracked.saved_blocks], tracked.keys[: tracked.saved_blocks], strict=True)
        fresh = [(block, key) for block, key in full if key not in self._stored]
        self._stored.update(key for _, key in fresh)
        return fresh

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        plan = self._track(request).plan
        del self._requests[request.request_id]
        self._note("finished", request.request_id, promise=plan.promise)
        self._raise_if("request_finished", (plan,))
        self._sleep_if("request_finished", (plan,))
        if plan.promise:
            self._next.promises.append((request.request_id, plan))
        return plan.promise, dict(plan.params) if plan.params is not None else None

    def update_connector_output(self, connector_output: Any) -> None:
        for kind in ("finished_recving", "finished_sending"):
            for request in getattr(connector_output, kind) or ():
                self._note(kind, request)

    def reset_cache(self) -> bool:
        self._stored.clear()
        return True

    def _track(self, request: Any) -> Tracked:
        if request.request_id not in self._requests:
            plan = plan_for(self._tag, self._defaults, request.kv_transfer_params)
            keys = block_keys(request.prompt_token_ids or [], self._block_size)
            self._requests[request.request_id] = Tracked(plan, keys)
        return self._requests[request.request_id]

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        num_blocks = self._kv_cache_config.num_blocks
        for layer, cache in kv_caches.items():
            if num_blocks not in cache.shape[:2]:
                raise ValueError(f"{layer}'s cache has shape {tuple(cache.shape)}: where are its {num_blocks} blocks?")
            # Blocks first; where keys and values come before them, the view below puts blocks first again.
            self._caches.append(cache if cache.shape[0] == num_blocks else cache.transpose(0, 1))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._orders()
        self._raise_if("start_load_kv", meta.raising)
        self._sleep_if("start_load_kv", meta.sleeping)
        now = time.monotonic()
        for load in meta.loads:
            failed = load.plan.fails_on(self._rank)
            if not failed:
                self._restore(load.blocks)
            bad = frozenset(block for block, _ in load.blocks) if failed and load.plan.fail == "blocks" else frozenset()
            self._note("load", load.request, failed=failed)
            if not load.plan.is_async:
                self._bad_blocks |= bad
            elif (delay := at_rank(load.plan.load_ms, self._rank)) is not None:
                kind = "failure" if failed and load.plan.fail == "recv" else "load"
                self._agenda.add(now + delay, Due(kind, load.request, bad))
        for request, plan in meta.stray:
            if (delay := at_rank(plan.stray_ms, self._rank)) is not None:
                self._agenda.add(now + delay, Due(str(plan.stray), request))
        for request, plan in meta.promises:
            if (delay := at_rank(plan.save_ms, self._rank)) is not None:
                self._agenda.add(now + delay, Due("save", request))

    def wait_for_save(self) -> None:
        meta = self._orders()
        self._raise_if("wait_for_save", meta.raising)
        self._sleep_if("wait_for_save", meta.sleeping)
        for block, key in meta.saves:
            self._copies[key] = [cache[block].clone() for cache in self._caches]

    def _restore(self, blocks: Copies) -> None:
        for block, key in blocks:
            for cache, copy in zip(self._caches, self._copies.get(key or "", ()), strict=False):
                cache[block].copy_(copy)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._raise_if("get_transfer_results", self._orders().raising)
        results = KVConnectorTransferResults()
        for due in self._agenda.take(time.monotonic()):
            self._note(f"report {due.kind}", due.request)
            if due.kind == "save":
                results.finished_sending.add(due.request)
                continue
            results.finished_recving.add(due.request)
            self._bad_blocks |= due.bad_blocks
            if due.kind == "failure":
                results.failed_recving.add(due.request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def _orders(self) -> SteeredMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, SteeredMetadata), f"metadata of another connector: {meta!r}"
        return meta

    # Both

    def _raise_if(self, hook: str, plans: Sequence[Plan]) -> None:
        on_worker = self.role is KVConnectorRole.WORKER
        for plan in plans:
            if plan.raise_in == hook and not (on_worker and plan.raise_ranks and self._rank not in plan.raise_ranks):
                raise RuntimeError(f"steered to raise in {hook} ({self._tag})")

    def _sleep_if(self, hook: str, plans: Sequence[Plan]) -> None:
        for plan in plans:
            if plan.sleep_in == hook:
                time.sleep(at_rank(plan.sleep_ms, self._rank) or 0)

    def _note(self, event: str, request: str, **details: Any) -> None:
        if self._journal is None:
            return
        who = {"tag": self._tag, "role": self.role.name, "rank": self._rank}
        line = json.dumps({"time": time.time(), **who, "event": event, "request": request, **details})
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(line + os.linesep)
