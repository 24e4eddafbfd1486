"""Observe both sides of the router: begin and end of steps, notes for the workers, and the stats that are sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from kvobs.faults import contain, contained
from kvobs.probe.black_box import SINCE, STEPS
from kvobs.state.events import Annotator, ObservedRequest, Params, WorkerObserver
from kvobs.state.transfers import ReportKind, Stuck, WrongBlocks
from kvobs.telemetry.collector import Closing, Collector, FlushRule, Sink, divert
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, has_content
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.tracing.trace_context import TraceContext
from kvobs.telemetry.transfers.gains import Gains
from kvobs.telemetry.transfers.open_transfers import OpenTransfers
from kvobs.telemetry.verify.sample import BlockSample, NotedBlock, VerifyOrders
from kvobs.telemetry.verify.verifier import Verifier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput


class StepNote(NamedTuple):
    """The scheduler's message to the telemetry of all ranks, with a step's metadata."""

    flush: bool  # whether they send their numbers
    trace: TraceContext | None  # the step's own, if every call is traced
    verify: VerifyOrders | None = None


NO_NOTE = StepNote(flush=False, trace=None)


class SchedulerTelemetry(Annotator):
    """Annotates the router's messages, and decides when all ranks send their numbers: on the scheduler's side.

    ``feed`` takes kvobs's own numbers to the exporter, if there is one.
    """

    def __init__(
        self,
        recorders: Recorders,
        collector: Collector,
        gains: Gains,
        open_transfers: OpenTransfers,
        *,
        feed: Sink | None = None,
        sample: BlockSample | None = None,
    ) -> None:
        self._recorders = recorders
        self._collector = collector
        self._gains = gains
        self._open_transfers = open_transfers
        self._feed = feed
        self._sample = sample
        self._words = recorders.recorder.box.words
        self._flush_rule = FlushRule(recorders.journal)
        self._flush_is_due = False

    def of_step(self, output: SchedulerOutput, *, has_forward: bool, has_sync_loads: bool) -> StepNote | None:
        flush, trace, verify = False, None, None
        try:
            if self._recorders.tracer is not None:
                trace = self._recorders.tracer.begin_step()
            now_ns = perf_counter_ns()
            self._gains.step_begun(output, now_ns, loads=has_sync_loads)
            has_finished = bool(output.finished_req_ids)
            flush = self._flush_rule.decide(now_ns, has_forward=has_forward, has_finished=has_finished)
        except Exception:
            contain("flush")
        if self._sample is not None:
            verify = self._sample.orders_of(output)
        return StepNote(flush, trace, verify) if flush or trace is not None or verify is not None else None

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

    def received(self, stats: KVConnectorStats | None) -> None:
        """Receive the workers' stats of a step; they may have decided to send numbers."""
        self._flush_is_due = stats is not None and self._has_numbers(stats) is True
        if self._feed is not None and self._flush_is_due:
            divert(stats, self._feed)

    @contained("flush")
    def _has_numbers(self, stats: KVConnectorStats) -> bool:
        if not has_content(stats):
            return False
        self._flush_rule.flushed()
        return True

    def collect(self) -> MultiKVConnectorStats | None:
        """Return the stats of this side, if there are any; kvobs's numbers are sent together with the workers'."""
        self._words[STEPS] += 1
        self._gains.step_ended()
        is_due, self._flush_is_due = self._flush_is_due, False
        if is_due:
            self._open_transfers.measure()
            self._gains.flush(goes_on=self._flush_rule.has_forward)
        return self._collector.collect(is_due=is_due)

    def note_in_aggregator(self, stuck: Stuck) -> None:
        """Receive a failed load that is stuck in the aggregation of the workers' outputs."""
        self._open_transfers.note_in_aggregator(stuck)

    def close(self, *, is_well: bool) -> None:
        """Send what was counted since the last flush, and end; ``is_well``: as vLLM asked, and not by an error."""
        if self._recorders.log is not None:
            self._recorders.log.close()
        if self._feed is not None:
            self._gains.flush()
            self._collector.feed(self._feed)
            self._feed.close(is_well=is_well)
        if is_well:
            self._recorders.recorder.box.close()


class WorkerTelemetry(WorkerObserver):
    """Observes the steps of one worker; ``host`` shows its calls where EngineCore is on another host."""

    def __init__(
        self, recorders: Recorders, collector: Collector, verifier: Verifier | None = None, host: Closing | None = None
    ) -> None:
        self._recorders = recorders
        self._host = host
        self._verifier = verifier
        self.wants_reports = verifier is not None
        self.may_refuse = verifier is not None and verifier.refuses
        self._collector = collector
        self._words = recorders.recorder.box.words
        self._note = NO_NOTE

    def step_begun(self, note: StepNote | None, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        self._words[SINCE] = perf_counter_ns()
        self._note = note if note is not None else NO_NOTE
        if self._recorders.tracer is not None:
            self._join_trace(loads)
        if self._verifier is not None:
            self._verifier.step_begun(self._note.verify)

    def reported(self, child: int | None, kind: ReportKind, requests: Collection[str]) -> None:
        if self._verifier is not None:
            self._verifier.reported(child, kind, requests)

    def refused(self, child: int, requests: Collection[str]) -> set[str]:
        return (self._verifier.refused(child, requests) if self._verifier is not None else None) or set()

    def take_notes(self) -> list[WrongBlocks | NotedBlock]:
        return self._verifier.take_notes() if self._verifier is not None else []

    @contained("trace")
    def _join_trace(self, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        """Continue the step's trace, and those of the loads that begin."""
        traces: dict[int, list[TraceContext]] = {}
        for child, trace in loads:
            if trace is not None:
                traces.setdefault(child, []).append(trace)
        if self._recorders.tracer is not None:
            self._recorders.tracer.join_step(self._note.trace, traces)

    def step_ended(self) -> None:
        self._note = NO_NOTE
        if self._verifier is not None:
            self._verifier.step_ended()
        self._words[SINCE] = 0
        self._words[STEPS] += 1

    def collect(self, *, is_idle: bool, has_news: bool) -> MultiKVConnectorStats | None:
        """Return the stats of a step, with kvobs's numbers if the scheduler orders it, or nothing else runs."""
        has_urgent = is_idle and self._recorders.journal.has_urgent
        return self._collector.collect(is_due=self._note.flush or has_news or has_urgent)

    def close(self, *, is_well: bool) -> None:
        """End; ``is_well``: as vLLM asked, and not by an error."""
        if self._host is not None:
            self._host.close(is_well=is_well)
        if is_well:
            self._recorders.recorder.box.close()
