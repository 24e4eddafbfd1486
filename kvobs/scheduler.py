"""The scheduler's side of the routing: who loads a request, who saves it, and what vLLM hears of the workers' reports.

One instance lives in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvobs.children import Child
from kvobs.config import Options
from kvobs.fanout import call_all
from kvobs.ledger import Foreign, Kind, Ledger
from kvobs.metadata import (
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
)
from kvobs.offers import Offers
from kvobs.outcomes import Outcomes
from kvobs.recorder import Recorder
from kvobs.stats import MultiKVConnectorStats, class_path, collect

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class SchedulerSide:
    """Routes the scheduler's hooks.

    Args:
        children: the children's scheduler-side connectors.
        options: kvobs's options.
        world_size: the number of workers whose report completes a load or save, unless a child states its own.
        block_sizes: tokens per block of each KV cache group.
    """

    def __init__(
        self, children: Sequence[Child], options: Options, world_size: int, block_sizes: Sequence[int]
    ) -> None:
        self.children = children
        self.ledger = Ledger()
        self.recorder = Recorder(len(children))
        self._offers = Offers(children, options, self.recorder)
        self._outcomes = Outcomes(children, self.recorder)
        self._world_size = world_size
        self._block_sizes = block_sizes
        self._classes = {child.name: class_path(type(child.connector)) for child in children}
        self._orders: dict[str, LoadOrder] = {}
        self._closed: list[str] = []
        self._early: dict[int, set[str]] = {}  # saves that were done before vLLM heard of the promise

    # Lookup and allocation

    def on_new_request(self, request: Request) -> None:
        self.ledger.arrive(request.request_id)
        for child in self.children:
            child.connector.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask the children by the load policy; nothing is fixed until vLLM allocates."""
        best = self._offers.ask(request, num_computed_tokens)
        if best is None:
            self.ledger.propose(request.request_id, None)
            return None, False
        self.ledger.propose(request.request_id, (best.child, best.is_async) if best.tokens else None)
        return best.tokens, best.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Fix the owner if vLLM allocated tokens for it; every child gets the real blocks, the others 0 tokens."""
        request_id = request.request_id
        choice = self.ledger.choice(request_id) if num_external_tokens > 0 else None
        load = self.ledger.admit(
            request_id, num_external_tokens, self._reports_expected(choice), time.perf_counter_ns()
        )
        owner = load.child if load is not None else None
        local = self._offers.settle(request_id, owner, num_external_tokens)
        if load is not None:
            if not load.is_async:
                load.expected = self._world_size  # every worker says so itself when the step is over
            self._orders[request_id] = LoadOrder(
                load.child,
                load.is_async,
                loaded_blocks(blocks.get_block_ids(), self._block_sizes, local, num_external_tokens),
            )
        for child in self.children:
            child.connector.update_state_after_alloc(
                request, blocks, num_external_tokens if child.index == owner else 0
            )

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Answer for the child that loads; it is chosen, and not always allocated yet, when vLLM asks."""
        choice = self.ledger.choice(request.request_id)
        child = self.children[choice if choice is not None else 0]
        groups: tuple[int, ...] = child.connector.get_loaded_kv_cache_group_ids(request)
        return groups

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        owner = self.ledger.owner(request.request_id)
        child = self.children[owner if owner is not None else 0]
        sources: dict[Any, int] = child.connector.get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    # The step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        orders, self._orders = self._orders, {}
        closed, self._closed = tuple(self._closed), []
        return MultiKVConnectorMetadata(
            metadata=tuple(child.connector.build_connector_meta(scheduler_output) for child in self.children),
            loads=orders,
            closed=closed,
            failed=self.ledger.take_failures(),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite what vLLM is about to read from ``connector_output``."""
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and not isinstance(meta, MultiKVConnectorWorkerMetadata):
            raise TypeError(f"worker metadata of another connector reached kvobs: {type(meta).__name__}")
        failed_syncs = self._hear(meta)
        for request_id in connector_output.finished_recving or ():
            self.ledger.echoed(request_id)  # kvobs's workers report nothing but failures there
        for child in self.children:
            self._update_child(child, connector_output, meta)
        connector_output.finished_recving = self.ledger.take_received() or None
        connector_output.finished_sending = self.ledger.take_sent() or None
        for index in failed_syncs:
            self._outcomes.sync_load_failed(index)

    def _hear(self, meta: MultiKVConnectorWorkerMetadata | None) -> set[int]:
        """Take in the reports; return the children of which a synchronous load has failed."""
        failed_syncs: set[int] = set()
        for report in meta.reports if meta is not None else ():
            foreign = self.ledger.hear(report)
            if foreign is not None:
                self._outcomes.foreign(foreign)
            if report.kind is Kind.SYNC_FAILED:
                failed_syncs.add(report.child)
        return failed_syncs

    def _update_child(
        self, child: Child, output: KVConnectorOutput, meta: MultiKVConnectorWorkerMetadata | None
    ) -> None:
        """Hand a child its own part of the output, and close what is in unless the child withdraws it."""
        loads_in = self.ledger.take_loads_in(child.index)
        saves_in = set(self.ledger.take_saves_in(child.index))
        early = self._early.pop(child.index, set())
        view = copy.copy(output)
        view.kv_connector_worker_meta = meta.metadata[child.index] if meta is not None else None
        events = output.kv_cache_events
        view.kv_cache_events = events.by_child.get(child.index) if isinstance(events, MultiKVEvents) else None
        # A sync load ends with its step: alone under vLLM, its child would never see it among the received.
        view.finished_recving = {r for r in loads_in if self.ledger.is_async(r)} or None
        view.finished_sending = saves_in | early or None
        if hasattr(view, "failed_recving"):
            view.failed_recving = {r for r in output.failed_recving if r in loads_in}
        child.connector.update_connector_output(view)
        for request_id in loads_in:
            load = self.ledger.close_load(request_id)
            if load is not None:
                self._closed.append(request_id)
                self._outcomes.loaded(load)
        # A child may withdraw a save here, or complete one that was never reported (MoRIIO does both).
        for request_id in (view.finished_sending or set()) - early:
            if self.ledger.close_save(request_id, child.index) is not None:
                self._outcomes.saved(child.index)
            else:
                self._outcomes.foreign(Foreign(child.index, "save", request_id))

    # The end of a request

    def register_finished_partial_tail(self, request: Request, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Register the tail with every child; one that accepts has promised a save."""
        for child in self.children:
            if child.connector.register_finished_partial_tail(request, block_ids, partial_tail_offloads):
                self.ledger.accept_tail(request.request_id, child.index)
        return bool(self.ledger.tails(request.request_id))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell every child; hold the blocks while a promise is open; merge what the children hand to the client."""
        request_id = request.request_id
        promised = set(self.ledger.tails(request_id))
        merged: dict[str, Any] | None = None
        owners: dict[str, str] = {}
        for child in self.children:
            promises, params = self._finish_child(child, request, block_ids)
            if promises:
                promised.add(child.index)
            if params is not None:
                self._refuse_clash(owners, child, params)
                owners.update(dict.fromkeys(params, child.name))
                merged = {**(merged or {}), **params}
        finished = self.ledger.finish(
            request_id,
            [(index, self._reports_expected(index)) for index in sorted(promised)],
            time.perf_counter_ns(),
        )
        self._offers.forget(request_id)
        if finished.aborted is not None:
            self._outcomes.aborted(finished.aborted)
        for index in finished.early:
            self._early.setdefault(index, set()).add(request_id)
            self._outcomes.saved(index)
        for foreign in finished.foreign:
            self._outcomes.foreign(foreign)
        return finished.holds, merged

    @staticmethod
    def _finish_child(
        child: Child, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Call the one of the two hooks that vLLM would call if this child were alone."""
        finish: Callable[..., tuple[bool, dict[str, Any] | None]]
        if child.supports_hma:
            finish = child.connector.request_finished_all_groups
            return finish(request, block_ids)
        if len(block_ids) != 1:
            raise ValueError(
                f"connector {child.name!r} supports one KV cache group, and request {request.request_id} has "
                f"{len(block_ids)}: start vLLM with --disable-hybrid-kv-cache-manager"
            )
        finish = child.connector.request_finished
        return finish(request, block_ids[0])

    @staticmethod
    def _refuse_clash(owners: dict[str, str], child: Child, params: dict[str, Any]) -> None:
        clashes = sorted(set(owners) & set(params))
        if clashes:
            listed = ", ".join(f"{key!r} (from {owners[key]!r} and {child.name!r})" for key in clashes)
            raise RuntimeError(
                f"two connectors return the same key of kv_transfer_params: {listed}. A client could not tell them "
                "apart; keep one of them"
            )

    # Once

    def get_finished_count(self) -> int | None:
        """Return None: the reports are counted here, per child and rank, whatever number each child states."""
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata_pp_aware", metadata)

    def _hand_back(self, hook: str, metadata: dict[Any, Any]) -> None:
        """Give each child the handshakes that its own workers sent, and nobody else's."""
        for part in metadata.values():
            if not isinstance(part, MultiHandshakeMetadata):
                raise TypeError(f"handshake metadata of another connector reached kvobs: {type(part).__name__}")
        for child in self.children:
            own = MultiHandshakeMetadata.of_child(metadata, child.index)
            if own:
                getattr(child.connector, hook)(own)

    def reset_cache(self) -> bool:
        """Reset every child's cache, also after one said no or raised; return whether all did not say no."""
        return all(answer is not False for answer in call_all("reset_cache", self.children))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        return collect(
            {child.name: child.connector.get_kv_connector_stats() for child in self.children},
            self._classes,
            self.recorder.take(),
        )

    # Helpers

    def _reports_expected(self, child: int | None) -> int:
        if child is None:
            return self._world_size
        return self.children[child].connector.get_finished_count() or self._world_size


def loaded_blocks(
    block_ids: Sequence[Sequence[int]], block_sizes: Sequence[int], local: int, external: int
) -> tuple[tuple[int, ...], ...]:
    """Return, per KV cache group, the ids of the blocks that hold tokens ``local`` to ``local + external``.

    Id 0 is vLLM's null block, which many requests share: it is left out.
    """
    loaded = []
    for group, ids in enumerate(block_ids):
        size = block_sizes[group] if group < len(block_sizes) else 0
        part = ids[local // size : -(-(local + external) // size)] if size else ids
        loaded.append(tuple(i for i in part if i != 0))
    return tuple(loaded)
