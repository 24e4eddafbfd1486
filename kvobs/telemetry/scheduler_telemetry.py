"""Annotate the router's messages, and observe the steps, on the scheduler's side."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvobs.faults import contain
from kvobs.page.layout import STEPS
from kvobs.state.events import Annotator, ObservedRequest, Params
from kvobs.state.transfers import Stuck
from kvobs.telemetry.estimates.gains import Gains
from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.payload.stats import MultiKVConnectorStats
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.tracing.trace_context import TraceContext
from kvobs.telemetry.transfers.open_transfers import OpenTransfers
from kvobs.telemetry.verify.sample import BlockSample, VerifyOrders

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

EVERY_NS = 2_000_000_000  # between looks at what takes time: late transfers, and what the estimate learns


class StepNote(NamedTuple):
    """The scheduler's message to the telemetry of all ranks, with a step's metadata."""

    trace: TraceContext | None = None  # the step's own, if every call is traced
    verify: VerifyOrders | None = None


class Closing(Protocol):
    """Keeps a separate process running until this one ends."""

    def close(self) -> None:
        """End."""


class SchedulerTelemetry(Annotator):
    """Annotates the router's messages, and brings up to date what only the steps show: on the scheduler's side.

    ``starter`` keeps the exporter running, if there is one.
    """

    def __init__(
        self,
        recorders: Recorders,
        collector: Collector,
        gains: Gains,
        open_transfers: OpenTransfers,
        *,
        starter: Closing | None = None,
        sample: BlockSample | None = None,
    ) -> None:
        self._recorders = recorders
        self._collector = collector
        self._gains = gains
        self._open_transfers = open_transfers
        self._starter = starter
        self._sample = sample
        self._words = recorders.page.words
        tracer = recorders.tracer
        self._tracer = tracer if tracer is not None and tracer.traces_all else None
        self._looked_ns = 0
        self._has_forward = False  # whether the step that was built last has one
        self._is_last = False  # whether it is the last one of a burst

    def of_step(self, output: SchedulerOutput, *, has_forward: bool, has_sync_loads: bool) -> StepNote | None:
        trace, verify = None, None
        try:
            if self._tracer is not None:
                trace = self._tracer.begin_step()
            self._gains.step_begun(output, perf_counter_ns(), loads=has_sync_loads)
            self._has_forward = has_forward
            # After a burst's last request vLLM makes one more step, without a forward.
            self._is_last = not has_forward and bool(output.finished_req_ids)
            if self._open_transfers.changes:  # true in few steps
                self._open_transfers.measure()
        except Exception:
            contain("record")
        if self._sample is not None:
            verify = self._sample.orders_of(output)
        return StepNote(trace, verify) if trace is not None or verify is not None else None

    def of_load(self, request_id: str) -> TraceContext | None:
        traces = self._recorders.traces
        return traces.of_load(request_id) if traces is not None else None

    def of_client(self, request: ObservedRequest, params: Params | None) -> Params | None:
        traces, reports = self._recorders.traces, self._recorders.reports
        if traces is not None:
            params = traces.into_params(request.request_id, params) or params
        if reports is not None:
            params = reports.finished(request, params) or params
        if self._sample is not None:
            params = self._sample.into_params(request, params) or params
        return params

    def collect(self) -> MultiKVConnectorStats | None:
        """Return the connectors' stats of this side at the end of a step, if there are any."""
        self._words[STEPS] += 1
        self._gains.step_ended()
        if self._open_transfers.changes:
            self._open_transfers.measure()
        now_ns = perf_counter_ns()
        if self._is_last or now_ns - self._looked_ns >= EVERY_NS:
            self._looked_ns = now_ns
            self._open_transfers.log_late()
            self._gains.look(goes_on=self._has_forward)
        return self._collector.collect()

    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Receive a failed load that is stuck in the aggregation of the workers' outputs."""
        self._open_transfers.note_in_aggregator(stuck)

    def close(self, *, is_well: bool) -> None:
        """End; ``is_well``: as vLLM asked, and not by an error."""
        if self._recorders.log is not None:
            self._recorders.log.close()
        if self._starter is not None:
            self._starter.close()
        if is_well:
            self._gains.look()
            self._recorders.page.close()
