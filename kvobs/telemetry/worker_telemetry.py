"""Observe the steps of a worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter_ns

from kvobs.faults import contained
from kvobs.page.layout import SINCE, STEPS
from kvobs.state.events import WorkerObserver
from kvobs.state.transfers import ReportKind, WrongBlocks
from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.payload.stats import MultiKVConnectorStats
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.scheduler_telemetry import Closing, StepNote
from kvobs.telemetry.tracing.trace_context import TraceContext
from kvobs.telemetry.verify.sample import NotedBlock
from kvobs.telemetry.verify.verifier import Verifier

NO_NOTE = StepNote()


class WorkerTelemetry(WorkerObserver):
    """Observes the steps of one worker; ``starter`` keeps an exporter running where EngineCore is on another host."""

    def __init__(
        self,
        recorders: Recorders,
        collector: Collector,
        verifier: Verifier | None = None,
        starter: Closing | None = None,
    ) -> None:
        self._recorders = recorders
        self._starter = starter
        self._verifier = verifier
        self.wants_reports = verifier is not None
        self.may_refuse = verifier is not None and verifier.refuses
        self._collector = collector
        self._words = recorders.page.words
        tracer = recorders.tracer
        self._tracer = tracer if tracer is not None and tracer.tracing.is_on else None

    def step_begun(self, note: StepNote | None, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        self._words[SINCE] = perf_counter_ns()
        note = note if note is not None else NO_NOTE
        if self._tracer is not None:
            self._join_trace(note, loads)
        if self._verifier is not None:
            self._verifier.step_begun(note.verify)

    def reported(self, index: int | None, kind: ReportKind, requests: Collection[str]) -> None:
        if self._verifier is not None:
            self._verifier.reported(index, kind, requests)

    def refused(self, index: int, requests: Collection[str]) -> set[str]:
        return (self._verifier.refused(index, requests) if self._verifier is not None else None) or set()

    def take_notes(self) -> list[WrongBlocks | NotedBlock]:
        return self._verifier.take_notes() if self._verifier is not None else []

    @contained("trace")
    def _join_trace(self, note: StepNote, loads: Sequence[tuple[int, TraceContext | None]]) -> None:
        """Continue the step's trace, and the traces of the loads that begin."""
        traces: dict[int, list[TraceContext]] = {}
        for index, trace in loads:
            if trace is not None:
                traces.setdefault(index, []).append(trace)
        if self._tracer is not None:
            self._tracer.join_step(note.trace, traces)

    def step_ended(self) -> None:
        if self._verifier is not None:
            self._verifier.step_ended()
        self._words[SINCE] = 0
        self._words[STEPS] += 1

    def collect(self) -> MultiKVConnectorStats | None:
        """Return the connectors' stats of a step."""
        return self._collector.collect()

    def close(self, *, is_well: bool) -> None:
        """End; ``is_well``: as vLLM asked, and not by an error."""
        if self._starter is not None:
            self._starter.close()
        if is_well:
            self._recorders.page.close()
