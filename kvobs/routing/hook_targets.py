"""Decide which connectors a hook reaches: all of them, unless one is isolated or a lookup was left open."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvobs.routing.metadata import Isolated, Orders
from kvobs.routing.visibility import Visibility, write_back
from kvobs.state.ledger import Ledger

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from kvobs.connectors.sub_connector import SubConnector
    from kvobs.routing.isolation import Isolation
    from kvobs.routing.lookups import OpenLookups


class HookTargets:
    """The connectors, and what each of them is shown.

    With ``may_hide`` connectors may not see some requests; without it no hook needs to look for these.
    """

    def __init__(
        self,
        connectors: Sequence[SubConnector],
        visibility: Sequence[Visibility],
        isolation: Isolation,
        open_lookups: OpenLookups,
        ledger: Ledger,
        *,
        may_hide: bool,
    ) -> None:
        self.may_hide = may_hide
        self.isolation = isolation
        self._connectors = connectors
        self._visibility = visibility
        self._open_lookups = open_lookups
        self._ledger = ledger

    def arrive(self, request_id: str) -> Sequence[SubConnector]:
        """Return the connectors that see a new request."""
        if self.may_hide:
            self.isolation.arrive(request_id)
        return self.of(request_id)

    def of(self, request_id: str) -> Sequence[SubConnector]:
        """Return the connectors that know a request."""
        if not self.may_hide:
            return self._connectors
        return [
            connector for connector in self._connectors if request_id not in self._visibility[connector.index].hidden
        ]

    def savers(self, request_id: str) -> Sequence[SubConnector]:
        """Return the connectors that may save a request."""
        return [connector for connector in self._connectors if self._visibility[connector.index].saves(request_id)]

    def looks_up(self, request_id: str) -> None:
        """Note that vLLM repeats a lookup: no lookup is open then."""
        self._open_lookups.discard(request_id)

    def allocate(self, request: Any, blocks: Any, computed: int, left_open: Collection[int]) -> Iterator[SubConnector]:
        """Yield the connectors that are given a request's blocks, where some may not be.

        Those in ``left_open`` have not answered the lookup: they are given them once they have.
        """
        request_id = request.request_id
        self._open_lookups.leave_open(request, blocks, computed, left_open)
        for connector in self._connectors:
            is_shown = self._visibility[connector.index].allocates(request_id)
            if is_shown and not self._open_lookups.has(connector.index, request_id):
                self.isolation.allocated(connector.index, request_id)
                yield connector

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        if self.may_hide:
            self.isolation.forget(request_id)
            self._open_lookups.discard(request_id)
            for visibility in self._visibility:
                visibility.end(request_id)

    def begin_step(self, output: SchedulerOutput) -> None:
        """Apply what is due: ends of quarantines, answers to open lookups."""
        self.isolation.begin_step(output.finished_req_ids)
        self._open_lookups.poll(self.isolation.is_slow)

    def build(self, connector: SubConnector, output: SchedulerOutput) -> Any:
        """Return a connector's metadata for a step, built from its view of the scheduler's output."""
        visibility = self._visibility[connector.index]
        view = visibility.shown(output) if visibility else output
        metadata = connector.build_connector_meta(view)
        if view is not output:
            write_back(view, output)
        self.isolation.built(connector.index, metadata)
        return metadata

    def unmade(self, orders: Orders) -> tuple[str, ...]:
        """Return the synchronous loads of connectors that are not shown the request: their allocation call raised."""
        loads = orders.loads.items()
        return tuple(
            [r for r, load in loads if not load.is_async and not self._visibility[load.connector_index].saves(r)]
        )

    def isolated(self, finished: Collection[str]) -> Isolated:
        """Return the isolation of connectors for the workers; forget ended requests."""
        hidden = {}
        for index, visibility in enumerate(self._visibility):
            if visibility:
                if ends := visibility.ends_hidden(finished):
                    hidden[index] = ends
                visibility.forget(finished, self._ledger)
        return Isolated(self.isolation.states(), hidden)
