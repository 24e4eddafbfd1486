"""The seam between the router and all that observes it: the router announces, and does not know who listens.

An event comes after what it announces, in the thread of the router's side. An observer must not raise, must not change
what it is given, and may keep it. A plain ``Observer`` does nothing; a subclass overrides the events that it records.
Only annotators answer, and ``WorkerObserver.refused``: the router carries what annotators add, and does not read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from inspect import isfunction
from typing import Any, Literal, Protocol

from kvobs.state.cache_layout import CacheLayout
from kvobs.state.transfers import Load, LookupResult, Offer, ReportKind, Save, UnexpectedReport

Params = dict[str, Any]
"""vLLM's ``kv_transfer_params``."""
Outcome = Literal["hit", "miss", "pending", "timeout", "not_read"]


class ObservedRequest(Protocol):
    """The part of vLLM's request that an observer may read. In vLLM 0.27 it has no ``trace_headers``."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    block_hashes: Sequence[Any]
    kv_transfer_params: Params | None

    def get_finished_reason(self) -> object:
        """Return vLLM's ``FinishReason``."""


class Observer:
    """Receives the events of requests and transfers on the scheduler's side."""

    wants_lookups = True
    """Whether ``looked_up`` must be called."""

    # Lookups

    def looked_up(self, request: ObservedRequest, began_ns: int, ended_ns: int) -> None:
        """Receive a lookup in all connectors, with its wall-clock times; vLLM may repeat it."""

    def answered(self, index: int, outcome: Outcome) -> None:
        """Receive a connector's answer about a request; of its repeated answers each kind is announced once."""

    def waited(self, index: int, ns: int) -> None:
        """Receive how long a request waited for the answer of a connector that had none at first."""

    def allocated(self, request: ObservedRequest, lookup: LookupResult, owner: int | None, tokens: int) -> None:
        """Receive the end of a request's lookups: vLLM has allocated its blocks.

        ``owner``, if there is one, loads ``tokens``. After an asynchronous load vLLM allocates again, without offers.
        """

    def sourced(self, index: int, tokens: int, sources: Mapping[str, int]) -> None:
        """Receive the tiers, by vLLM's names, of an allocated load's tokens, unless the request was preempted."""

    def lapsed(self, offers: Sequence[Offer]) -> None:
        """Receive the offers of a request that has ended before its allocation."""

    # Transfers

    def admitted(self, request_id: str, load: Load) -> None:
        """Receive a load that begins."""

    def load_ended(self, request_id: str, load: Load) -> None:
        """Receive a load that has ended on every rank."""

    def sync_loads_failed(self, index: int, loads: Sequence[Load]) -> None:
        """Receive the failed synchronous loads of a step."""

    def aborted(self, request_id: str, load: Load, *, by_error: bool) -> None:
        """Receive a load whose request ended first; the end of the load follows."""

    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        """Receive the saves, by connector, promised for a finished request: open ones, and those done before."""

    def saved(self, request_id: str, index: int, save: Save, ended_ns: int) -> None:
        """Receive an open promised save that is done on every rank, or abandoned."""

    def unexpected(self, report: UnexpectedReport) -> None:
        """Receive a report about a transfer that its connector does not own."""

    def awaiting_ranks(self) -> None:
        """Receive that some ranks have reported a transfer and others have not: once a step while that is so."""

    def noted(self, notes: Sequence[Any]) -> None:
        """Receive the notes of the workers' observers, of all ranks."""

    # The engine and its connectors

    def laid_out(self, layout: CacheLayout) -> None:
        """Receive the sizes of the KV cache: at the start, and again once the workers have reported theirs."""

    def quarantined(self, index: int) -> None:
        """Receive the start of a connector's quarantine."""

    def readmitted(self, index: int) -> None:
        """Receive the end of a connector's quarantine: it gets the requests that arrive from now on."""

    # Ends

    def request_ended(self, request: ObservedRequest) -> None:
        """Receive the end of a request, after all its other events except the ends of its open transfers."""


EVENTS = tuple(name for name, method in vars(Observer).items() if isfunction(method))


class Annotator:
    """Adds to what the router passes on."""

    def of_step(self, output: Any, *, has_forward: bool, has_sync_loads: bool) -> Any:
        """Return what the workers' observers get with a step, or None; it is pickled."""
        return None

    def of_load(self, request_id: str) -> Any:
        """Return what the workers' observers get with a load that was just admitted, or None; it is pickled."""
        return None

    def of_client(self, request: ObservedRequest, params: Params | None) -> Params | None:
        """Return the params that the client of a finished request gets, before the request's ``request_ended``."""
        return params


class WorkerObserver:
    """Receives the events of a worker's steps."""

    wants_reports = True
    """Whether ``reported`` and ``take_notes`` must be called."""
    may_refuse = False
    """Whether ``refused`` must be asked."""

    def step_begun(self, note: Any, loads: Sequence[tuple[int, Any]]) -> None:
        """Receive an annotator's note on a step, and on the loads that begin in it, each with its connector."""

    def reported(self, index: int | None, kind: ReportKind, requests: Collection[str]) -> None:
        """Receive a connector's report on loads or saves of these requests; None: the scheduler's side had it."""

    def refused(self, index: int, requests: Collection[str]) -> set[str]:
        """Return which of the asynchronous loads that a connector reports as received must count as failed."""
        return set()

    def take_notes(self) -> list[Any]:
        """Return what ``Observer.noted`` gets with the reports of this step; it is pickled."""
        return []

    def step_ended(self) -> None:
        """Receive the end of a step, after the connectors' last hook."""
