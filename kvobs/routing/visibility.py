"""Build each connector's view of a step: the scheduler's output without the requests hidden from it.

A connector sees a request completely or not at all: with outdated block tables it must not save a request of which it
missed a part.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Container
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_BY_REQUEST = (
    "num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "num_invalid_spec_tokens",
)
_FILTERED = {
    *_BY_REQUEST,
    *("total_num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "kv_connector_block_state"),
    *("finished_req_ids", "preempted_req_ids"),
}


class Visibility:
    """The requests hidden from one connector.

    ``hidden``: never visible to it. ``dropped``: it knows them, and sees only their end. ``withheld``: it knows them,
    and still gets lookups and allocations, so that its own state stays correct. They are not shown as scheduled, so it
    saves nothing more of them.

    ``tainted``: dropped or withheld requests of which it may know blocks that they no longer have. The scheduler's
    output does not report their end either, since some connectors save the rest of a request there
    (OffloadingConnector).
    """

    __slots__ = ("_over", "dropped", "hidden", "tainted", "withheld")

    def __init__(self) -> None:
        self.hidden: set[str] = set()
        self.dropped: set[str] = set()
        self.withheld: set[str] = set()
        self.tainted: set[str] = set()
        self._over: set[str] = set()  # requests that have ended

    def __bool__(self) -> bool:
        return bool(self.hidden or self.dropped or self.withheld or self.tainted)

    def allocates(self, request: str) -> bool:
        """Return whether lookups and allocations of this request reach the connector."""
        return request not in self.hidden and request not in self.dropped

    def saves(self, request: str) -> bool:
        """Return whether the connector may save this request."""
        return self.allocates(request) and request not in self.withheld

    def drop(self, request: str, *, taints: bool) -> None:
        """Show only the end of a known request."""
        self.withheld.discard(request)
        self.dropped.add(request)
        if taints:
            self.tainted.add(request)

    def withhold(self, request: str, *, taints: bool) -> None:
        """Stop showing a known request as scheduled."""
        if request in self.hidden:
            return
        if request not in self.dropped:
            self.withheld.add(request)
        if taints:
            self.tainted.add(request)

    def end(self, request: str) -> None:
        """Note the end of a request."""
        self.dropped.discard(request)
        self.withheld.discard(request)
        if request in self.hidden or request in self.tainted:
            self._over.add(request)

    def shown(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return the scheduler's output for this connector; the same object if nothing is hidden."""
        scheduled = self._kept_of(output.num_scheduled_tokens)
        if (state := versions.block_state(output)) is not None:
            scheduled |= self._kept_of(state.req_ids)  # some of them are passed on without being scheduled
        finished = (self.hidden | self.tainted).intersection(output.finished_req_ids)
        preempted = self.hidden.intersection(getattr(output, "preempted_req_ids", None) or ())
        if not scheduled and not finished and not preempted:
            return output
        view = copy.copy(output)
        if finished:
            view.finished_req_ids = output.finished_req_ids - finished
        if preempted:
            view.preempted_req_ids = output.preempted_req_ids - preempted
        if scheduled:
            _leave_out(view, scheduled)
        return view

    def ends_hidden(self, finished: Collection[str]) -> frozenset[str]:
        """Return the hidden requests among those that a step reports as finished."""
        return frozenset(self.hidden.intersection(finished)) if self.hidden else frozenset()

    def forget(self, finished: Collection[str], live: Container[str]) -> None:
        """Forget requests whose end a step has reported; hidden ones once no other connector needs them."""
        for request in list(self._over):
            if request in finished:
                self.tainted.discard(request)
            is_hidden = request in self.hidden and request in live
            if not is_hidden and request not in self.tainted:
                self._over.discard(request)
                self.hidden.discard(request)

    def _kept_of(self, scheduled: Collection[str]) -> set[str]:
        return {r for kept in (self.hidden, self.dropped, self.withheld) if kept for r in kept.intersection(scheduled)}


def write_back(view: SchedulerOutput, output: SchedulerOutput) -> None:
    """Copy attributes that a connector has set on its view (HiSparse, MoRIIO), except the filtered ones."""
    for name, value in vars(view).items():
        if name not in _FILTERED and value is not getattr(output, name):
            setattr(output, name, value)


def _leave_out(view: SchedulerOutput, requests: set[str]) -> None:
    """Remove requests from all scheduling fields of a copy; the original is not changed."""
    view.total_num_scheduled_tokens -= sum(view.num_scheduled_tokens.get(request, 0) for request in requests)
    for name in _BY_REQUEST:
        if found := getattr(view, name, None):
            setattr(view, name, {request: value for request, value in found.items() if request not in requests})
    view.scheduled_new_reqs = [new for new in view.scheduled_new_reqs if new.req_id not in requests]
    view.scheduled_cached_reqs = _without(view.scheduled_cached_reqs, requests)
    if (state := versions.block_state(view)) is not None:
        view.kv_connector_block_state = state = copy.copy(state)
        state.req_ids = state.req_ids - requests
        offered = state.boundary_state_offloads
        state.boundary_state_offloads = {request: offered[request] for request in offered if request not in requests}


def _without(cached: Any, requests: set[str]) -> Any:
    """Return vLLM's ``CachedRequestData`` without some requests.

    Its fields are lists parallel to ``req_ids`` (or empty), dicts and sets by request; which ones depends on vLLM.
    """
    stays = [request not in requests for request in cached.req_ids]
    if all(stays):
        return cached
    left: dict[str, Any] = {}
    for field in fields(cached):
        value = getattr(cached, field.name)
        if isinstance(value, list) and len(value) == len(stays):
            value = [item for item, keeps in zip(value, stays, strict=True) if keeps]
        elif isinstance(value, dict):
            value = {request: item for request, item in value.items() if request not in requests}
        elif isinstance(value, set):
            value = value - requests
        left[field.name] = value
    return type(cached)(**left)
