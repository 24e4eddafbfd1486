"""Decide which hooks of isolated connectors a worker skips, and report their failures to the scheduler.

A connector that failed is still called, with its exceptions contained, so that its own state stays correct. Skipped
are: a step for which it built no metadata, since hooks would assert; its saves in a step whose synchronous load failed
or was never made; and everything after a failure of a hook that is called only once.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvobs.connectors.gate import AT_ANY_TIME, Gate, ends_for_good
from kvobs.connectors.specs import NEVER_AGAIN, name_among
from kvobs.connectors.sub_connector import SubConnector, Unbuilt
from kvobs.log import line, once
from kvobs.routing.metadata import LoadOrder, MultiKVConnectorMetadata
from kvobs.state.quarantine import FOR_GOOD, IsolationState
from kvobs.vllm_api.hooks import HOOKS, Cadence

_OPEN: frozenset[str] = frozenset()
_STEP = frozenset(h.name for h in HOOKS.values() if h.cadence in (Cadence.STEP, Cadence.LAYER))
_ALL = frozenset(HOOKS) - AT_ANY_TIME
_LOADING = frozenset({"start_load_kv", "wait_for_layer_load"})
_SAVING = frozenset({"save_kv_layer", "wait_for_save"})


class WorkerGates:
    """The isolated connectors on one worker."""

    def __init__(self, connectors: Sequence[SubConnector]) -> None:
        self._gates = {connector.index: connector.gate for connector in connectors if connector.gate is not None}
        self._states = dict.fromkeys(self._gates, IsolationState(0, is_out=False))  # the scheduler's last
        self._failed_for_good: set[int] = set()
        self._names = [connector.name for connector in connectors]
        self.bind(connectors)
        self._never_again = {
            connector.index for connector in connectors if name_among(type(connector.wrapped), NEVER_AGAIN)
        }
        self._broken: set[tuple[int, int]] = set()
        self._loads: dict[int, list[LoadOrder]] = {}  # of this step
        self._raised: set[int] = set()  # connectors whose start_load_kv raised in this step
        self._unread: set[int] = set()  # connectors whose bad blocks of this step are unknown
        self._lost: Collection[int] = ()  # connectors whose metadata of this step is lost
        self._unreported: dict[int, set[str]] = {}  # finished requests of steps in which it was not called
        for index, gate in self._gates.items():
            gate.on_failure = partial(self._failed, index, gate)
            if isinstance(connectors[index].wrapped, Unbuilt):
                self._fail_for_good(index, gate)

    def bind(self, connectors: Sequence[SubConnector]) -> None:
        """Note which connectors implement ``start_load_kv``."""
        self._never_begins = {
            connector.index for connector in connectors if "start_load_kv" not in connector.implemented
        }

    def begin_step(self, meta: MultiKVConnectorMetadata) -> None:
        """Enable the hooks for a step, except of connectors without metadata."""
        self._loads = {}
        self._raised.clear()
        self._unread.clear()
        self._lost = meta.lost
        for _, load in _loads(meta):
            self._loads.setdefault(load.connector_index, []).append(load)
        unfilled = {meta.orders.loads[request].connector_index for request in meta.orders.unmade} if meta.orders else ()
        for index, gate in self._gates.items():
            if meta.isolated is not None:
                self._states[index] = meta.isolated.states[index]
            gate.began = False
            if index not in self._failed_for_good:
                gate.closed = _STEP if meta.metadata[index] is None else _SAVING if index in unfilled else _OPEN

    def lose(self, lost: Iterable[int]) -> None:
        """Note connectors whose metadata could not be pickled, or not be read on this rank."""
        for index in lost:
            self._gates[index].fail("bind_connector_metadata", TypeError("its metadata can't be pickled or read"))

    def failed_loads(self, meta: MultiKVConnectorMetadata) -> list[tuple[int, str, bool]]:
        """Return the failed asynchronous loads of this step: connector, request, whether it can't have begun.

        If ``start_load_kv`` raised, some loads may have begun: they have failed, and may still be writing. A load whose
        connector built no metadata stays open: a later step's metadata may order it.
        """
        return [
            (load.connector_index, request, load.connector_index not in self._raised)
            for request, load in _loads(meta)
            if load.is_async
            and load.connector_index in self._gates
            and (meta.metadata[load.connector_index] is not None or load.connector_index in self._lost)
            and not self._has_begun(load.connector_index)
        ]

    def failed_sync_loads(self, meta: MultiKVConnectorMetadata) -> list[tuple[str, LoadOrder]]:
        """Return the synchronous loads of this step that have failed.

        Their connector failed while it loaded, at the allocation, or when it was asked for bad blocks; or another one
        that had offered the tokens failed while it may have been loading them.
        """
        return [
            (request, load)
            for request, load in _loads(meta)
            if not load.is_async
            and (
                load.connector_index in self._unread
                or not self._raised.isdisjoint(load.hit_by)
                or (
                    load.connector_index in self._gates
                    and (self._gates[load.connector_index].closed or not self._has_begun(load.connector_index))
                )
            )
        ]

    def overwritten(self, loads: Mapping[str, LoadOrder]) -> list[tuple[str, LoadOrder]]:
        """Return the loads into whose blocks a connector that failed in this step may have written."""
        return [(r, load) for r, load in loads.items() if not self._raised.isdisjoint(load.hit_by)]

    def spoiled(self, loads: Mapping[str, LoadOrder]) -> list[tuple[str, LoadOrder]]:
        """Return the open asynchronous loads with unknown blocks: overwritten ones, or of a connector not read."""
        if not self._raised and not self._unread:
            return []
        unread = [(request, load) for request, load in loads.items() if load.connector_index in self._unread]
        return [
            (request, load)
            for request, load in {**dict(self.overwritten(loads)), **dict(unread)}.items()
            if load.is_async
        ]

    def finished(self, index: int, finished: set[str]) -> set[str]:
        """Return the finished requests for a connector, including the requests of skipped steps."""
        gate = self._gates.get(index)
        if gate is not None and gate.closed is _STEP:
            self._unreported.setdefault(index, set()).update(finished)
        elif self._unreported and (before := self._unreported.pop(index, None)):
            return finished | before
        return finished

    @property
    def broken(self) -> frozenset[tuple[int, int]]:
        """The connectors that failed here since they were last taken, each with the epoch in which it did."""
        return frozenset(self._broken)

    def take_broken(self) -> frozenset[tuple[int, int]]:
        """Return ``broken``, and forget it."""
        broken = self.broken
        self._broken.clear()
        return broken

    def _has_begun(self, index: int) -> bool:
        return self._gates[index].began or (index in self._never_begins and index not in self._failed_for_good)

    def _fail_for_good(self, index: int, gate: Gate) -> None:
        gate.closed = _ALL
        self._failed_for_good.add(index)
        self._broken.add((index, FOR_GOOD))

    def _failed(
        self, index: int, gate: Gate, hook: str, _args: tuple[Any, ...], error: BaseException, _slow_ns: int
    ) -> None:
        if ends_for_good(hook):
            self._fail_for_good(index, gate)
        else:
            if hook == "start_load_kv":
                self._raised.add(index)
            if hook == "get_block_ids_with_load_errors":
                self._unread.add(index)
            if hook == "bind_connector_metadata":
                gate.closed = _STEP
            elif hook in _LOADING and any(not load.is_async for load in self._loads.get(index, ())):
                gate.closed = _SAVING  # these blocks are unfilled
            if index in self._never_again:
                self._broken.add((index, FOR_GOOD))
            elif not (state := self._states[index]).is_out:  # otherwise the scheduler knows already
                self._broken.add((index, state.epoch))
        key, text = f"isolated:{index}:{hook}", "best-effort connector %r failed in %s: %s: %s"
        once(key, logging.WARNING, text, self._names[index], hook, type(error).__name__, line(error))


def _loads(meta: MultiKVConnectorMetadata) -> Iterable[tuple[str, LoadOrder]]:
    return meta.orders.loads.items() if meta.orders is not None else ()
