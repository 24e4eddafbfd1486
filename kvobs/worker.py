"""A worker's side of the routing: hand each child its part, and report what the children say to the scheduler.

One instance lives in every worker. It decides nothing about completions: the scheduler counts them rank by rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvobs.block_copies import BlockCopies, CopyBlocks
from kvobs.children import Child
from kvobs.children import TransferResults as KVConnectorTransferResults
from kvobs.context import TraceContext
from kvobs.faults import contained
from kvobs.metadata import (
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
)
from kvobs.notices import once
from kvobs.recorder import Recorder, wall_ns
from kvobs.reports import Kind, Report
from kvobs.stalls import Stalls
from kvobs.stats import Collector, MultiKVConnectorStats
from kvobs.worker_gates import WorkerGates

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


ENDINGS = (Kind.RECEIVED, Kind.FAILED, Kind.SAVED)
BEGUN_AT_MOST = 10_000  # what is never reported must not pile up


class WorkerSide:
    """Routes a worker's hooks.

    Args:
        children: the children's worker-side connectors.
        recorder: this process's numbers.
        rank: this worker's rank within its engine.
        kv_cache_groups: the number of KV cache groups; block ids are unique within one only.
        copies: makes the operations that children copy blocks by.
    """

    def __init__(
        self, children: Sequence[Child], recorder: Recorder, rank: int, kv_cache_groups: int, copies: BlockCopies
    ) -> None:
        self.children = children
        self._copies = copies
        self._rank = rank
        self._ids_are_unique = kv_cache_groups <= 1
        self._collector = Collector(children, recorder)
        self._stalls = Stalls(children, recorder)
        self._journal = recorder.journal
        self._load_ns: dict[int, int] = {}  # child -> what its sync loads took of this step
        self._loaded_ns: dict[int, int] = {}  # child -> when its last layer was waited for in this step
        self.layer_calls = self._stalls.layer_calls
        self._meta: MultiKVConnectorMetadata | None = None
        self._calls = recorder.tracer
        self._flight = recorder.flight
        self._loads: dict[str, LoadOrder] = {}  # open loads, to tell whose a bad block is
        self._orphaned: set[str] = set()  # those of them whose request has ended
        self._began: dict[tuple[int, str], int] = {}  # (child, request) -> when this rank was told of it
        self._reports: list[Report] = []
        self._failed_syncs: set[str] = set()
        self._gates = WorkerGates(children)
        self._with_events = [child for child in children if child.does("get_kv_connector_kv_cache_events")]

    # Before the forward

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        meta = _ours(kv_connector_metadata)
        self._gates.begin_step(meta)
        for child, own in zip(self.children, meta.metadata, strict=True):
            child.handle_preemptions(own)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._meta = meta = _ours(connector_metadata)
        if self._flight is not None:
            self._flight.begin_step(has_forward=meta.has_forward)
            self._flight.told(meta.loads, meta.promised)
        self._orphaned.update(meta.orphaned)  # before those that are over already
        for request in meta.closed:
            if (over := self._loads.pop(request, None)) is not None:
                self._began.pop((over.child, request), None)  # a rank need not report
            self._orphaned.discard(request)
        self._loads.update(meta.loads)
        self._gates.begin_step(meta)
        self._note_begin(meta)
        for save in meta.saved:  # some of them promised in this step, too
            self._began.pop(save, None)
        for child, own in zip(self.children, meta.metadata, strict=True):
            if own is not None or child.gate is None:  # an isolated one may have failed to build any
                child.bind_connector_metadata(own)

    @contained("trace")
    def _note_begin(self, meta: MultiKVConnectorMetadata) -> None:
        """Note when this rank heard of loads and saves, until it reports them."""
        if meta.loads or meta.promised:
            begun = [*((load.child, request) for request, load in meta.loads.items()), *meta.promised]
            self._began.update(dict.fromkeys(begun, wall_ns()))
            while len(self._began) > BEGUN_AT_MOST:
                del self._began[next(iter(self._began))]
        if self._calls is not None:
            loads: dict[int, list[TraceContext]] = {}
            for load in meta.loads.values():
                if load.trace is not None:
                    loads.setdefault(load.child, []).append(load.trace)
            self._calls.join_step(meta.trace, loads)

    # After the forward

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Collect the children's reports for the scheduler; tell vLLM itself only of the failures it must hear of.

        vLLM's aggregator passes a failure on when every rank reports it in the same step, so the scheduler orders it.
        """
        for child in self.children:
            results = child.get_transfer_results(finished_req_ids)
            if results.failed_recving or results.finished_recving or results.finished_sending:
                self._report(child, Kind.FAILED, results.failed_recving)
                self._report(child, Kind.RECEIVED, results.finished_recving - results.failed_recving)
                self._report(child, Kind.SAVED, results.finished_sending)
        failed = self._meta.failed if self._meta is not None else ()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=set(failed))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Do the same for vLLM before 0.30, which has no ``get_transfer_results``."""
        if KVConnectorTransferResults is not None:
            received = self.get_transfer_results(finished_req_ids).finished_recving
            return None, received or None
        for child in self.children:
            sent, received = child.get_finished(finished_req_ids)
            self._report(child, Kind.RECEIVED, received or ())
            self._report(child, Kind.SAVED, sent or ())
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the bad blocks that vLLM can map to a request: those of loads that the reporting child owns.

        With several KV cache groups a block id does not tell its request: there the whole async load is reported as
        failed instead. A failed synchronous load has no such way out; vLLM says so itself.
        """
        passed_on: set[int] = set()
        for child in self.children:
            bad = child.get_block_ids_with_load_errors()
            if bad:
                passed_on |= self._attribute(child, bad)
        return passed_on

    def _attribute(self, child: Child, bad: set[int]) -> set[int]:
        passed_on: set[int] = set()
        owned: set[int] = set()
        for request, load in self._loads.items():
            hit = _hits(bad, load) if load.child == child.index else set()
            if not hit:
                continue
            owned |= hit
            if not load.is_async:
                self._failed_syncs.add(request)
            elif self._ids_are_unique or KVConnectorTransferResults is None:
                self._report(child, Kind.HOLED, (request,))
            else:
                self._report(child, Kind.SPOILED, (request,))
                continue
            passed_on |= hit
        if bad - owned:
            once(
                f"blocks:{child.name}",
                logging.WARNING,
                "connector %r reported load errors of blocks that no load of its own fills (such as %s); ignored",
                child.name,
                sorted(bad - owned)[:4],
            )
        return passed_on

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """Return what there is to tell; kvobs's own numbers when the scheduler says so, or when nothing else runs."""
        return self._collector.collect(is_due=self._close_step() or False)

    @contained("record")
    def _close_step(self) -> bool:
        """Measure the step that ends; return whether kvobs's own numbers are due."""
        meta = self._meta
        if meta is None:
            return False
        has_sync_loads = bool(meta.loads) and any(not load.is_async for load in meta.loads.values())
        self._loaded_ns = self._stalls.last_load_ns if has_sync_loads else {}
        self._load_ns = self._stalls.close_step(has_forward=meta.has_forward, has_sync_loads=has_sync_loads)
        is_due = meta.flush or (not meta.has_forward and self._has_news(meta))
        if is_due:
            self._stalls.flush()
        return is_due

    def _has_news(self, meta: MultiKVConnectorMetadata) -> bool:
        """Return whether something has happened that may be the last thing that does.

        An arrived load is not: its request goes on with a forward, and to its first token, unless it has ended.
        """
        return bool(meta.failed) or self._journal.has_urgent or not all(map(self._goes_on, self._reports))

    def _goes_on(self, report: Report) -> bool:
        is_open = report.request in self._loads and report.request not in self._orphaned
        return report.kind is Kind.RECEIVED and is_open

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        by_child: dict[int, Any] = {}
        for child in self._with_events:
            if (events := child.get_kv_connector_kv_cache_events()) is not None:
                by_child[child.index] = events
        return MultiKVEvents(by_child) if by_child else None

    def build_connector_worker_meta(self) -> MultiKVConnectorWorkerMetadata | None:
        metadata = tuple([child.build_connector_worker_meta() for child in self.children])
        self._report_syncs()
        for child, request in self._gates.not_begun(self._meta):
            self._report(self.children[child], Kind.FAILED, (request,))
        reports, self._reports = self._reports, []
        if self._flight is not None:
            self._flight.reported(reports)
        broken = self._gates.take_broken()
        if not reports and not broken and all(own is None for own in metadata):
            return None
        return MultiKVConnectorWorkerMetadata(metadata=metadata, reports=reports, broken=broken)

    def _report_syncs(self) -> None:
        """Report the synchronous loads of this step: they are over, and no child says so."""
        for request, load in self._meta.loads.items() if self._meta is not None else ():
            if not load.is_async:
                kind = Kind.SYNC_FAILED if request in self._failed_syncs else Kind.SYNC_DONE
                spent_ns = self._load_ns.get(load.child, 0)
                began_ns = self._began.pop((load.child, request), 0)
                # It is complete with the last layer that was waited for, where layers are.
                ended_ns = max(began_ns + spent_ns, self._loaded_ns.get(load.child, 0))
                self._reports.append(Report(self._rank, kind, request, load.child, ended_ns, spent_ns, began_ns))
        self._failed_syncs.clear()

    def clear_connector_metadata(self) -> None:
        self._meta = None
        for child in self.children:
            child.clear_connector_metadata()
        if self._flight is not None:
            self._flight.end_step()

    # Once

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        """Hand each child an operation of its own, so that what it copies is counted as its."""
        for child in self.children:
            if child.does("set_host_xfer_buffer_ops"):
                child.set_host_xfer_buffer_ops(self._copies.operation(child.index, copy_operation))

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the one memory pool that a child wants the KV cache in, if any."""
        wanted = {child.name: child.get_mem_pool_context() for child in self.children}
        found = {name: pool for name, pool in wanted.items() if pool is not None}
        if len(found) > 1:
            raise ValueError(
                f"the KV cache lives in one memory pool, and several connectors bring their own: {', '.join(found)}. "
                "Configure custom_mem_pool on one of them only"
            )
        return next(iter(found.values()), None)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        handshakes = tuple(child.get_handshake_metadata() for child in self.children)
        return None if all(own is None for own in handshakes) else MultiHandshakeMetadata(handshakes)

    def _report(self, child: Child, kind: Kind, requests: Any) -> None:
        now = wall_ns() if requests else 0
        for request in requests or ():
            began_ns = self._began.pop((child.index, request), 0) if kind in ENDINGS else 0
            self._reports.append(Report(self._rank, kind, request, child.index, now, began_ns=began_ns))


def _ours(metadata: KVConnectorMetadata) -> MultiKVConnectorMetadata:
    if not isinstance(metadata, MultiKVConnectorMetadata):
        raise TypeError(f"metadata of another connector reached kvobs: {type(metadata).__name__}")
    return metadata


def _hits(bad: set[int], load: LoadOrder) -> set[int]:
    return {block for group in load.blocks for block in group if block in bad}
