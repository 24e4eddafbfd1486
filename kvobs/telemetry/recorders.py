"""Build all that records in one process: its page with numbers and spans, traces, reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvobs.faults import contained
from kvobs.page import writer
from kvobs.page.description import EngineInfo
from kvobs.page.writer import PageWriter
from kvobs.probe.native import choice
from kvobs.probe.pauses import OF_PROCESS
from kvobs.probe.recorder import Recorder, cost_of_recording
from kvobs.schema import signals
from kvobs.schema.options import Options
from kvobs.state.events import Observer
from kvobs.telemetry.requests.request_log import STDERR, LogFile, RequestLog, Stderr
from kvobs.telemetry.requests.request_reports import Reports
from kvobs.telemetry.tracing.call_spans import CallSpans
from kvobs.telemetry.tracing.journal import Journal
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.sampling import TracingSettings, Verdicts
from kvobs.telemetry.tracing.urgent_loads import UrgentLoads, untraced_request
from kvobs.vllm_api import versions


@dataclass(frozen=True, slots=True)
class Recorders:
    """The recorders of one process.

    ``recorder`` counts, and passes slow and failed calls on to ``tracer``, which writes their spans. The others are on
    the scheduler's side only: ``traces`` and ``reports`` of requests, the request log, and ``loads``, which writes the
    spans of slow and failed loads where nothing is traced.
    """

    recorder: Recorder
    tracer: CallSpans | None = None
    traces: Traces | None = None
    loads: Observer | None = None
    reports: Reports | None = None
    log: RequestLog | None = None

    @property
    def page(self) -> PageWriter:
        return self.recorder.page


def build(
    engine: EngineInfo, options: Options, vllm_config: Any, tracing: TracingSettings, rank: int | None
) -> Recorders:
    """Build the recorders of this process: a worker of this rank, or the scheduler's (None)."""
    names = engine.names
    slow_ns = int(options.slow_call_ms * 1e6)
    contained = [i for i, name in enumerate(names) if name in options.best_effort]
    process = writer.describe(engine, rank, is_native=choice().is_native, cost_ns=cost_of_recording())
    page = writer.begin(vllm_config, process, contained)
    collected = signals.slot(signals.GC_PAUSES, "scheduler" if rank is None else "worker")
    page.grown.append((collected, OF_PROCESS.take_collected_ns))
    journal = Journal(page)
    traces, tracer = _trace(names, journal, tracing, rank) or (None, None)
    recorder = Recorder(len(names), slow_ns, tuple(names), listener=tracer, page=page)
    recorder.pauses = OF_PROCESS
    writer.look_from_thread(page, OF_PROCESS.watch)
    if rank is not None:
        return Recorders(recorder, tracer)
    loads = UrgentLoads(names, journal, tracing) if traces is None else None
    reports, log = _report(names, options, vllm_config, recorder) or (None, None)
    return Recorders(recorder, tracer, traces, loads, reports, log)


@contained("trace")
def _trace(
    names: Sequence[str], journal: Journal, tracing: TracingSettings, rank: int | None
) -> tuple[Traces | None, CallSpans]:
    """Return the traces of requests, on the scheduler's side, and of calls."""
    verdicts = contained("trace")(Verdicts)() if tracing.is_on else None  # fails if OpenTelemetry does
    if rank is not None or verdicts is None:
        of_request = untraced_request if rank is None else None
        return None, CallSpans(names, journal, tracing, verdicts, rank, of_request)
    traces = Traces(names, journal, tracing, verdicts)
    return traces, traces.calls


@contained("record")
def _report(
    names: Sequence[str], options: Options, vllm_config: Any, recorder: Recorder
) -> tuple[Reports | None, RequestLog | None]:
    """Return the reports of requests, and their log; None for what is off."""
    output, log = options.request_log, None
    if output is None and not options.request_report:
        return None, None
    if output is not None:
        log = RequestLog(Stderr() if output == STDERR else LogFile(output), recorder)
    put = log.put if log is not None else None
    return Reports(names, options.request_report, put, versions.engine_position(vllm_config).number), log
