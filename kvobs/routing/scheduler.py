"""Route on the scheduler's side: choose who loads a request and who saves it, and report completions to vLLM.

There is one instance, in EngineCore. Its methods are vLLM's hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request, RequestStatus

from kvobs.children.child import Child
from kvobs.children.collector import Collector, Feed, divert
from kvobs.children.fanout import call_all
from kvobs.children.specs import load_ends_save
from kvobs.faults import contain, contained
from kvobs.routing.completions import Completions
from kvobs.routing.fastest import Fastest
from kvobs.routing.gains import Gains, StepLimits
from kvobs.routing.isolation import Isolation
from kvobs.routing.lookups import Offers
from kvobs.routing.metadata import (
    Isolated,
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    NextOrders,
)
from kvobs.routing.open_lookups import OpenLookups
from kvobs.routing.open_transfers import OpenTransfers
from kvobs.routing.outcomes import Outcomes
from kvobs.routing.request_end import finish_all
from kvobs.routing.visibility import Visibility, write_back
from kvobs.schema.options import Options
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListeners
from kvobs.telemetry.payload.flush_rule import FlushRule
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, has_content
from kvobs.telemetry.recording.recorder import wall_ns
from kvobs.telemetry.telemetry import Telemetry
from kvobs.telemetry.timeline.black_box import SINCE, STEPS

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


class Ranks(NamedTuple):
    """The numbers of workers of one engine.

    ``reporting``: how many report to this scheduler, unless a child states its own number. ``world``: all of them; with
    an external launcher each worker has its own scheduler.
    """

    reporting: int
    world: int


class SchedulerSide:
    """Routes the scheduler's hooks.

    Args:
        children: the children's scheduler-side connectors.
        telemetry: records what the router announces.
        options: kvobs's options.
        ranks: number of reporting workers.
        layout: block sizes and bytes per token of the KV cache.
        limits: of the engine's steps.
        all_support_hma: whether every child supports several KV cache groups.
        async_only: isolated children whose synchronous offers are not used.
        feed: takes kvobs's own numbers to the exporter, if there is one.
    """

    def __init__(
        self,
        children: Sequence[Child],
        telemetry: Telemetry,
        options: Options,
        ranks: Ranks,
        layout: CacheLayout,
        *,
        limits: StepLimits,
        all_support_hma: bool = True,
        async_only: Collection[int] = (),
        feed: Feed | None = None,
    ) -> None:
        self.children, self._feed = children, feed
        self._box = telemetry.recorder.box.words
        recorder, names = telemetry.recorder, [child.name for child in children]
        listeners = (Outcomes(names, recorder), *telemetry.listeners)
        self._gains = Gains(recorder, TransferListeners(listeners), limits)
        fastest = Fastest.of(options, children, self._gains, TransferListeners(listeners))
        self._listener = TransferListeners([*listeners, self._gains, *filter(None, [fastest])])  # these announce, too
        self.ledger = Ledger([child.index for child in children if load_ends_save(child.connector)])
        self._visibility = [Visibility() for _ in children]
        slow_ns = int(options.isolate_slow_ms * 1e6)
        self.isolation = Isolation(children, self.ledger, self._visibility, recorder, slow_ns)
        isolates = any(child.gate is not None for child in children)
        isolation = self.isolation if isolates else None
        self._offers = Offers(children, options, recorder, fastest, isolation=isolation, async_only=async_only)
        # Without isolation and open lookups every child sees every request, and a step need not look for others.
        self._may_hide = self._offers.may_leave_open or isolates
        self._open_lookups = OpenLookups(children, self._visibility)
        self._traces, self._reports = telemetry.traces, telemetry.reports
        self._next = NextOrders()
        self._completions = Completions(
            children,
            self.ledger,
            self._visibility,
            self._listener,
            next_orders=self._next,
            isolation=self.isolation,
            offers=self._offers,
            layout=layout,
            ranks=ranks.world,
            to_reset=[child for child in children if child.name in options.reset_after_failed_sync_load],
        )
        self._collector = Collector(children, recorder, feed)
        self._flush_rule = FlushRule()
        self._flush_is_due = False
        self._ranks = ranks
        self._finished_counts: list[int | None] = [None] * len(children)
        self.open_transfers = OpenTransfers(names, self.ledger, recorder, ranks.reporting, options.stuck_after_s)
        self._layout = layout
        self._all_support_hma = all_support_hma

    # Lookup and allocation

    def on_new_request(self, request: Request) -> None:
        self.ledger.arrive(request.request_id)
        self.isolation.arrive(request.request_id)
        for child in self.children:
            if request.request_id not in self._visibility[child.index].hidden:
                child.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Look the request up in the children by the load policy; the owner is set when vLLM allocates."""
        began = wall_ns() if self._listener.wants_lookups else 0
        if self._may_hide:
            self._open_lookups.forget(request.request_id)  # vLLM repeats the lookup
        best = self._offers.ask(request, num_computed_tokens)
        if began:
            self._listener.looked_up(request, began, wall_ns())
        if best is None:
            return None, False  # vLLM loads nothing before a lookup that has ended
        self.ledger.propose(request.request_id, (best.child, best.is_async) if best.tokens else None)
        return best.tokens, best.is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Set the owner if vLLM allocated tokens for it; every child gets the real blocks, the others 0 tokens."""
        request_id = request.request_id
        choice = self.ledger.choice(request_id) if num_external_tokens > 0 else None
        load = self.ledger.admit(request_id, num_external_tokens, self._reports_expected(choice), wall_ns())
        owner = load.child if load is not None else None
        if load is None or not load.is_async:
            self._offers.lift_bans(request_id)
        offers, local = self._offers.settle(request_id, owner, num_external_tokens)
        self._listener.allocated(request_id, [offer[:2] for offer in offers], local, owner, num_external_tokens)
        if load is not None:
            if not load.is_async:
                load.expected = self._ranks.reporting  # every worker reports its end after the step
            load.blocks = self._layout.loaded(blocks.get_block_ids(), local, num_external_tokens)
            load.size = round(load.tokens * self._layout.bytes_per_token)
            load.local_tokens, load.rest_tokens = local, request.num_tokens - local - num_external_tokens
            self._listener.admitted(request_id, load)
            trace = self._traces.of_load(request_id) if self._traces is not None else None
            self._next.orders.loads[request_id] = LoadOrder(load.child, load.is_async, load.blocks, trace)
        self._open_lookups.leave_open(request, blocks, local, self._offers.take_left_open(request_id))
        for child in self.children:
            is_shown = self._visibility[child.index].allocates(request_id)
            if is_shown and not self._open_lookups.has(child.index, request_id):
                self.isolation.allocated(child.index, request_id)
                child.update_state_after_alloc(request, blocks, num_external_tokens if child.index == owner else 0)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the answer of the chosen child; vLLM may ask before it allocates."""
        choice = self.ledger.choice(request.request_id)
        child = self.children[choice if choice is not None else 0]
        groups: tuple[int, ...] = child.get_loaded_kv_cache_group_ids(request)
        return groups

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        choice = self.ledger.choice(request.request_id)
        if choice is None:
            unchosen: dict[Any, int] = KVConnectorBase_V1.get_external_cache_hit_sources(
                self.children[0].connector, request, num_external_tokens
            )
            return unchosen
        sources: dict[Any, int] = self.children[choice].get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    # The step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        self._box[SINCE] = perf_counter_ns()
        if self._may_hide:
            self.isolation.begin_step()
            self._open_lookups.poll(self.isolation.is_slow)
        trace = self._traces.begin_step() if self._traces is not None else None
        if self._may_hide:
            metadata = tuple([self._build_one(child, scheduler_output) for child in self.children])
        else:
            metadata = tuple([child.build_connector_meta(scheduler_output) for child in self.children])
        step = MultiKVConnectorMetadata(metadata)
        has_sync_loads = False
        if self._next.made is not None or self.ledger.failures:  # calls would cost more, in each step
            step.orders = self._next.take()
            step.orders.failed = self.ledger.take_failures()
            has_sync_loads = step.orders.has_sync_loads
        now_ns = wall_ns()
        self._gains.step_begun(scheduler_output, now_ns, loads=has_sync_loads)
        finished = scheduler_output.finished_req_ids
        if not (has_forward := scheduler_output.total_num_scheduled_tokens > 0):
            step.has_forward = False
        if self._decide_flush(now_ns, has_forward, bool(finished)):
            step.flush = True
        if trace is not None:
            step.trace = trace
        if self._may_hide:
            step.isolated = Isolated(self.isolation.states(), self._hidden_ends(finished))
        return step

    def _build_one(self, child: Child, output: SchedulerOutput) -> Any:
        """Build a child's metadata from its view of the step."""
        visibility = self._visibility[child.index]
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
        for index, visibility in enumerate(self._visibility):
            if visibility:
                if ends := visibility.ends_hidden(finished):
                    hidden[index] = ends
                visibility.forget(finished, self.ledger)
        return hidden

    def _decide_flush(self, now_ns: int, has_forward: bool, has_finished: bool) -> bool:
        try:  # `contained` would cost a call more, once a step
            return self._flush_rule.decide(now_ns, has_forward=has_forward, has_finished=has_finished)
        except Exception:
            contain("flush")
            return False

    @contained("flush")
    def _has_numbers(self, stats: KVConnectorStats) -> bool:
        """Return whether the output has the workers' numbers; the workers may have decided to send them."""
        if not has_content(stats):
            return False
        self._flush_rule.flushed()
        return True

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Count the workers' reports, and rewrite ``connector_output`` before vLLM reads it."""
        stats = connector_output.kv_connector_stats
        self._flush_is_due = (stats is not None and self._has_numbers(stats)) or False
        if self._feed is not None and self._flush_is_due:
            divert(stats, self._feed)
        self._completions.take_in(connector_output)
        if self.ledger.incomplete.since:
            self.open_transfers.look_for_stuck()

    # The end of a request

    def register_finished_partial_tail(self, request: Request, block_ids: Any, partial_tail_offloads: Any) -> bool:
        """Offer the partial tail to every child; a child that accepts it has promised a save."""
        for child in self.children:
            if not self._visibility[child.index].saves(request.request_id):
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
        shown = [child for child in self.children if request_id not in self._visibility[child.index].hidden]
        promised, params = finish_all(shown, request, block_ids, all_support_hma=self._all_support_hma)
        promised = promised | self.ledger.tails(request_id)
        promises = [(index, self._reports_expected(index)) for index in sorted(promised)]
        finished = self.ledger.finish(request_id, promises, wall_ns(), request.num_computed_tokens)
        if finished.promised:
            self._next.orders.promised += [(index, request_id) for index in finished.promised]
        if finished.promised or finished.early:
            self._listener.promised(request_id, finished.promised, finished.early)
        self._offers.forget(request_id)
        if finished.aborted is not None:
            self._next.orders.orphaned.append(request_id)
            is_error = request.status is RequestStatus.FINISHED_ERROR
            self._listener.aborted(request_id, finished.aborted, by_error=is_error)
        if finished.early and not finished.holds:
            self._completions.early.add(request_id)
        for stray in finished.stray:
            self._listener.stray(stray)
        if self._traces is not None:
            params = self._traces.into_params(request_id, params) or params
        if self._reports is not None:
            params = self._reports.finished(request, params) or params
        self._listener.request_ended(request_id)
        self.isolation.gone(request_id)
        self._open_lookups.forget(request_id)
        for visibility in self._visibility:
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
            getattr(child, hook)(MultiHandshakeMetadata.of_child(metadata, child.index))

    def reset_cache(self) -> bool:
        """Reset every child's cache, even if one refuses or raises; return whether none refused."""
        return all(answer is not False for answer in call_all("reset_cache", self.children))

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Return the stats payload, if there is one; kvobs's own numbers are sent together with the workers'."""
        self._box[STEPS] += 1
        self._gains.step_ended()
        if self._flush_is_due:
            self.open_transfers.measure(self._offers.waited_for)
            self._gains.flush()
        stats = self._collector.collect(is_due=self._flush_is_due)
        self._flush_is_due = False
        return stats

    def feed_last(self, feed: Feed) -> None:
        """Pass on to the exporter what was counted since the last flush: the engine ends."""
        self._gains.flush()
        self._collector.feed(feed)

    def _reports_expected(self, child: int | None) -> int:
        # At most the ranks that there are: vLLM ignores the number with one worker, and waits for ever with several.
        stated = self._finished_counts[child] if child is not None else None
        return min(stated or self._ranks.reporting, self._ranks.reporting)
