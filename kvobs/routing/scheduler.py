"""Route on the scheduler's side: choose who loads a request and who saves it, and report completions to vLLM.

There is one instance, in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request, RequestStatus

from kvobs.clock import wall_ns
from kvobs.connectors.fanout import call_all
from kvobs.connectors.sub_connector import SubConnector
from kvobs.routing.completions import Completions
from kvobs.routing.hook_targets import HookTargets
from kvobs.routing.lookups import Lookups
from kvobs.routing.metadata import (
    IsolatingMetadata,
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    NextOrders,
)
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.events import Annotator, Observer, Params
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import LookupResult

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

BlockIds = tuple[list[int], ...]  # per KV cache group


class EngineFacts(NamedTuple):
    """The properties of an engine that routing depends on."""

    layout: CacheLayout
    reporting: int  # how many workers report to this scheduler, unless a connector states its own number
    all_support_hma: bool  # whether every connector supports several KV cache groups


class StatsPath(Protocol):
    """Carries the stats of the connectors on this side to vLLM."""

    def collect(self) -> KVConnectorStats | None:
        """Return the stats of this side at the end of a step."""


@dataclass(eq=False, kw_only=True)
class SchedulerSide:
    """Routes the scheduler's hooks."""

    connectors: Sequence[SubConnector]
    ledger: Ledger
    lookups: Lookups
    targets: HookTargets
    completions: Completions
    next_orders: NextOrders
    facts: EngineFacts
    observer: Observer
    annotator: Annotator
    stats: StatsPath

    def __post_init__(self) -> None:
        self._finished_counts: list[int | None] = [None] * len(self.connectors)
        self.observer.laid_out(self.facts.layout)
        self._isolated = frozenset([connector.index for connector in self.connectors if connector.gate is not None])

    # Lookup and allocation

    def on_new_request(self, request: Request) -> None:
        self.ledger.arrive(request.request_id)
        for connector in self.targets.arrive(request.request_id):
            connector.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look the request up in the connectors by the load policy; the owner is set when vLLM allocates."""
        began = wall_ns() if self.observer.wants_lookups else 0
        if self.targets.may_hide:
            self.targets.looks_up(request.request_id)
        best = self.lookups.look_up(request, num_computed_tokens)
        if began:
            self.observer.looked_up(request, began, wall_ns())
        if best is None:
            return None, False  # vLLM loads nothing before a lookup that has ended
        self.ledger.propose(request.request_id, (best.connector_index, best.is_async) if best.tokens else None)
        return best.tokens, best.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Set the owner if vLLM allocated tokens for it; every connector gets the real blocks, the others 0 tokens."""
        request_id, tokens = request.request_id, num_external_tokens
        candidate = self.ledger.candidate(request_id) if tokens > 0 else None
        owner, is_async = candidate if candidate is not None else (None, False)
        if not is_async:
            self.lookups.lift_bans(request_id)
        lookup = self.lookups.resolve(request_id)
        self.observer.allocated(request, lookup, owner, tokens)
        self._admit(request, blocks, tokens, lookup, owner, is_async=is_async)
        connectors: Iterable[SubConnector] = self.connectors
        if self.targets.may_hide:
            connectors = self.targets.allocate(request, blocks, lookup.local, lookup.left_open)
        for connector in connectors:
            connector.update_state_after_alloc(request, blocks, tokens if connector.index == owner else 0)

    def _admit(
        self,
        request: Request,
        blocks: KVCacheBlocks,
        tokens: int,
        lookup: LookupResult,
        owner: int | None,
        *,
        is_async: bool,
    ) -> None:
        """Open and order a load of ``tokens``, if they have an owner, behind those in vLLM's own cache."""
        layout, local = self.facts.layout, lookup.local
        filled = layout.loaded(blocks.get_block_ids(), local, tokens) if owner is not None else ()
        load = self.ledger.admit(
            request.request_id,
            tokens,
            # Every worker reports the end of a synchronous load, after the step.
            self._reports_expected(owner if is_async else None),
            wall_ns(),
            blocks=filled,
            size=layout.bytes_of(filled),
            local_tokens=local,
            rest_tokens=request.num_tokens - local - tokens,
        )
        if load is not None:
            self.observer.admitted(request.request_id, load)
            order = LoadOrder(
                load.connector_index, load.is_async, load.blocks, self.annotator.of_load(request.request_id)
            )
            if self._isolated:
                others = [
                    offer.connector_index for offer in lookup.offers if offer.tokens and offer.connector_index != owner
                ]
                order = order._replace(hit_by=tuple(self._isolated.intersection(others)))
            self.next_orders.orders.loads[request.request_id] = order

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Any:
        """Return the answer of the chosen connector; vLLM may ask before it allocates."""
        return self.connectors[self.ledger.choice(request.request_id) or 0].get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        if (choice := self.ledger.choice(request.request_id)) is None:
            first = self.connectors[0].wrapped
            return KVConnectorBase_V1.get_external_cache_hit_sources(first, request, num_external_tokens)
        sources = self.connectors[choice].get_external_cache_hit_sources(request, num_external_tokens)
        self.observer.sourced(choice, num_external_tokens, sources)
        return sources

    def can_load_prefix_replay_checkpoint(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of the connector that would load the request; vLLM asks before it allocates."""
        return self._by_choice("can_load_prefix_replay_checkpoint", request, *args, **kwargs)

    def consume_prefix_replay_checkpoint(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of the connector that has loaded the request."""
        return self._by_choice("consume_prefix_replay_checkpoint", request, *args, **kwargs)

    def _by_choice(self, hook: str, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the chosen connector; without one, return the answer of vLLM's base class."""
        if (choice := self.ledger.choice(request.request_id)) is None:
            return getattr(KVConnectorBase_V1, hook)(self.connectors[0].wrapped, request, *args, **kwargs)
        return getattr(self.connectors[choice], hook)(request, *args, **kwargs)

    # The step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        targets, may_hide = self.targets, self.targets.may_hide
        if may_hide:
            targets.begin_step(scheduler_output)
        orders, has_sync_loads = None, False
        gave_up = may_hide and self.ledger.has_ended
        if self.next_orders.made is not None or self.ledger.failures or gave_up:
            orders = self.next_orders.take(self.ledger)
            orders.wants_output = gave_up
            has_sync_loads = orders.has_sync_loads
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        note = self.annotator.of_step(scheduler_output, has_forward=has_forward, has_sync_loads=has_sync_loads)
        metadata: list[Any] = []
        for connector in self.connectors:
            if may_hide:
                metadata.append(targets.build(connector, scheduler_output))
            else:
                metadata.append(connector.build_connector_meta(scheduler_output))
        step = (IsolatingMetadata if may_hide else MultiKVConnectorMetadata)(tuple(metadata))
        if orders is not None:
            step.orders = orders
            if has_sync_loads and may_hide:
                orders.unmade = targets.unmade(orders)
        if not has_forward:
            step.has_forward = False
        if note is not None:
            step.note = note
        if may_hide:
            step.isolated = targets.isolated(scheduler_output.finished_req_ids)
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite ``connector_output`` before vLLM reads it."""
        self.completions.take_in(connector_output)
        if self.ledger.incomplete.recent:
            self.observer.awaiting_ranks()

    # The end of a request

    def register_finished_partial_tail(self, request: Request, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Offer the partial tail to every connector; one that accepts it has promised a save."""
        for connector in self.targets.savers(request.request_id):
            if connector.register_finished_partial_tail(request, block_ids, partial_tail_offloads):
                self.ledger.accept_tail(request.request_id, connector.index)
        return bool(self.ledger.tails(request.request_id))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, Params | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: BlockIds) -> tuple[bool, Params | None]:
        """Report the end to every connector; hold blocks while a promised save is open; merge the client's params."""
        request_id = request.request_id
        known_to, all_support_hma = self.targets.of(request_id), self.facts.all_support_hma
        promised, params = finish_all(known_to, request, block_ids, all_support_hma=all_support_hma)
        promised = promised | self.ledger.tails(request_id)
        promises = [(index, self._reports_expected(index)) for index in sorted(promised)]
        finished = self.ledger.finish(request_id, promises, wall_ns(), request.num_computed_tokens)
        if finished.promised:
            self.next_orders.orders.promised += [(index, request_id) for index in finished.promised]
        if finished.promised or finished.early:
            self.observer.promised(request_id, finished.promised, finished.early)
        if finished.aborted is not None:
            self.next_orders.orders.orphaned.append(request_id)
            is_error = request.status is RequestStatus.FINISHED_ERROR
            self.observer.aborted(request_id, finished.aborted, by_error=is_error)
        if finished.early and not finished.holds:
            self.completions.early.add(request_id)
        for unexpected in finished.unexpected:
            self.observer.unexpected(unexpected)
        params = self.annotator.of_client(request, params) or params
        self.lookups.discard(request_id)
        self.targets.forget(request_id)
        self.observer.request_ended(request)
        return finished.holds, params

    # Once

    def get_finished_count(self) -> int | None:
        """Return None, since reports are counted here by connector and rank; keep the number that each states."""
        self._finished_counts = [connector.get_finished_count() for connector in self.connectors]
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata_pp_aware", metadata)

    def _hand_back(self, hook: str, metadata: dict[Any, Any]) -> None:
        """Give each connector the handshakes of its workers only; isolate those that failed at a worker's start."""
        for part in metadata.values():
            if not isinstance(part, MultiHandshakeMetadata):
                raise TypeError(f"handshake metadata of another connector reached kvobs: {type(part).__name__}")
            # Before the first lookup, which may wait for an answer of the worker's side, forever.
            self.targets.isolation.record_failures(part.broken)
        if by_rank := [part.block_bytes for part in metadata.values() if part.block_bytes]:
            layout = self.facts.layout.measured(by_rank, self.completions.ranks)
            self.facts = self.facts._replace(layout=layout)
            self.observer.laid_out(layout)
        for connector in self.connectors:
            own = {rank: part.metadata[connector.index] for rank, part in metadata.items()}
            getattr(connector, hook)({rank: part for rank, part in own.items() if part is not None})

    def reset_cache(self) -> bool:
        """Reset every connector's cache, even if one refuses or raises; return whether none refused."""
        return all(answer is not False for answer in call_all("reset_cache", self.connectors))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.stats.collect()

    def _reports_expected(self, index: int | None) -> int:
        # At most the ranks that there are: vLLM ignores the number with one worker, and waits for ever with several.
        stated = self._finished_counts[index] if index is not None else None
        return min(stated or self.facts.reporting, self.facts.reporting)


def finish_all(
    connectors: Sequence[SubConnector], request: Request, block_ids: BlockIds, *, all_support_hma: bool
) -> tuple[set[int], Params | None]:
    """Report the end of the request to every connector; return which ones promise a save, and the merged params.

    As in vLLM, the same one of two hooks is called for all connectors, chosen by ``all_support_hma``.

    Raises:
        RuntimeError: two connectors return the same key; names both and the key.
        ValueError: the request has several KV cache groups, but a connector supports only one.
    """
    if not all_support_hma and len(block_ids) != 1:
        raise ValueError(
            f"not every connector supports more than one KV cache group, and request {request.request_id} has "
            f"{len(block_ids)}: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    promised: set[int] = set()
    merged: Params | None = None
    owners: dict[str, str] = {}
    for connector in connectors:
        if all_support_hma:
            promises, params = connector.request_finished_all_groups(request, block_ids)
        else:
            promises, params = connector.request_finished(request, block_ids[0])
        if promises:
            promised.add(connector.index)
        if params is not None:
            if clashes := sorted(owners.keys() & params):
                listed = ", ".join(f"{key!r} (from {owners[key]!r} and {connector.name!r})" for key in clashes)
                raise RuntimeError(
                    f"two connectors return the same key of kv_transfer_params: {listed}. A client can't distinguish "
                    "them; configure only one of them"
                )
            owners.update(dict.fromkeys(params, connector.name))
            merged = {**(merged or {}), **params}
    return promised, merged
