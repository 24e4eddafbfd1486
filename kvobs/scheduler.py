"""The scheduler's side of the routing: who loads a request, who saves it, and what vLLM hears of the workers' reports.

One instance lives in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvobs import signals
from kvobs.children import Child
from kvobs.config import Options
from kvobs.context import into_params
from kvobs.endings import tell_all
from kvobs.fanout import call_all
from kvobs.faults import contained
from kvobs.flush import FlushRule
from kvobs.layout import CacheLayout
from kvobs.ledger import Ledger
from kvobs.metadata import (
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
)
from kvobs.offers import Offers
from kvobs.outcomes import Outcomes
from kvobs.recorder import Recorder, wall_ns
from kvobs.reports import Foreign, Kind
from kvobs.stats import Collector, MultiKVConnectorStats, has_news
from kvobs.traces import Untraced

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_GAUGES = tuple(
    (signals.slot(signals.IN_FLIGHT, kind), signals.slot(signals.OLDEST_IN_FLIGHT, kind))
    for kind in signals.IN_FLIGHT.labels["kind"]
)


class SchedulerSide:
    """Routes the scheduler's hooks.

    Args:
        children: the children's scheduler-side connectors.
        recorder: this process's numbers.
        options: kvobs's options.
        world_size: the number of workers whose report completes a load or save, unless a child states its own.
        layout: the KV cache's.
        traces: what is traced.
    """

    def __init__(
        self,
        children: Sequence[Child],
        recorder: Recorder,
        options: Options,
        world_size: int,
        layout: CacheLayout,
        *,
        traces: Untraced,
    ) -> None:
        self.children = children
        self.ledger = Ledger()
        self._recorder = recorder
        self._offers = Offers(children, options, recorder)
        self._traces = traces
        self._outcomes = Outcomes(children, recorder, layout.bytes_per_token, traces.request_spans)
        self._collector = Collector(children, recorder)
        self._flush_rule = FlushRule()
        self._flush_is_due = False
        self._world_size = world_size
        self._layout = layout
        self._orders: dict[str, LoadOrder] = {}
        self._closed: list[str] = []
        self._promised: list[tuple[int, str]] = []
        self._early: dict[int, set[str]] = {}  # saves that were done before vLLM heard of the promise
        self._listening = {child.index for child in children if child.does("update_connector_output")}

    # Lookup and allocation

    def on_new_request(self, request: Request) -> None:
        self.ledger.arrive(request.request_id)
        for child in self.children:
            child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask the children by the load policy; nothing is fixed until vLLM allocates."""
        began = wall_ns()
        best = self._offers.ask(request, num_computed_tokens)
        self._traces.looked_up(request, began, wall_ns())
        if best is None:
            self.ledger.propose(request.request_id, None)
            return None, False
        self.ledger.propose(request.request_id, (best.child, best.is_async) if best.tokens else None)
        return best.tokens, best.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Fix the owner if vLLM allocated tokens for it; every child gets the real blocks, the others 0 tokens."""
        request_id = request.request_id
        choice = self.ledger.choice(request_id) if num_external_tokens > 0 else None
        load = self.ledger.admit(request_id, num_external_tokens, self._reports_expected(choice), wall_ns())
        owner = load.child if load is not None else None
        local, offers = self._offers.settle(request_id, owner, num_external_tokens)
        tokens_by_child = [(offer.child, offer.tokens) for offer in offers]
        self._traces.settled(request_id, tokens_by_child, local, owner, num_external_tokens)
        if load is not None:
            if not load.is_async:
                load.expected = self._world_size  # every worker says so itself when the step is over
            load.blocks = self._layout.loaded(blocks.get_block_ids(), local, num_external_tokens)
            opened = load.trace = self._traces.open(request_id)
            trace = opened.context if opened is not None else None
            self._orders[request_id] = LoadOrder(load.child, load.is_async, load.blocks, trace)
        for child in self.children:
            child.update_state_after_alloc(request, blocks, num_external_tokens if child.index == owner else 0)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Answer for the child that loads; it is chosen, and not always allocated yet, when vLLM asks."""
        choice = self.ledger.choice(request.request_id)
        child = self.children[choice if choice is not None else 0]
        groups: tuple[int, ...] = child.get_loaded_kv_cache_group_ids(request)
        return groups

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        owner = self.ledger.owner(request.request_id)
        child = self.children[owner if owner is not None else 0]
        sources: dict[Any, int] = child.get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    # The step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        orders, self._orders = self._orders, {}
        closed, self._closed = tuple(self._closed), []
        promised, self._promised = tuple(self._promised), []
        trace = self._traces.begin_step()
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        return MultiKVConnectorMetadata(
            metadata=tuple(child.build_connector_meta(scheduler_output) for child in self.children),
            loads=orders,
            closed=closed,
            failed=self.ledger.take_failures(),
            promised=promised,
            trace=trace,
            has_forward=has_forward,
            flush=self._flush_rule.decide(
                wall_ns(), has_forward=has_forward, has_finished=bool(scheduler_output.finished_req_ids)
            ),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite what vLLM is about to read from ``connector_output``."""
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and not isinstance(meta, MultiKVConnectorWorkerMetadata):
            raise TypeError(f"worker metadata of another connector reached kvobs: {type(meta).__name__}")
        failed_syncs = self._hear(meta, connector_output.invalid_block_ids)
        self._flush_is_due = has_news(connector_output.kv_connector_stats)
        for request_id in connector_output.finished_recving or ():
            self.ledger.echoed(request_id)  # kvobs's workers report nothing but failures there
        for child in self.children:
            self._update_child(child, connector_output, meta)
        connector_output.finished_recving = self.ledger.take_received() or None
        connector_output.finished_sending = self.ledger.take_sent() or None
        for index in failed_syncs:
            self._outcomes.sync_load_failed(index)

    def _hear(self, meta: MultiKVConnectorWorkerMetadata | None, bad_blocks: set[int]) -> set[int]:
        """Take in the reports; return the children of which a synchronous load has failed."""
        failed_syncs: set[int] = set()
        for report in meta.reports if meta is not None else ():
            foreign = self.ledger.hear(report)
            if foreign is not None:
                self._outcomes.foreign(foreign)
            if report.kind in (Kind.HOLED, Kind.SYNC_FAILED):
                self._note_loss(report.request, bad_blocks)
            if report.kind is Kind.SYNC_FAILED:
                failed_syncs.add(report.child)
        return failed_syncs

    @contained("record")
    def _note_loss(self, request_id: str, bad_blocks: set[int]) -> None:
        """Note how much of a load vLLM will compute again: it keeps what comes before the first bad block."""
        load = self.ledger.load(request_id)
        if load is not None:
            lost = self._layout.lost(load.blocks, bad_blocks, load.tokens)
            load.lost_tokens = max(load.lost_tokens or 0, lost)

    def _update_child(
        self, child: Child, output: KVConnectorOutput, meta: MultiKVConnectorWorkerMetadata | None
    ) -> None:
        """Hand a child its own part of the output, and close what is in unless the child withdraws it."""
        loads_in = self.ledger.take_loads_in(child.index)
        saves_in = set(self.ledger.take_saves_in(child.index))
        early = self._early.pop(child.index, set())
        finished_sending = saves_in | early
        if child.index in self._listening:
            finished_sending = self._show_output(child, output, meta, loads_in, finished_sending)
        for request_id in loads_in:
            load = self.ledger.close_load(request_id)
            if load is not None:
                self._closed.append(request_id)
                self._outcomes.loaded(load)
        # A child may withdraw a save here, or complete one that was never reported (MoRIIO does both).
        for request_id in finished_sending - early:
            save = self.ledger.close_save(request_id, child.index)
            if save is not None:
                self._outcomes.saved(child.index, save, wall_ns())
            else:
                self._outcomes.foreign(Foreign(child.index, "save", request_id))

    def _show_output(
        self,
        child: Child,
        output: KVConnectorOutput,
        meta: MultiKVConnectorWorkerMetadata | None,
        loads_in: list[str],
        saves_in: set[str],
    ) -> set[str]:
        """Show a child its own part of the output; return which of its saves it leaves as done."""
        view: KVConnectorOutput = object.__new__(type(output))
        vars(view).update(vars(output))  # copy.copy takes ten times as long, for every child and step
        view.kv_connector_worker_meta = meta.metadata[child.index] if meta is not None else None
        events = output.kv_cache_events
        view.kv_cache_events = events.by_child.get(child.index) if isinstance(events, MultiKVEvents) else None
        # A sync load ends with its step: alone under vLLM, its child would never see it among the received.
        view.finished_recving = {r for r in loads_in if self.ledger.is_async(r)} or None
        view.finished_sending = saves_in or None
        if hasattr(view, "failed_recving"):
            view.failed_recving = {r for r in output.failed_recving if r in loads_in}
        child.update_connector_output(view)
        return view.finished_sending or set()

    # The end of a request

    def register_finished_partial_tail(self, request: Request, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Register the tail with every child; one that accepts has promised a save."""
        for child in self.children:
            if child.register_finished_partial_tail(request, block_ids, partial_tail_offloads):
                self.ledger.accept_tail(request.request_id, child.index)
        return bool(self.ledger.tails(request.request_id))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell every child; hold the blocks while a promise is open; merge what the children hand to the client."""
        request_id = request.request_id
        promised, params = tell_all(self.children, request, block_ids)
        promised |= self.ledger.tails(request_id)
        finished = self.ledger.finish(
            request_id,
            [(index, self._reports_expected(index)) for index in sorted(promised)],
            wall_ns(),
        )
        self._promised += [(index, request_id) for index in finished.promised]
        context = self._traces.hand_on(request_id, {**finished.promised, **finished.early})
        self._offers.forget(request_id)
        if finished.aborted is not None:
            self._outcomes.aborted(finished.aborted)
        for index, save in finished.early.items():
            self._early.setdefault(index, set()).add(request_id)
            self._outcomes.saved(index, save, save.promised_ns)
        for foreign in finished.foreign:
            self._outcomes.foreign(foreign)
        self._traces.forget(request_id)
        return finished.holds, into_params(params, context)

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
                getattr(child, hook)(own)

    def reset_cache(self) -> bool:
        """Reset every child's cache, also after one said no or raised; return whether all did not say no."""
        return all(answer is not False for answer in call_all("reset_cache", self.children))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Return what there is to tell; kvobs's own numbers go whenever the workers' do."""
        if self._flush_is_due:
            self._measure_what_is_open()
        stats = self._collector.collect(is_due=self._flush_is_due)
        self._flush_is_due = False
        return stats

    @contained("record")
    def _measure_what_is_open(self) -> None:
        for child in self.children:
            for transfers, (in_flight, oldest) in zip(self.ledger.in_flight(child.index), _GAUGES, strict=True):
                self._recorder.set_gauge(child.index, in_flight, len(transfers))
                self._recorder.set_gauge(child.index, oldest, next(iter(transfers.values()), 0))

    # Helpers

    def _reports_expected(self, child: int | None) -> int:
        if child is None:
            return self._world_size
        return self.children[child].get_finished_count() or self._world_size
