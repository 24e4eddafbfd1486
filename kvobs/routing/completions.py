"""Count the workers' reports, close finished transfers, and rewrite the workers' output before vLLM reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kvobs.children.child import Child
from kvobs.faults import contained
from kvobs.routing.isolation import Isolation
from kvobs.routing.lookups import Offers
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata, NextOrders, checked
from kvobs.routing.output_view import OutputView, Over, failed_loads, in_order_of
from kvobs.routing.visibility import Visibility
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListener
from kvobs.state.transfers import ReportKind
from kvobs.telemetry.recording.recorder import wall_ns

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput


class Completions:
    """Decides from the workers' reports which loads and saves have ended.

    Args:
        children: all children.
        ledger: the open loads and saves.
        visibility: the requests hidden from each child.
        listener: receives finished transfers.
        next_orders: receives the transfers that the workers must forget.
        isolation: receives the isolated connectors that failed on a worker.
        offers: the offers of a connector whose asynchronous load failed are not used until its request has run.
        layout: block sizes and bytes per token of the KV cache.
        ranks: the number of all workers.
        to_reset: the connectors to be reset after a sibling's failed synchronous load.

    Attributes:
        early: requests whose saves were all done before vLLM got the promises.
    """

    def __init__(
        self,
        children: Sequence[Child],
        ledger: Ledger,
        visibility: Sequence[Visibility],
        listener: TransferListener,
        *,
        next_orders: NextOrders,
        isolation: Isolation,
        offers: Offers,
        layout: CacheLayout,
        ranks: int,
        to_reset: Sequence[Child],
    ) -> None:
        self._children = children
        self._ledger = ledger
        self._listener = listener
        self._next = next_orders
        self._isolation = isolation
        self._offers = offers
        self._layout = layout
        self._ranks = ranks
        self._to_reset = to_reset
        self._view = OutputView(children, ledger, visibility, listener.stray)
        self.early: set[str] = set()

    def take_in(self, output: KVConnectorOutput) -> None:
        """Process the output of a step, and rewrite it."""
        if (
            output.kv_connector_worker_meta is None
            and not (failed_loads(output) or self.early or self._view.is_watched)
            and not self._ledger.has_ended
        ):  # as in most steps
            output.finished_recving = output.finished_sending = None
            return
        meta = checked(output.kv_connector_worker_meta, len(self._children), self._ranks)
        failed_syncs = self._record(meta, output.invalid_block_ids) if meta is not None else {}
        for request_id in failed_loads(output):
            self._ledger.echoed(request_id)
        loads = self._ledger.take_loads_in()
        sent = self._sent(meta, is_aggregated=output.expected_finished_count > 0)
        if loads or sent or self._view.is_watched:
            over = self._view.show(output, meta, loads, sent)
            self._close(over)
            sent = over.saves
        output.finished_recving = self._ledger.take_received() or None
        output.finished_sending = in_order_of(sent, self._ledger.take_sent()) or None
        for index, requests in failed_syncs.items():
            self._listener.sync_loads_failed(index, len(requests), self._reset_siblings(index))

    def _sent(self, meta: MultiKVConnectorWorkerMetadata | None, *, is_aggregated: bool) -> set[str]:
        """Return the requests whose promised saves are complete, as vLLM would have them."""
        ended = [*self._ledger.take_saves_in(), *self.early]
        self.early.clear()
        if len(ended) <= 1 or meta is None:
            return set(ended)
        by_rank: dict[int, dict[str, None]] = {}
        for rank, kind, request, *_ in meta.reports:
            if kind is ReportKind.SAVED and self._ledger.is_saved_on(rank, request):
                requests = by_rank.setdefault(rank, {})
                requests.pop(request, None)  # its last promise counts
                requests[request] = None
        return released_set(ended, map(list, by_rank.values()), is_aggregated=is_aggregated)

    def _record(self, meta: MultiKVConnectorWorkerMetadata, bad_blocks: set[int]) -> dict[int, set[str]]:
        """Process the reports; return the requests whose synchronous load failed, by child."""
        failed_syncs: dict[int, set[str]] = {}
        self._isolation.record_failures(meta.broken)
        now_ns = wall_ns()
        for report in meta.reports:
            if (stray := self._ledger.record(report, now_ns)) is not None:
                self._listener.stray(stray)
            if report.kind in (ReportKind.HOLED, ReportKind.SYNC_FAILED):
                self._note_loss(report.request, bad_blocks)
            if report.kind is ReportKind.SYNC_FAILED:
                failed_syncs.setdefault(report.child, set()).add(report.request)
        return failed_syncs

    @contained("record")
    def _note_loss(self, request_id: str, bad_blocks: set[int]) -> None:
        """Note how many tokens of a load vLLM will recompute: it keeps those before the first bad block."""
        load = self._ledger.load(request_id)
        if load is not None:
            lost = self._layout.lost(load.blocks, bad_blocks, load.tokens)
            load.lost_tokens = max(load.lost_tokens or 0, lost)

    def _close(self, over: Over) -> None:
        """Close the complete loads and saves that their children have not withdrawn."""
        for request_id in over.loads:
            load = self._ledger.close_load(request_id, wall_ns())
            if load is not None:
                self._next.orders.closed.append(request_id)
                if load.failed and load.is_async:  # the request of a synchronous one runs on, and can't loop
                    self._offers.ban(request_id, load.child)
                self._listener.load_ended(request_id, load)
        for request_id in (*over.saves, *self._ledger.take_saves_in()):  # some end with their load
            for index, save in self._ledger.close_saves(request_id).items():
                self._next.orders.saved.append((index, request_id))
                ended_ns = max(save.arrived.values(), default=wall_ns())
                self._listener.saved(request_id, index, save, ended_ns)

    def _reset_siblings(self, index: int) -> list[str]:
        """Reset the configured caches after a failed synchronous load of this child; return whose were reset."""
        return [child.name for child in self._to_reset if child.index != index and child.reset_cache() is True]


def released_set(ended: Iterable[str], by_rank: Iterable[Sequence[str]], *, is_aggregated: bool) -> set[str]:
    """Return the requests whose saves have all ended as the set that vLLM would have made of the same reports.

    vLLM frees blocks in a set's order: in another one, later requests would get other block ids. With vLLM's own router
    each worker makes a set, pickle makes another of it, and the aggregator a third of those that every rank has
    reported.

    Args:
        ended: the requests.
        by_rank: the requests whose saves each rank has reported in this step, in the order of its reports.
        is_aggregated: whether the workers' outputs went through an aggregator, and were pickled for it.
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
