"""Route on the scheduler's side: choose who loads a request and who saves it, and report completions to vLLM.

There is one instance, in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request, RequestStatus

from kvobs.children.child import Child
from kvobs.children.collector import Collector, FlushRule, Sink, divert
from kvobs.children.fanout import call_all
from kvobs.clock import wall_ns
from kvobs.faults import contain, contained
from kvobs.routing.completions import Completions
from kvobs.routing.gains import Gains
from kvobs.routing.isolation import Isolation
from kvobs.routing.lookups import Offers, OpenLookups
from kvobs.routing.metadata import (
    Isolated,
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    NextOrders,
    Orders,
)
from kvobs.routing.outcomes import OpenTransfers
from kvobs.routing.reuse import PromptReuse
from kvobs.routing.visibility import Visibility, write_back
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListener
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, has_content
from kvobs.telemetry.timeline.black_box import STEPS

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from kvobs.telemetry.requests.request_reports import Reports
    from kvobs.telemetry.requests.request_traces import Traces

Params = dict[str, Any]  # kv_transfer_params for the client
BlockIds = tuple[list[int], ...]  # per KV cache group


@dataclass(eq=False, kw_only=True)
class SchedulerSide:
    """Routes the scheduler's hooks."""

    children: Sequence[Child]
    ledger: Ledger
    visibility: Sequence[Visibility]
    isolation: Isolation
    offers: Offers
    open_lookups: OpenLookups
    completions: Completions
    next_orders: NextOrders
    listener: TransferListener  # receives the events of requests and transfers
    gains: Gains  # learns from the steps what computing costs
    reuse: PromptReuse  # records how far back prompts were used last
    open_transfers: OpenTransfers
    traces: Traces | None
    reports: Reports | None
    collector: Collector
    flush_rule: FlushRule
    feed: Sink | None  # takes kvobs's own numbers to the exporter, if there is one
    box: memoryview[int]  # the words of this process's black box
    layout: CacheLayout
    reporting: int  # how many workers report to this scheduler, unless a child states its own number
    all_support_hma: bool  # whether every child supports several KV cache groups
    may_hide: bool  # whether children may not see some requests: otherwise a step need not look for these

    def __post_init__(self) -> None:
        self._flush_is_due = False
        self._finished_counts: list[int | None] = [None] * len(self.children)

    # Lookup and allocation

    def on_new_request(self, request: Request) -> None:
        self.ledger.arrive(request.request_id)
        self.isolation.arrive(request.request_id)
        for child in self.children:
            if request.request_id not in self.visibility[child.index].hidden:
                child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look the request up in the children by the load policy; the owner is set when vLLM allocates."""
        began = wall_ns() if self.listener.wants_lookups else 0
        if self.may_hide:
            self.open_lookups.forget(request.request_id)  # vLLM repeats the lookup
        best = self.offers.ask(request, num_computed_tokens)
        if began:
            self.listener.looked_up(request, began, wall_ns())
        if best is None:
            return None, False  # vLLM loads nothing before a lookup that has ended
        self.ledger.propose(request.request_id, (best.child, best.is_async) if best.tokens else None)
        return best.tokens, best.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Set the owner if vLLM allocated tokens for it; every child gets the real blocks, the others 0 tokens."""
        request_id, tokens = request.request_id, num_external_tokens
        candidate = self.ledger.candidate(request_id) if tokens > 0 else None
        owner, is_async = candidate if candidate is not None else (None, False)
        if not is_async:
            self.offers.lift_bans(request_id)
        offers, local, decision, left_open, _ = self.offers.settle(request_id, owner, tokens)
        if decision is not None:
            self.listener.decided(request_id, decision)
        seen = self.reuse.allocated(request)
        if seen is not None and self.reports is not None:
            self.reports.reused(request_id, seen)
        self.listener.allocated(request_id, [offer[:2] for offer in offers], local, owner, tokens)
        load = self.ledger.admit(
            request_id,
            tokens,
            # Every worker reports the end of a synchronous load, after the step.
            self._reports_expected(owner if is_async else None),
            wall_ns(),
            blocks=self.layout.loaded(blocks.get_block_ids(), local, tokens) if owner is not None else (),
            size=round(tokens * self.layout.bytes_per_token),
            local_tokens=local,
            rest_tokens=request.num_tokens - local - tokens,
        )
        if load is not None:
            self.listener.admitted(request_id, load)
            trace = self.traces.of_load(request_id) if self.traces is not None else None
            self.next_orders.orders.loads[request_id] = LoadOrder(load.child, is_async, load.blocks, trace)
        self.open_lookups.leave_open(request, blocks, local, left_open)
        for child in self.children:
            is_shown = self.visibility[child.index].allocates(request_id)
            if is_shown and not self.open_lookups.has(child.index, request_id):
                self.isolation.allocated(child.index, request_id)
                child.update_state_after_alloc(request, blocks, tokens if child.index == owner else 0)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> Any:
        """Return the answer of the chosen child; vLLM may ask before it allocates."""
        return self.children[self.ledger.choice(request.request_id) or 0].get_loaded_kv_cache_group_ids(request)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> Any:
        choice = self.ledger.choice(request.request_id)
        if choice is None:
            first = self.children[0].connector
            return KVConnectorBase_V1.get_external_cache_hit_sources(first, request, num_external_tokens)
        return self.children[choice].get_external_cache_hit_sources(request, num_external_tokens)

    # The step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        if self.may_hide:
            self.isolation.begin_step()
            self.open_lookups.poll(self.isolation.is_slow)
        trace = self.traces.calls.begin_step() if self.traces is not None else None
        if self.may_hide:
            metadata = tuple([self._build_one(child, scheduler_output) for child in self.children])
        else:
            metadata = tuple([child.build_connector_meta(scheduler_output) for child in self.children])
        step = MultiKVConnectorMetadata(metadata)
        has_sync_loads = False
        if self.next_orders.made is not None or self.ledger.failures:  # calls would cost more, in each step
            step.orders = self.next_orders.take()
            step.orders.failed = self.ledger.take_failures()
            has_sync_loads = step.orders.has_sync_loads
            if has_sync_loads and self.may_hide:
                step.orders.unmade = self._unmade(step.orders)
        now_ns = wall_ns()
        self.gains.step_begun(scheduler_output, now_ns, loads=has_sync_loads)
        finished = scheduler_output.finished_req_ids
        if not (has_forward := scheduler_output.total_num_scheduled_tokens > 0):
            step.has_forward = False
        try:  # `contained` would cost a call, once a step
            if self.flush_rule.decide(now_ns, has_forward=has_forward, has_finished=bool(finished)):
                step.flush = True
        except Exception:
            contain("flush")
        if trace is not None:
            step.trace = trace
        if self.may_hide:
            step.isolated = Isolated(self.isolation.states(), self._hidden_ends(finished))
        return step

    def _unmade(self, orders: Orders) -> tuple[str, ...]:
        """Return the synchronous loads of children that are not shown the request: their allocation call has raised."""
        loads = orders.loads.items()
        return tuple([r for r, load in loads if not load.is_async and not self.visibility[load.child].saves(r)])

    def _build_one(self, child: Child, output: SchedulerOutput) -> Any:
        visibility = self.visibility[child.index]
        if not visibility:
            return child.build_connector_meta(output)
        view = visibility.shown(output)
        metadata = child.build_connector_meta(view)
        if view is not output:
            write_back(view, output)
        return metadata

    def _hidden_ends(self, finished: Collection[str]) -> dict[int, frozenset[str]]:
        """Return the finished requests that are hidden from each child, and forget ended requests."""
        hidden = {}
        for index, visibility in enumerate(self.visibility):
            if visibility:
                if ends := visibility.ends_hidden(finished):
                    hidden[index] = ends
                visibility.forget(finished, self.ledger)
        return hidden

    @contained("flush")
    def _has_numbers(self, stats: KVConnectorStats) -> bool:
        """Return whether the output has the workers' numbers; the workers may have decided to send them."""
        if not has_content(stats):
            return False
        self.flush_rule.flushed()
        return True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite ``connector_output`` before vLLM reads it."""
        stats = connector_output.kv_connector_stats
        self._flush_is_due = (stats is not None and self._has_numbers(stats)) or False
        if self.feed is not None and self._flush_is_due:
            divert(stats, self.feed)
        self.completions.take_in(connector_output)
        if self.ledger.incomplete.recent:
            self.open_transfers.look_for_stuck()

    # The end of a request

    def register_finished_partial_tail(self, request: Request, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Offer the partial tail to every child; a child that accepts it has promised a save."""
        for child in self.children:
            if not self.visibility[child.index].saves(request.request_id):
                continue
            if child.register_finished_partial_tail(request, block_ids, partial_tail_offloads):
                self.ledger.accept_tail(request.request_id, child.index)
        return bool(self.ledger.tails(request.request_id))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Report the end to every child; hold the blocks while a promised save is open; merge the client's params."""
        request_id = request.request_id
        shown = [child for child in self.children if request_id not in self.visibility[child.index].hidden]
        promised, params = finish_all(shown, request, block_ids, all_support_hma=self.all_support_hma)
        promised = promised | self.ledger.tails(request_id)
        promises = [(index, self._reports_expected(index)) for index in sorted(promised)]
        finished = self.ledger.finish(request_id, promises, wall_ns(), request.num_computed_tokens)
        if finished.promised:
            self.next_orders.orders.promised += [(index, request_id) for index in finished.promised]
        if finished.promised or finished.early:
            self.listener.promised(request_id, finished.promised, finished.early)
        self.offers.forget(request_id)
        if finished.aborted is not None:
            self.next_orders.orders.orphaned.append(request_id)
            is_error = request.status is RequestStatus.FINISHED_ERROR
            self.listener.aborted(request_id, finished.aborted, by_error=is_error)
        if finished.early and not finished.holds:
            self.completions.early.add(request_id)
        for stray in finished.stray:
            self.listener.stray(stray)
        if self.traces is not None:
            params = self.traces.into_params(request_id, params) or params
        if self.reports is not None:
            params = self.reports.finished(request, params) or params
        self.listener.request_ended(request_id)
        self.reuse.ended(request)
        self.isolation.gone(request_id)
        self.open_lookups.forget(request_id)
        for visibility in self.visibility:
            if visibility:
                visibility.end(request_id)
        return finished.holds, params

    # Once

    def get_finished_count(self) -> int | None:
        """Return None, since reports are counted here by child and rank; keep the number that each child states."""
        self._finished_counts = [child.get_finished_count() for child in self.children]
        return None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._hand_back("set_xfer_handshake_metadata_pp_aware", metadata)

    def _hand_back(self, hook: str, metadata: dict[Any, Any]) -> None:
        """Give each child the handshakes of its own workers only; isolate those that failed at a worker's start."""
        for part in metadata.values():
            if not isinstance(part, MultiHandshakeMetadata):
                raise TypeError(f"handshake metadata of another connector reached kvobs: {type(part).__name__}")
            # Before the first lookup, which may wait for an answer of the worker's side, forever.
            self.isolation.record_failures(part.broken)
        for child in self.children:
            by_rank = {rank: part.metadata[child.index] for rank, part in metadata.items()}
            getattr(child, hook)({rank: own for rank, own in by_rank.items() if own is not None})

    def reset_cache(self) -> bool:
        """Reset every child's cache, even if one refuses or raises; return whether none refused."""
        return all(answer is not False for answer in call_all("reset_cache", self.children))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Return the stats payload, if there is one; kvobs's own numbers are sent together with the workers'."""
        self.box[STEPS] += 1
        self.gains.step_ended()
        if self._flush_is_due:
            self.open_transfers.measure(self.offers.waited_for)
            self.gains.flush(goes_on=self.flush_rule.has_forward)
        stats = self.collector.collect(is_due=self._flush_is_due)
        self._flush_is_due = False
        return stats

    def feed_last(self, feed: Sink) -> None:
        """Pass on to the exporter what was counted since the last flush: the engine ends."""
        self.gains.flush()
        self.collector.feed(feed)

    def _reports_expected(self, child: int | None) -> int:
        # At most the ranks that there are: vLLM ignores the number with one worker, and waits for ever with several.
        stated = self._finished_counts[child] if child is not None else None
        return min(stated or self.reporting, self.reporting)


def finish_all(
    children: Sequence[Child], request: Request, block_ids: BlockIds, *, all_support_hma: bool
) -> tuple[set[int], Params | None]:
    """Report the end of the request to every child; return the children that promise a save, and the merged params.

    As in vLLM, the same one of two hooks is called for all children, chosen by ``all_support_hma``.

    Raises:
        RuntimeError: two children return the same key; names both and the key.
        ValueError: the request has several KV cache groups, but a child supports only one.
    """
    if not all_support_hma and len(block_ids) != 1:
        raise ValueError(
            f"not every connector supports more than one KV cache group, and request {request.request_id} has "
            f"{len(block_ids)}: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    promised: set[int] = set()
    merged: Params | None = None
    owners: dict[str, str] = {}
    for child in children:
        if all_support_hma:
            promises, params = child.request_finished_all_groups(request, block_ids)
        else:
            promises, params = child.request_finished(request, block_ids[0])
        if promises:
            promised.add(child.index)
        if params is not None:
            if clashes := sorted(owners.keys() & params):
                listed = ", ".join(f"{key!r} (from {owners[key]!r} and {child.name!r})" for key in clashes)
                raise RuntimeError(
                    f"two connectors return the same key of kv_transfer_params: {listed}. A client can't distinguish "
                    "them; configure one of them only"
                )
            owners.update(dict.fromkeys(params, child.name))
            merged = {**(merged or {}), **params}
    return promised, merged
