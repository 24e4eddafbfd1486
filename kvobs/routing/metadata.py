"""Messages between the scheduler's connector and the workers': metadata down, worker metadata and events up.

All are pickled. The connectors' parts are identified by position.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs.connectors.endings import must_pass
from kvobs.log import line, once
from kvobs.state.cache_layout import Blocks
from kvobs.state.ledger import Ledger
from kvobs.state.quarantine import IsolationState
from kvobs.state.transfers import Report, ReportKind


class LoadOrder(NamedTuple):
    """A load that vLLM admitted in this step, for the workers.

    ``blocks`` are the ids of the blocks that the load fills, per KV cache group; ``note`` is an annotator's. ``hit_by``
    are isolated connectors that also offered tokens: they may load them without having been chosen.
    """

    connector_index: int
    is_async: bool
    blocks: Blocks
    note: Any = None
    hit_by: tuple[int, ...] = ()


class Sealed(NamedTuple):
    """An isolated connector's part of a message, pickled separately so that it can fail alone; None: it has failed."""

    pickled: bytes | None


def sealed(parts: Sequence[Any], isolated: Collection[int]) -> tuple[Any, ...]:
    """Return the parts, with the parts of isolated connectors sealed."""
    return tuple([_seal(i, part) if i in isolated and part is not None else part for i, part in enumerate(parts)])


def _seal(index: int, part: Any) -> Sealed:
    try:
        return Sealed(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
    except BaseException as error:
        log_lost(index, error)
        return Sealed(None)


def opened(parts: Mapping[int, Any]) -> tuple[dict[int, Any], frozenset[int]]:
    """Return the parts by connector as they were, and the connectors whose part is lost: it is None."""
    left, lost = dict(parts), set[int]()
    for index, part in parts.items():
        if not isinstance(part, Sealed):
            continue
        left[index] = None
        if part.pickled is None:
            lost.add(index)
            continue
        try:
            left[index] = pickle.loads(part.pickled)
        except BaseException as error:
            log_lost(index, error)
            lost.add(index)
    return left, frozenset(lost)


def log_lost(index: int, error: BaseException) -> None:
    """Log once that an isolated connector's part of a message is lost; raise an error that must end the process."""
    if must_pass(error):
        raise error
    text = "a message of the best-effort connector at position %d to its other side is lost: %s: %s"
    once(f"lost:{index}", logging.WARNING, text, index, type(error).__name__, line(error))


@dataclass(slots=True)
class Orders:
    """Orders for the workers, and changes since their previous step."""

    loads: dict[str, LoadOrder] = field(default_factory=dict)  # request -> the load admitted in this step
    closed: list[str] = field(default_factory=list)  # requests whose load has ended: forget their blocks
    failed: tuple[str, ...] = ()  # requests whose load every rank must report to vLLM as failed
    unmade: tuple[str, ...] = ()  # requests of this step's synchronous loads that their connectors do not know of
    promised: list[tuple[int, str]] = field(default_factory=list)  # (connector, request) of new promised saves
    orphaned: list[str] = field(default_factory=list)  # requests that ended while their load is open
    saved: list[tuple[int, str]] = field(default_factory=list)  # (connector, request) of promised saves that have ended
    wants_output: bool = False  # transfers were given up: a worker must send an output, and vLLM drops an empty one

    @property
    def has_sync_loads(self) -> bool:
        """Whether the step waits for a load within it."""
        return any(not load.is_async for load in self.loads.values())


class NextOrders:
    """The orders for the next step, made once there are any: most steps have none."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: Orders | None = None  # so far

    @property
    def orders(self) -> Orders:
        """The orders, to be added to."""
        if self.made is None:
            self.made = Orders()
        return self.made

    def take(self, ledger: Ledger) -> Orders:
        """Return the orders with the ledger's failures, and forget them."""
        orders, self.made = self.orders, None
        orders.failed = ledger.take_failures()
        return orders


class Isolated(NamedTuple):
    """The isolation of connectors in one step."""

    states: Mapping[int, IsolationState]
    """By connector, of those that are isolated."""
    hidden: Mapping[int, frozenset[str]]
    """Finished requests that were hidden, by connector."""


@dataclass(init=False)
class MultiKVConnectorMetadata(stock.MultiKVConnectorMetadata):
    """The scheduler's metadata for the workers, for one step.

    ``metadata`` holds the connectors' own, by position. ``extra_async_saves`` is vLLM's count of promised saves: kvobs
    counts on the scheduler's side, and leaves it empty. What has its default is not pickled: in most steps all else.
    """

    orders: Orders | None = None
    has_forward: bool = True  # whether tokens are scheduled in this step
    note: Any = None  # an annotator's, for the workers' observers
    isolated: Isolated | None = None  # if connectors are isolated, or lookups may stay open
    lost: frozenset[int] = frozenset()  # isolated connectors whose metadata could not be pickled, or not be read here

    def __init__(self, metadata: tuple[base.KVConnectorMetadata, ...], **others: Any) -> None:
        self.metadata = metadata
        self.__dict__.update(others)


class IsolatingMetadata(MultiKVConnectorMetadata):
    """The same where connectors are isolated: each one's part is pickled separately, so that it can fail alone."""

    def __getstate__(self) -> dict[str, Any]:
        states = self.isolated.states if self.isolated is not None else ()
        return {**self.__dict__, "metadata": sealed(self.metadata, states)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        parts, lost = opened(dict(enumerate(self.metadata)))
        self.metadata = tuple(parts.values())
        if lost:
            self.lost = lost


@dataclass
class MultiKVConnectorWorkerMetadata(stock.MultiKVConnectorWorkerMetadata):
    """The workers' metadata for the scheduler: the connectors' own by position, and the connectors' reports."""

    reports: list[Report] = field(default_factory=list)
    broken: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (connector, epoch) of isolated connectors that failed on a worker
    notes: list[Any] = field(default_factory=list)  # of the workers' observers, for the scheduler's
    isolated: frozenset[int] = frozenset()  # the isolated connectors
    lost: frozenset[int] = frozenset()  # those whose own part could not be pickled, read or merged

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "metadata": sealed(self.metadata, self.isolated)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.isolated:
            parts, lost = opened(dict(enumerate(state["metadata"])))
            self.metadata = tuple(parts.values())
            self.lost |= lost

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> MultiKVConnectorWorkerMetadata:
        """Add another rank's metadata to this one: the connectors' by their own rule, reports concatenated."""
        if not isinstance(other, MultiKVConnectorWorkerMetadata) or len(other.metadata) != len(self.metadata):
            raise TypeError(
                f"can't aggregate worker metadata of {len(self.metadata)} connectors with {other!r}: all ranks must "
                "run the same --kv-transfer-config and the same version of kvobs"
            )
        merged, lost = [*self.metadata], set(self.lost | other.lost)
        for i, theirs in enumerate(other.metadata):
            if theirs is None:
                continue
            try:
                merged[i] = theirs if merged[i] is None else merged[i].aggregate(theirs)
            except BaseException as error:
                if i not in self.isolated:
                    raise
                log_lost(i, error)
                merged[i] = None
                lost.add(i)
        self.metadata = tuple(merged)
        self.reports += other.reports
        self.broken |= other.broken
        self.notes += other.notes
        self.lost = frozenset(lost)
        return self


def as_set(requests: Iterable[str]) -> set[str]:
    """Return request ids as a set: as vLLM's router, kvobs accepts any iterable of them."""
    return requests if isinstance(requests, set) else set(requests)


def checked(meta: object, connectors: int, ranks: int) -> MultiKVConnectorWorkerMetadata | None:
    """Validate worker metadata.

    Raises:
        TypeError: it belongs to another connector, or to different connectors.
        ValueError: a report's connector, rank or kind does not exist, or it lacks times.
    """
    if meta is None:
        return None
    if not isinstance(meta, MultiKVConnectorWorkerMetadata):
        raise TypeError(f"worker metadata of another connector reached kvobs: {type(meta).__name__}")
    if len(meta.metadata) != connectors:
        raise TypeError(f"worker metadata of {len(meta.metadata)} connectors reached kvobs, which has {connectors}")
    for report in meta.reports:
        rank, kind, index, _, requests, spent, began = report
        exists = 0 <= index < connectors and 0 <= rank < ranks and type(kind) is ReportKind
        if not exists or not len(requests) == len(spent) == len(began):
            raise ValueError(
                f"a worker's report can't belong to this engine: {report!r:.200}; allowed: connectors 0 to "
                f"{connectors - 1}, ranks 0 to {ranks - 1}, kinds {', '.join(ReportKind.__members__)}, with times of "
                "each request. All must run the same version of kvobs"
            )
    return meta


@dataclass
class MultiHandshakeMetadata(base.KVConnectorHandshakeMetadata):
    """One rank's message to the scheduler's side before the first request."""

    metadata: tuple[base.KVConnectorHandshakeMetadata | None, ...]  # the connectors', by position; None: it has none
    broken: frozenset[tuple[int, int]] = frozenset()  # the isolated connectors that failed at the start, with the epoch
    block_bytes: tuple[int, ...] = ()  # of a block on this rank, by KV cache group, if the scheduler can't compute them


class MultiKVEvents(KVConnectorKVEvents):
    """KV cache events of several connectors, each in its connector's own container.

    vLLM's aggregator merges ranks through ``get_all_events``, ``add_events`` and ``increment_workers``. Here an
    "event" of those calls is a pair (connector, container), so that each connector's own rule for merging ranks
    applies. The container of an isolated connector that fails is ``lost``: in such a pair it is None.
    """

    def __init__(self, by_index: dict[int, KVConnectorKVEvents], isolated: frozenset[int] = frozenset()) -> None:
        self.by_index = by_index
        self.isolated = isolated
        self.lost: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        if not self.isolated:
            return self.__dict__
        parts = {i: _seal(i, part) if i in self.isolated else part for i, part in self.by_index.items()}
        return {**self.__dict__, "by_index": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.by_index, lost = opened(self.by_index)
        for index in lost:
            self._lose(index)

    def get_all_events(self) -> list[Any]:
        """Return (connector, container) pairs, for ``add_events`` of another rank's object."""
        return [*self.by_index.items(), *((index, None) for index in self.lost)]

    def add_events(self, events: Sequence[Any]) -> None:
        """Merge another rank's (connector, container) pairs, and count its workers."""
        for index, container in events:
            if container is None or index in self.lost:
                self._lose(index)
            elif (mine := self.by_index.get(index)) is None:
                self.by_index[index] = container
            else:
                self._merge(index, mine, container)

    def add_of_same_rank(self, others: MultiKVEvents) -> None:
        """Add the events of another step of the same rank."""
        for index, container in others.get_all_events():
            if container is None or index in self.lost:
                self._lose(index)
            elif (mine := self.by_index.setdefault(index, container)) is not container:
                self._merge(index, mine, container, is_other_rank=False)

    def _merge(self, index: int, mine: Any, theirs: Any, *, is_other_rank: bool = True) -> None:
        try:
            mine.add_events(theirs.get_all_events())
            if is_other_rank:
                mine.increment_workers(theirs.get_number_of_workers())
        except BaseException as error:
            if index not in self.isolated:
                raise
            log_lost(index, error)
            self._lose(index)

    def _lose(self, index: int) -> None:
        self.by_index.pop(index, None)
        self.lost.add(index)

    def increment_workers(self, count: int = 1) -> None:
        """Do nothing: ``add_events`` has counted the workers, connector by connector."""

    def aggregate(self) -> MultiKVEvents:
        """Let each connector's container reduce its events to those that all its workers reported."""
        for container in self.by_index.values():
            container.aggregate()
        return self

    def get_number_of_workers(self) -> int:
        """Return the largest number of workers of any connector."""
        return max((container.get_number_of_workers() for container in self.by_index.values()), default=0)

    def clear_events(self) -> None:
        """Empty every connector's container."""
        for container in self.by_index.values():
            container.clear_events()
