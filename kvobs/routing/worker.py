"""Route on a worker's side: give each connector its part, and pass the connectors' reports on to the scheduler.

There is one instance in every worker. It does not decide on completions: the scheduler counts them by rank.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from kvobs.clock import wall_ns
from kvobs.connectors.block_copies import BlockCopies, CopyBlocks
from kvobs.connectors.sub_connector import SubConnector
from kvobs.log import once
from kvobs.routing.metadata import (
    LoadOrder,
    MultiHandshakeMetadata,
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
    MultiKVEvents,
    Orders,
    as_set,
)
from kvobs.routing.open_loads import OpenLoads
from kvobs.routing.worker_isolation import WorkerGates
from kvobs.state.events import WorkerObserver
from kvobs.state.transfers import Report, ReportKind
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

KVConnectorTransferResults = versions.transfer_results()
FURTHER_RESULTS = versions.further_results()
ENDINGS = (ReportKind.RECEIVED, ReportKind.FAILED, ReportKind.SAVED)
NO_ORDERS = Orders()
BEGUN_AT_MOST = 10_000  # entries that are never reported must not accumulate


class StepWaits(Protocol):
    """Measures how long steps wait for loads and saves."""

    last_load_ns: dict[int, int]
    """The end of the last layer wait of a step with synchronous loads, in ns since the epoch, by connector."""

    def close_step(self, *, has_forward: bool, has_sync_loads: bool) -> dict[int, int]:
        """End a step; return the time of each connector's synchronous loads within it, in ns."""


class WorkerStats(Protocol):
    """Gathers the stats that a worker sends with a step's output."""

    def collect(self) -> KVConnectorStats | None:
        """Return the stats of a step."""


@dataclass(eq=False, kw_only=True)
class WorkerSide:
    """Routes a worker's hooks."""

    connectors: Sequence[SubConnector]
    rank: int  # within its engine
    ids_are_unique: bool  # whether a block id identifies a request: it is unique only within a KV cache group
    copies: BlockCopies
    gates: WorkerGates | None  # of the isolated connectors, if there are any
    observer: WorkerObserver
    stats: WorkerStats
    block_bytes: tuple[int, ...] = ()  # as in ``MultiHandshakeMetadata``
    waits: StepWaits = field(init=False)
    """Set, and ``bind`` called, before the first hook and whenever a connector's hooks have changed."""

    def __post_init__(self) -> None:
        self._load_ns: dict[int, int] = {}  # connector -> time of its sync loads in this step
        self._loaded_ns: dict[int, int] = {}  # connector -> end of its last layer wait in this step
        self._meta: MultiKVConnectorMetadata | None = None
        self._orders = NO_ORDERS
        names_failed = KVConnectorTransferResults is not None
        self._open = OpenLoads(ids_are_unique=self.ids_are_unique, names_failed=names_failed)
        self._isolated = frozenset([connector.index for connector in self.connectors if connector.gate is not None])
        self._began: dict[tuple[int, str], int] = {}  # (connector, request) -> when this rank got the order
        self._reports: list[Report] = []
        self._failed_syncs: set[str] = set()
        self._bad_blocks: set[int] = set()  # of these, which are reported by request
        self._further: dict[str, list[Any]] = {}  # further fields of the connectors' results

    def bind(self) -> None:
        """Note which hooks each connector implements; again when a plug-in has replaced one."""
        preempting, with_events = "handle_preemptions", "get_kv_connector_kv_cache_events"
        self._handling_preemptions = [connector for connector in self.connectors if preempting in connector.implemented]
        self._with_events = [connector for connector in self.connectors if with_events in connector.implemented]
        if self.gates is not None:
            self.gates.bind(self.connectors)

    # Before the forward

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        meta: Any = kv_connector_metadata
        if not isinstance(meta, MultiKVConnectorMetadata):
            raise _foreign(meta)
        if self.gates is not None:
            self.gates.begin_step(meta)
        for connector in self._handling_preemptions:
            connector.handle_preemptions(meta.metadata[connector.index])

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(connector_metadata, MultiKVConnectorMetadata):
            raise _foreign(connector_metadata)
        self._meta = meta = connector_metadata
        self._orders = orders = meta.orders if meta.orders is not None else NO_ORDERS
        loads = () if orders is NO_ORDERS else [(load.connector_index, load.note) for load in orders.loads.values()]
        if self.observer.wants_reports and orders is not NO_ORDERS:
            self.observer.reported(None, ReportKind.RECEIVED, orders.closed)
            self.observer.reported(None, ReportKind.FAILED, orders.failed)
        self.observer.step_begun(meta.note, loads)
        if self.gates is not None:
            self.gates.begin_step(meta)
            self.gates.lose(meta.lost)
        if orders is not NO_ORDERS:
            self._take(orders)
        for connector, part in zip(self.connectors, meta.metadata, strict=True):
            connector.bind_connector_metadata(part)

    def _take(self, orders: Orders) -> None:
        for request, load in self._open.take(orders):
            self._began.pop((load.connector_index, request), None)  # a rank need not report
        self._note_begin(orders)
        for save in orders.saved:  # some of them were promised in this same step
            self._began.pop(save, None)

    def _note_begin(self, orders: Orders) -> None:
        """Note when this rank got the orders for loads and saves, until it reports their end."""
        begun = [(load.connector_index, request) for request, load in orders.loads.items()] + orders.promised
        self._began.update(dict.fromkeys(begun, wall_ns()))
        while len(self._began) > BEGUN_AT_MOST:
            del self._began[next(iter(self._began))]

    # After the forward

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Collect the connectors' reports for the scheduler, which counts them; return what vLLM must read itself.

        These are failed loads: vLLM reads them before it calls the scheduler's side. Its aggregator passes on a failure
        once every rank has reported the load, so the owners' receipts are returned too.
        """
        received: set[str] = set()
        failed: set[str] = set()
        may_hide = self.gates is not None or (self._meta is not None and self._meta.isolated is not None)
        for connector in self.connectors:
            finished = self._finished_for(connector, finished_req_ids) if may_hide else finished_req_ids
            results = connector.get_transfer_results(finished)
            if FURTHER_RESULTS:
                self._note_further(results)
            if results.failed_recving or results.finished_recving or results.finished_sending:
                arrived, bad = as_set(results.finished_recving), as_set(results.failed_recving)
                owned = self._open.first_of_owned(connector.index, arrived)
                if self.observer.may_refuse and owned:
                    bad = bad | self.observer.refused(connector.index, owned - bad)
                received |= owned
                failed |= bad & owned
                self._report(connector, ReportKind.FAILED, bad)
                if bad:
                    self._note_bad_syncs(connector, bad)
                self._report(connector, ReportKind.RECEIVED, arrived - bad)
                self._report(connector, ReportKind.SAVED, results.finished_sending)
        # Failures found by the scheduler's side: every rank reports them in the same step.
        ordered = self._orders.failed
        further = {name: agreed(values) for name, values in self._further.items()} if self._further else {}
        self._further.clear()
        return KVConnectorTransferResults(
            finished_recving=received.union(ordered), failed_recving=failed.union(ordered), **further
        )

    def _note_bad_syncs(self, connector: SubConnector, failed: set[str]) -> None:
        """Note the blocks of the step's synchronous loads that another connector reports as failed.

        vLLM reads a failed load of a request that waits only. The connector may have written into these blocks.
        """
        for request, load in self._open.syncs_of_others(connector.index, failed, self._orders.loads).items():
            self._failed_syncs.add(request)
            self._bad_blocks |= _blocks_of(load)

    def _finished_for(self, connector: SubConnector, finished: set[str]) -> set[str]:
        """Return the finished requests for a connector, without those hidden from it."""
        isolated = self._meta.isolated if self._meta is not None else None
        if isolated is not None and (hidden := isolated.hidden.get(connector.index)):
            finished = finished - hidden
        return self.gates.finished(connector.index, finished) if self.gates is not None else finished

    def _note_further(self, results: Any) -> None:
        """Keep the further fields of a connector's results, if they have content."""
        for name in FURTHER_RESULTS:
            if value := getattr(results, name):
                self._further.setdefault(name, []).append(value)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Collect the connectors' reports in vLLM before 0.30, which has no ``get_transfer_results``."""
        if KVConnectorTransferResults is not None:
            received = self.get_transfer_results(finished_req_ids).finished_recving
            return None, received or None
        for connector in self.connectors:
            sent, received = connector.get_finished(self._finished_for(connector, finished_req_ids))
            self._report(connector, ReportKind.RECEIVED, received or ())
            self._report(connector, ReportKind.SAVED, sent or ())
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the bad blocks that the connectors report, whoever loads them.

        With several KV cache groups a block id does not identify its request: an asynchronous load with such a block is
        reported as failed instead. For all others this is not possible, and vLLM raises.
        """
        passed_on, self._bad_blocks = self._bad_blocks, set()
        for connector in self.connectors:
            bad = connector.get_block_ids_with_load_errors()
            if bad:
                passed_on |= self._attribute(connector, bad)
        if self.gates is not None and self._meta is not None:
            for request, load in self.gates.failed_sync_loads(self._meta):
                self._failed_syncs.add(request)
                passed_on |= _blocks_of(load) if self.ids_are_unique else set()  # or vLLM crashes
            for _, load in self.gates.overwritten(self._open.resumed):
                passed_on |= _blocks_of(load) if self.ids_are_unique else set()
        return passed_on

    def _attribute(self, connector: SubConnector, bad: set[int]) -> set[int]:
        """Report the loads that a connector's bad blocks belong to; return the blocks to pass on to vLLM."""
        passed_on, reports, failed_syncs, unknown = self._open.attribute(connector.index, bad, self._orders.loads)
        self._failed_syncs |= failed_syncs
        for kind, request in reports:
            self._report(connector, kind, (request,))
        if unknown:  # a request must not continue with them
            may_raise = self.ids_are_unique or connector.gate is None  # vLLM, with several KV cache groups
            outcome = "passed on to vLLM" if may_raise else "ignored, because vLLM would crash the engine"
            text = "connector %r reported load errors for blocks that belong to no open load (such as %s); they are %s"
            once(f"blocks:{connector.name}", logging.WARNING, text, connector.name, sorted(unknown)[:4], outcome)
            passed_on |= unknown if may_raise else set()
        return passed_on

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Measure the waits of the step, whose layers are done, and return the stats."""
        if (meta := self._meta) is not None:
            has_sync_loads = self._orders is not NO_ORDERS and self._orders.has_sync_loads
            self._load_ns = self.waits.close_step(has_forward=meta.has_forward, has_sync_loads=has_sync_loads)
            self._loaded_ns = self.waits.last_load_ns
        return self.stats.collect()

    def get_kv_connector_kv_cache_events(self) -> MultiKVEvents | None:
        by_index: dict[int, Any] = {}
        for connector in self._with_events:
            if (events := connector.get_kv_connector_kv_cache_events()) is not None:
                by_index[connector.index] = events
        return MultiKVEvents(by_index, self._isolated) if by_index else None

    def build_connector_worker_meta(self) -> MultiKVConnectorWorkerMetadata | None:
        metadata, has_parts = [], False
        for connector in self.connectors:
            metadata.append(part := connector.build_connector_worker_meta())
            has_parts = has_parts or part is not None
        if self._orders.loads or self._failed_syncs:
            self._report_syncs()
        broken: frozenset[tuple[int, int]] = frozenset()
        if self.gates is not None:
            for index, request, has_not_begun in self.gates.failed_loads(self._meta) if self._meta is not None else ():
                kind = ReportKind.FAILED if has_not_begun else ReportKind.UNMAPPED_BAD_BLOCKS
                self._report(self.connectors[index], kind, (request,))
            for request, load in self.gates.spoiled(self._open.by_request):
                self._report(self.connectors[load.connector_index], ReportKind.UNMAPPED_BAD_BLOCKS, (request,))
            broken = self.gates.take_broken()
        reports, self._reports = self._reports, []
        notes = self.observer.take_notes() if self.observer.wants_reports else []
        if not (reports or broken or notes or has_parts or self._orders.wants_output):
            return None
        parts, isolated = tuple(metadata), self._isolated
        return MultiKVConnectorWorkerMetadata(parts, reports=reports, broken=broken, notes=notes, isolated=isolated)

    def _report_syncs(self) -> None:
        """Report the end of this step's synchronous loads: connectors do not report it.

        The step waited once for all loads of a connector: each has its share of that, by its blocks.
        """
        loads = {request: load for request, load in self._orders.loads.items() if not load.is_async}
        left_ns, left_blocks = Counter(self._load_ns), Counter[int]()
        for load in loads.values():
            left_blocks[load.connector_index] += _size(load)
        ends: list[tuple[ReportKind, int, int, str, int, int]] = []
        for request, load in loads.items():
            kind = ReportKind.SYNC_FAILED if request in self._failed_syncs else ReportKind.SYNC_DONE
            if self.observer.wants_reports:
                self.observer.reported(load.connector_index, kind, (request,))
            spent_ns = left_ns[load.connector_index] * _size(load) // left_blocks[load.connector_index]
            left_ns[load.connector_index] -= spent_ns
            left_blocks[load.connector_index] -= _size(load)
            began_ns = self._began.pop((load.connector_index, request), 0)
            # With layer hooks it is complete after the last layer wait.
            ended_ns = max(
                began_ns + self._load_ns.get(load.connector_index, 0), self._loaded_ns.get(load.connector_index, 0)
            )
            ends.append((kind, load.connector_index, ended_ns, request, spent_ns, began_ns))
        for (kind, index, ended_ns), alike in groupby(ends, itemgetter(0, 1, 2)):
            _, _, _, requests, spent, began = zip(*alike, strict=True)
            self._reports.append(Report(self.rank, kind, index, ended_ns, requests, spent, began))
        self._failed_syncs.clear()

    def clear_connector_metadata(self) -> None:
        self._meta, self._orders = None, NO_ORDERS
        self._open.end_step()
        for connector in self.connectors:
            connector.clear_connector_metadata()
        self.observer.step_ended()

    # Once

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocks) -> None:
        """Give each connector its own copy operation, so that its copies are counted."""
        for connector in self.connectors:
            if "set_host_xfer_buffer_ops" in connector.implemented:
                connector.set_host_xfer_buffer_ops(self.copies.operation(connector.index, copy_operation))

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the memory pool that a connector provides for the KV cache, if any."""
        answers = ((connector.name, connector.get_mem_pool_context()) for connector in self.connectors)
        pools = {name: pool for name, pool in answers if pool is not None}
        if len(pools) > 1:
            raise ValueError(
                f"the KV cache uses one memory pool, but several connectors provide one: {', '.join(pools)}. "
                "Configure custom_mem_pool on one of them only"
            )
        return next(iter(pools.values()), None)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata | None:
        """Return the connectors' handshakes, which isolated connectors failed at the start, and sizes of blocks."""
        handshakes = tuple(connector.get_handshake_metadata() for connector in self.connectors)
        broken = self.gates.broken if self.gates is not None else frozenset()
        if not broken and not self.block_bytes and all(handshake is None for handshake in handshakes):
            return None
        return MultiHandshakeMetadata(handshakes, broken, self.block_bytes)

    def _report(self, connector: SubConnector, kind: ReportKind, requests: Any) -> None:
        if not requests:
            return
        requests, index, now = as_set(requests), connector.index, wall_ns()
        if self.observer.wants_reports:
            self.observer.reported(index, kind, requests)
        each, began = tuple(requests), self._began
        began_ns = tuple([began.pop((index, request), 0) if kind in ENDINGS else 0 for request in each])
        spent_ns = tuple([now - at if at else 0 for at in began_ns])
        self._reports.append(Report(self.rank, kind, index, now, each, spent_ns, began_ns))


def _foreign(meta: object) -> TypeError:
    return TypeError(f"metadata of another connector reached kvobs: {type(meta).__name__}")


def agreed(values: Sequence[Any]) -> Any:
    """Return one value for several connectors': sets united, and dicts joined without entries that two of them dispute.

    As in vLLM's router, a disputed entry belongs to no connector. Other values must be equal; else
    the result is the first one's type, empty.
    """
    first, *others = values
    if isinstance(first, set):
        return first.union(*others)
    if isinstance(first, dict):
        entries = {key: value for each in values for key, value in each.items()}
        return {k: v for k, v in entries.items() if all(each.get(k, v) == v for each in values)}
    return first if all(other == first for other in others) else type(first)()


def _blocks_of(load: LoadOrder) -> set[int]:
    return {block for group in load.blocks for block in group}


def _size(load: LoadOrder) -> int:
    """Return the number of blocks that a load fills; at least one."""
    return max(1, sum(map(len, load.blocks)))
