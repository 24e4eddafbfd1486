"""The scheduler's side of the routing: who loads a request, who saves it, and what vLLM hears of the workers' reports.

One instance lives in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from kvobs.children import Child
from kvobs.config import Options
from kvobs.endings import tell_all
from kvobs.fanout import call_all
from kvobs.faults import contained
from kvobs.flush import FlushRule
from kvobs.isolation import Isolation
from kvobs.layout import CacheLayout
from kvobs.ledger import Ledger
from kvobs.metadata import (
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
    News,
    checked,
)
from kvobs.offers import Offers
from kvobs.open_transfers import OpenTransfers
from kvobs.outcomes import Outcomes
from kvobs.recorder import Recorder, wall_ns
from kvobs.reports import Foreign, Kind
from kvobs.stats import Collector, MultiKVConnectorStats, has_news
from kvobs.traces import Untraced

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


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
        self.ledger = Ledger() if recorder.flight is None else recorder.flight.ledger(wall_ns)
        self._offers = Offers(children, options, recorder)
        self._traces = traces
        self._outcomes = Outcomes(children, recorder, layout.bytes_per_token, traces.request_spans)
        self._collector = Collector(children, recorder)
        self._flush_rule = FlushRule()
        self._flush_is_due = False
        self._world_size = world_size
        names = [child.name for child in children]
        self.open_transfers = OpenTransfers(names, self.ledger, recorder, world_size, options.stuck_after_s)
        self._layout = layout
        self._news = News()
        self._early: dict[int, set[str]] = {}  # saves that were done before vLLM heard of the promise
        self.isolation = Isolation(children, self.ledger, recorder)
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
            load.trace = self._traces.open(request_id)
            trace = self._traces.context_of(load.trace)
            self._news.loads[request_id] = LoadOrder(load.child, load.is_async, load.blocks, trace)
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
        self.isolation.begin_step()
        news, self._news = self._news, News()
        trace = self._traces.begin_step()
        metadata = tuple([child.build_connector_meta(scheduler_output) for child in self.children])
        self.isolation.drop_orders(news.loads, metadata)
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        return MultiKVConnectorMetadata(
            metadata=metadata,
            loads=news.loads,
            closed=news.closed,
            failed=self.ledger.take_failures(),
            promised=news.promised,
            orphaned=news.orphaned,
            saved=news.saved,
            trace=trace,
            isolated=self.isolation.words(),
            has_forward=has_forward,
            flush=self._decide_flush(has_forward, bool(scheduler_output.finished_req_ids)) or False,
        )

    @contained("flush")
    def _decide_flush(self, has_forward: bool, has_finished: bool) -> bool:
        return self._flush_rule.decide(wall_ns(), has_forward=has_forward, has_finished=has_finished)

    @contained("flush")
    def _are_telling(self, stats: KVConnectorStats | None) -> bool:
        """Return whether the workers' numbers come by; they may have decided that by themselves."""
        if not has_news(stats):
            return False
        self._flush_rule.told()
        return True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite what vLLM is about to read from ``connector_output``."""
        meta = checked(connector_output.kv_connector_worker_meta, len(self.children), self._world_size)
        failed_syncs = self._hear(meta, connector_output.invalid_block_ids)
        self._flush_is_due = self._are_telling(connector_output.kv_connector_stats) or False
        for request_id in connector_output.finished_recving or ():
            self.ledger.echoed(request_id)  # kvobs's workers report nothing but failures there
        for child in self.children:
            self._update_child(child, connector_output, meta)
        connector_output.finished_recving = self.ledger.take_received() or None
        connector_output.finished_sending = self.ledger.take_sent() or None
        for index, requests in failed_syncs.items():
            self._outcomes.sync_loads_failed(index, len(requests))
        if self.ledger.halves:
            self.open_transfers.look_for_stuck()

    def _hear(self, meta: MultiKVConnectorWorkerMetadata | None, bad_blocks: set[int]) -> dict[int, set[str]]:
        """Take in the reports; return the synchronous loads that have failed, by child."""
        failed_syncs: dict[int, set[str]] = {}
        if meta is None:
            return failed_syncs
        self.isolation.hear(meta.broken)
        now_ns = wall_ns()
        for report in meta.reports:
            if (foreign := self.ledger.hear(report, now_ns)) is not None:
                self._outcomes.foreign(foreign)
            if report.kind in (Kind.HOLED, Kind.SYNC_FAILED):
                self._note_loss(report.request, bad_blocks)
            if report.kind is Kind.SYNC_FAILED:
                failed_syncs.setdefault(report.child, set()).add(report.request)
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
                self._news.closed.append(request_id)
                if load.failed:
                    self._offers.ban(request_id, child.index)
                self._outcomes.loaded(load)
        # A child may withdraw a save here, or complete one that was never reported (MoRIIO does both).
        for request_id in finished_sending - early:
            save = self.ledger.close_save(request_id, child.index)
            if save is not None:
                self._news.saved.append((child.index, request_id))
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
        view.finished_recving = ({r for r in loads_in if self.ledger.is_async(r)} or None) if loads_in else None
        view.finished_sending = saves_in or None
        if hasattr(view, "failed_recving"):
            view.failed_recving = {r for r in output.failed_recving if r in loads_in} if loads_in else set()
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
        promised = {i for i in promised | self.ledger.tails(request_id) if not self.isolation.is_out(i)}
        promises = [(index, self._reports_expected(index)) for index in sorted(promised)]
        finished = self.ledger.finish(request_id, promises, wall_ns())
        self._news.promised += [(index, request_id) for index in finished.promised]
        context = self._traces.hand_on(request_id, {**finished.promised, **finished.early})
        self._offers.forget(request_id)
        if finished.aborted is not None:
            self._news.orphaned.append(request_id)
            self._outcomes.aborted(finished.aborted, by_error=request.status is RequestStatus.FINISHED_ERROR)
        for index, save in finished.early.items():
            self._early.setdefault(index, set()).add(request_id)
            self._outcomes.saved(index, save, save.promised_ns)
        for foreign in finished.foreign:
            self._outcomes.foreign(foreign)
        self._traces.forget(request_id)
        self.isolation.gone(request_id)
        return finished.holds, self._traces.into_params(params, context) or params

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
            self.open_transfers.measure()
        stats = self._collector.collect(is_due=self._flush_is_due)
        self._flush_is_due = False
        return stats

    def _reports_expected(self, child: int | None) -> int:
        return (child is not None and self.children[child].get_finished_count()) or self._world_size
