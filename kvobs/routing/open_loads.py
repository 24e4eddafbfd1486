"""Hold a rank's open loads, from the scheduler's order until their end, and find those that bad blocks belong to."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from kvobs.routing.metadata import LoadOrder, Orders
from kvobs.state.transfers import ReportKind


class BadBlocks(NamedTuple):
    """The effect of the bad blocks that a connector reports."""

    passed_on: set[int]  # those that vLLM must read
    reports: list[tuple[ReportKind, str]]  # of the requests whose loads they are in
    failed_syncs: set[str]  # requests whose synchronous load of this step has failed
    unknown: set[int]  # those that belong to no open load


class OpenLoads:
    """The open loads of a rank.

    ``ids_are_unique``: a block id identifies a request, since there is one KV cache group. ``names_failed``: vLLM reads
    failed loads by their request.
    """

    def __init__(self, *, ids_are_unique: bool, names_failed: bool) -> None:
        self._only_by_blocks = ids_are_unique or not names_failed
        self.by_request: dict[str, LoadOrder] = {}
        self.resumed: dict[str, LoadOrder] = {}  # asynchronous loads that have ended before this step
        self._returned: set[str] = set()  # those whose receipt was returned to vLLM
        self._orphaned: set[str] = set()  # those whose request has ended

    def take(self, orders: Orders) -> list[tuple[str, LoadOrder]]:
        """Take a step's orders; return the loads that have ended before it."""
        self._orphaned.update(orders.orphaned)  # before the ones that have already ended
        ended = []
        for request in orders.closed:
            if (load := self.by_request.pop(request, None)) is not None:
                ended.append((request, load))
                if load.is_async and load.hit_by and request not in self._orphaned:  # whose blocks are others'
                    self.resumed[request] = load
            self._orphaned.discard(request)
            self._returned.discard(request)
        self.by_request.update(orders.loads)
        self._returned.difference_update(orders.loads)
        return ended

    def end_step(self) -> None:
        """Forget which loads had ended before this step."""
        self.resumed.clear()

    def first_of_owned(self, index: int, requests: set[str]) -> set[str]:
        """Return the requests whose asynchronous load this connector owns, once per load."""
        first = set()
        for request in requests - self._returned:
            load = self.by_request.get(request)
            if load is not None and load.connector_index == index and load.is_async:
                first.add(request)
        self._returned |= first
        return first

    def syncs_of_others(self, index: int, failed: set[str], of_step: Container[str]) -> dict[str, LoadOrder]:
        """Return the synchronous loads of other connectors among the requests whose load has failed.

        ``of_step`` are the requests whose loads this step was ordered to make: a synchronous load ends with its step.
        """
        return {
            request: load
            for request in failed
            if (load := self.by_request.get(request)) is not None
            and load.connector_index != index
            and not load.is_async
            and request in of_step
        }

    def attribute(self, index: int, bad: set[int], of_step: Container[str]) -> BadBlocks:
        """Find the loads that a connector's bad blocks belong to; ``of_step`` is as in ``syncs_of_others``.

        Connectors may load what they were not chosen for, and break another one's load: a request must not continue
        with such blocks.
        """
        found, known = BadBlocks(set(), [], set(), set()), set[int]()
        for request, load in self.by_request.items():
            hit = {block for group in load.blocks for block in group if block in bad}
            if not hit:
                continue
            known |= hit
            if load.is_async and not self._only_by_blocks:
                found.reports.append((ReportKind.UNMAPPED_BAD_BLOCKS, request))
                continue
            found.passed_on.update(hit)
            if is_sync := not load.is_async and request in of_step:
                found.failed_syncs.add(request)
            if load.is_async or (is_sync and load.connector_index != index):
                found.reports.append((ReportKind.BAD_BLOCKS, request))
        found.unknown.update(bad - known)
        return found
