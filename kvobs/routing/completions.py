"""Count the workers' reports, close finished transfers, and rewrite the workers' output before vLLM reads it.

As with vLLM's own router every connector gets the same output object, and sees all received, failed and sent requests,
whoever loaded or saved them: HiSparse needs its siblings' receipts. Worker metadata, KV events and stats are the
connector's own, as when it runs alone: SpoolCache raises at stats of another class. A connector may change its own:
FlexKV reports its receipts here, MoRIIO withholds reports until it is ready. Changes to other connectors' requests are
undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvobs.clock import wall_ns
from kvobs.connectors.answers import MalformedAnswerError, answer_of, read_stats, requests_in
from kvobs.connectors.sub_connector import SubConnector
from kvobs.faults import contained
from kvobs.routing.isolation import Isolation
from kvobs.routing.lookups import Lookups
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata, MultiKVEvents, NextOrders, as_set, checked
from kvobs.routing.visibility import Visibility
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.events import Observer
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Closed, Load, Report, ReportKind, UnexpectedReport
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.outputs import KVConnectorOutput

failed_loads = versions.failed_loads()
_WITH_BAD_BLOCKS = (ReportKind.BAD_BLOCKS, ReportKind.SYNC_FAILED)  # that vLLM knows of


class StatsParts(Protocol):
    """Takes the stats of all connectors apart."""

    def of(self, stats: KVConnectorStats, index: int) -> KVConnectorStats | None:
        """Return a connector's part, as its class makes it when it runs alone; None without one."""

    def replaced(
        self, stats: KVConnectorStats | None, index: int, part: KVConnectorStats | None
    ) -> KVConnectorStats | None:
        """Return the stats with another part of a connector."""


class Shown(NamedTuple):
    """What an output had before a connector saw it, and the part of that which the connector sees."""

    received: set[str]
    sent: set[str]
    seen_received: set[str]
    seen_sent: set[str]
    failed: set[str]


class OutputView:
    """Shows the output to each connector in turn; ``unexpected`` receives reports of transfers that none owns."""

    def __init__(
        self,
        connectors: Sequence[SubConnector],
        ledger: Ledger,
        visibility: Sequence[Visibility],
        stats: StatsParts,
        unexpected: Callable[[UnexpectedReport], None],
    ) -> None:
        self._connectors = connectors
        self._ledger = ledger
        self._visibility = visibility
        self._unexpected = unexpected
        self._stats = stats
        self.bind()

    def bind(self) -> None:
        """Note which connectors implement the hook; again when a plug-in has replaced one."""
        self._shown_to = [
            connector for connector in self._connectors if "update_connector_output" in connector.implemented
        ]
        self.is_watched = bool(self._shown_to)  # if not, an output without loads and saves need not be shown

    def show(
        self,
        output: KVConnectorOutput,
        meta: MultiKVConnectorWorkerMetadata | None,
        loads: Sequence[str],
        sent: set[str],
    ) -> tuple[list[str], set[str]]:
        """Show the output with these loads and saves; return those that have ended after all connectors have seen it.

        ``finished_recving`` and ``finished_sending`` of the output are left to the caller.
        """
        received: set[str] = set()
        sync: list[str] = []
        for request in loads:  # a synchronous load ends with its step: vLLM does not report it
            received.add(request) if self._ledger.is_async(request) else sync.append(request)
        events, stats = output.kv_cache_events, output.kv_connector_stats
        try:
            for connector in self._shown_to:
                output.kv_connector_worker_meta = meta.metadata[connector.index] if meta is not None else None
                output.kv_cache_events = (
                    events.by_index.get(connector.index) if isinstance(events, MultiKVEvents) else None
                )
                part = None if stats is None else self._stats.of(stats, connector.index)
                output.kv_connector_stats = part
                if received or sent or output.finished_recving or output.finished_sending or failed_loads(output):
                    received, sent = self._show_one(connector, output, received, sent)
                else:
                    connector.update_connector_output(output)
                    if connector.gate or output.finished_recving or output.finished_sending or failed_loads(output):
                        received, sent = self._take_changes(connector, output, Shown(set(), set(), set(), set(), set()))
                if (left := output.kv_connector_stats) is not part and self._can_send(connector, left):
                    stats = self._stats.replaced(stats, connector.index, left)
        finally:
            output.kv_connector_worker_meta, output.kv_cache_events, output.kv_connector_stats = meta, events, stats
        return [*sync, *received], sent

    def _show_one(
        self, connector: SubConnector, output: Any, received: set[str], sent: set[str]
    ) -> tuple[set[str], set[str]]:
        """Show the output to one connector; return both sets with its changes of requests that it owns."""
        hidden = self._visibility[connector.index].hidden
        shown = Shown(set(received), set(sent), received - hidden, sent - hidden, set(failed_loads(output)))
        if hidden:
            received, sent = set(shown.seen_received), set(shown.seen_sent)
        # As in vLLM an empty set is None if it was None before.
        output.finished_recving = received if received or output.finished_recving is not None else None
        output.finished_sending = sent if sent or output.finished_sending is not None else None
        connector.update_connector_output(output)
        return self._take_changes(connector, output, shown)

    def _take_changes(self, connector: SubConnector, output: Any, shown: Shown) -> tuple[set[str], set[str]]:
        """Return the ended loads and saves with what a connector changed of its own requests.

        As with vLLM's router they are the sets that it was shown, or has put there: a copy may have another order.
        """
        changed = output.finished_recving, output.finished_sending, failed_loads(output)
        try:
            read = as_set if connector.gate is None else requests_in
            received, sent, failed = [read(each or ()) for each in changed]
        except Exception:
            if connector.gate is None:
                raise
            connector.gate.fail("update_connector_output", MalformedAnswerError(changed, "sets of request ids"))
            received, sent, failed = shown.seen_received, shown.seen_sent, shown.failed
            output.finished_recving, output.finished_sending, output.failed_recving = received, sent, failed
        if added := failed - shown.failed:
            output.failed_recving = shown.failed  # vLLM has read it already, and does not read it again
            self._add_failures(connector.index, added, shown.received)
            received = received - added
        if received != shown.seen_received:
            self._change(connector.index, "load", shown.seen_received, received, shown.received)
        if sent != shown.seen_sent:
            self._change(connector.index, "save", shown.seen_sent, sent, shown.sent)
        return in_order_of(received, shown.received), in_order_of(sent, shown.sent)

    def _can_send(self, connector: SubConnector, stats: Any) -> bool:
        """Return whether stats that a connector put into the output can be sent; an isolated one has failed if not."""
        if connector.gate is not None:
            try:
                read_stats(stats)
            except Exception:
                error = MalformedAnswerError(stats, answer_of("get_kv_connector_stats").allowed)
                connector.gate.fail("update_connector_output", error)
                return False
        return True

    def _add_failures(self, index: int, added: set[str], received: set[str]) -> None:
        """Fail the loads that the connector reports as failed; the workers report them to vLLM in the next step."""
        for request in added:
            if self._ledger.is_async(request) and self._owns_load(request, index):
                received.discard(request)
                self._ledger.fail(request, wall_ns())
            else:
                self._unexpected(UnexpectedReport(index, "failure", request))

    def _owns_load(self, request: str, index: int) -> bool:
        return (load := self._ledger.load(request)) is not None and load.connector_index == index

    def _change(self, index: int, kind: str, seen: set[str], now: set[str], ended: set[str]) -> None:
        """Apply a connector's changes to the ended loads or saves that it was shown, as far as it owns them."""
        withdraw, complete = (
            (self._owns_load, self._ledger.complete_load)
            if kind == "load"
            else (self._ledger.reopen_save, self._ledger.complete_save)
        )
        ended.difference_update([request for request in seen - now if withdraw(request, index)])
        for request in now - seen:
            is_in = complete(request, index, wall_ns())
            if is_in is None:
                self._unexpected(UnexpectedReport(index, kind, request))
            elif is_in:
                ended.add(request)


def in_order_of(shown: set[str], requests: set[str]) -> set[str]:
    """Return ``requests``: ``shown`` itself if it has the same, else a set made in its order."""
    if shown == requests:
        return shown
    return set([request for request in shown if request in requests] + list(requests - shown))


@dataclass(eq=False, kw_only=True)
class Completions:
    """Decides from the workers' reports which loads and saves have ended."""

    connectors: Sequence[SubConnector]
    ledger: Ledger
    view: OutputView
    observer: Observer
    next_orders: NextOrders  # receives the transfers that the workers must forget
    isolation: Isolation  # receives the isolated connectors that failed on a worker
    lookups: Lookups  # a connector's offers are not used after its asynchronous load failed, until its request has run
    layout: CacheLayout
    ranks: int  # the number of all workers
    early: set[str] = field(default_factory=set)  # requests whose saves were all done before vLLM got the promises

    def take_in(self, output: KVConnectorOutput) -> None:
        """Process the output of a step, and rewrite it."""
        meta, failed_syncs = output.kv_connector_worker_meta, dict[int, list[Load]]()
        if isinstance(events := output.kv_cache_events, MultiKVEvents) and events.lost:
            self._lose("get_kv_connector_kv_cache_events", events.lost)
        loads: list[str] = []
        sent: set[str] = set()
        if meta is not None or failed_loads(output) or self.early or self.ledger.has_ended:  # true in few steps
            meta = checked(meta, len(self.connectors), self.ranks)
            reports = self._reports_of(meta) if meta is not None else ()
            loads, saves, unexpected = self.ledger.settle(reports, failed_loads(output), wall_ns())
            for report in unexpected:
                self.observer.unexpected(report)
            failed_syncs = self._note_bad_blocks(reports, output.invalid_block_ids)
            sent = self._sent(saves, reports, is_aggregated=output.expected_finished_count > 0)
        if loads or sent or self.view.is_watched:
            loads, sent = self.view.show(output, meta, loads, sent)
        if loads or sent:
            closed = self._close(loads, sent)
            output.finished_recving = closed.received or None
            output.finished_sending = in_order_of(sent, closed.sent) or None
        else:
            output.finished_recving = output.finished_sending = None
        for index, requests in failed_syncs.items():
            self.observer.sync_loads_failed(index, requests)

    def _reports_of(self, meta: MultiKVConnectorWorkerMetadata) -> Sequence[Report]:
        """Return the ranks' reports; pass on what else is in their metadata."""
        self.isolation.record_failures(meta.broken)
        self._lose("build_connector_worker_meta", meta.lost)
        if meta.notes:
            self.observer.noted(meta.notes)
        return meta.reports

    def _sent(self, saves: Sequence[str], reports: Sequence[Report], *, is_aggregated: bool) -> set[str]:
        """Return the requests whose promised saves are complete, as vLLM would have them."""
        ended = [*saves, *self.early]
        self.early.clear()
        if len(ended) <= 1:
            return set(ended)
        by_rank: dict[int, dict[str, None]] = {}
        for rank, kind, _, _, requests, *_ in reports:
            if kind is ReportKind.SAVED:
                last = by_rank.setdefault(rank, {})
                for request in requests:
                    if self.ledger.is_saved_on(rank, request):
                        last.pop(request, None)  # its last promise counts
                        last[request] = None
        return released_set(ended, map(list, by_rank.values()), is_aggregated=is_aggregated)

    def _note_bad_blocks(self, reports: Sequence[Report], bad_blocks: set[int]) -> dict[int, list[Load]]:
        """Note what vLLM will recompute of loads with bad blocks; return the synchronous ones, by connector."""
        failed_syncs: dict[str, None] = {}
        for report in reports:
            if report.kind in _WITH_BAD_BLOCKS:
                for request in report.requests:
                    self._note_loss(request, bad_blocks)
                if report.kind is ReportKind.SYNC_FAILED:
                    failed_syncs.update(dict.fromkeys(report.requests))
        by_index: dict[int, list[Load]] = {}
        for load in filter(None, map(self.ledger.load, failed_syncs)):
            by_index.setdefault(load.connector_index, []).append(load)
        return by_index

    def _lose(self, hook: str, lost: Iterable[int]) -> None:
        """Note isolated connectors whose part of the workers' message could not be pickled, read or merged."""
        for index in lost:
            if (gate := self.connectors[index].gate) is not None:
                gate.fail(hook, TypeError("its answer can't be pickled, read or merged"))

    @contained("record")
    def _note_loss(self, request_id: str, bad_blocks: set[int]) -> None:
        """Note how many tokens of a load vLLM will recompute: it keeps those before the first bad block."""
        if (load := self.ledger.load(request_id)) is not None:
            lost = self.layout.lost(load.blocks, bad_blocks, load.local_tokens, load.tokens)
            load.lost_tokens = max(load.lost_tokens or 0, lost)

    def _close(self, loads: Iterable[str], saves: Iterable[str]) -> Closed:
        """Close the complete loads and saves that their connectors have not withdrawn."""
        now_ns, next_orders = wall_ns(), self.next_orders
        closed = self.ledger.close(loads, saves, now_ns)
        if closed.loads:
            next_orders.orders.closed += [request for request, _ in closed.loads]
        for request, load in closed.loads:
            if load.failed and load.is_async:  # the request of a synchronous one runs on, and can't loop
                self.lookups.ban(request, load.connector_index)
            self.isolation.load_ended(load.connector_index, load.opened_ns, failed=load.failed)
            self.observer.load_ended(request, load)
        if closed.saves:
            next_orders.orders.saved += [(index, request) for request, index, _ in closed.saves]
        for request, index, save in closed.saves:
            if not save.is_abandoned:
                self.isolation.saved(index, save.promised_ns)
            self.observer.saved(request, index, save, save.arrived_ns or now_ns)
        return closed


def released_set(ended: Iterable[str], by_rank: Iterable[Sequence[str]], *, is_aggregated: bool) -> set[str]:
    """Return the requests whose saves have all ended as the set that vLLM would have made of the same reports.

    vLLM frees blocks in a set's order: in another one, later requests would get other block ids. With vLLM's own router
    each worker makes a set, pickle makes another of it, and the aggregator a third of those that every rank has
    reported.

    ``by_rank`` are the requests whose saves each rank has reported in this step, in the order of its reports;
    ``is_aggregated`` is whether the workers' outputs went through an aggregator, and were pickled for it.
    """
    if not is_aggregated:
        return set(ended)
    # Iterators and lists below, as Python makes a set of a dict or of a set in another way.
    last: dict[str, None] = {}  # a request ends with the last rank that reports it
    for requests in by_rank:
        for request in set(iter(set(requests))):  # the worker's set, and pickle's
            last.pop(request, None)
            last[request] = None
    left = dict.fromkeys(ended)
    return set(chain((each for each in last if each in left), (each for each in left if each not in last)))
