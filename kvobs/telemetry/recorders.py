"""Everything that records in one process, built together: numbers, spans, traces, black box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvobs.faults import contained
from kvobs.schema.options import Options
from kvobs.state.transfer_listener import TransferListener
from kvobs.telemetry.recording.call_spans import CallSpans
from kvobs.telemetry.recording.journal import Journal
from kvobs.telemetry.recording.pauses import OF_PROCESS
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.telemetry.requests.request_log import STDERR, LogFile, RequestLog, Stderr
from kvobs.telemetry.requests.request_reports import Reports
from kvobs.telemetry.requests.request_traces import Traces
from kvobs.telemetry.requests.sampling import TracingSettings, Verdicts
from kvobs.telemetry.timeline import black_box
from kvobs.vllm_api import versions


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The recorders of one process.

    ``recorder`` sends the records of ``journal`` with its numbers, passes calls on to ``tracer``, and shows the
    one in progress in its black box.
    ``listeners`` record the router's transfers, and ``log`` is the request log: both on the scheduler's side.
    """

    recorder: Recorder
    journal: Journal
    tracer: CallSpans | None = None
    traces: Traces | None = None
    reports: Reports | None = None
    log: RequestLog | None = None
    listeners: tuple[TransferListener, ...] = ()


def build(
    names: Sequence[str], options: Options, vllm_config: Any, tracing: TracingSettings | None, rank: int | None
) -> Telemetry:
    """Build the telemetry of this process: a worker of this rank, or the scheduler's (None)."""
    journal = Journal()
    traces, tracer = (_trace(names, journal, tracing, rank) if tracing is not None else None) or (None, None)
    slow_ns = int(options.slow_call_ms * 1e6)
    contained = [i for i, name in enumerate(names) if name in options.isolate]
    box = black_box.begin(vllm_config, names, rank, contained)
    recorder = Recorder(len(names), slow_ns, tuple(names), journal=journal, tracer=tracer, box=box)
    recorder.pauses = OF_PROCESS
    if rank is not None:
        return Telemetry(recorder, journal, tracer)
    reports, log = _report(names, options, vllm_config, recorder) or (None, None)
    listeners = tuple(listener for listener in (traces, reports) if listener is not None)
    return Telemetry(recorder, journal, tracer, traces, reports, log, listeners)


@contained("trace")
def _trace(
    names: Sequence[str], journal: Journal, tracing: TracingSettings, rank: int | None
) -> tuple[Traces | None, CallSpans]:
    """Return the traces of requests, on the scheduler's side, and of calls."""
    verdicts = Verdicts()  # fails if OpenTelemetry does
    if rank is not None:
        return None, CallSpans(names, journal, tracing, verdicts, rank=rank)
    traces = Traces(names, journal, tracing, verdicts)
    return traces, traces.calls


@contained("record")
def _report(
    names: Sequence[str], options: Options, vllm_config: Any, recorder: Recorder
) -> tuple[Reports | None, RequestLog | None]:
    """Return the reports of requests, and their log; None for what is off."""
    output, log = options.request_log, None
    if output is None and not options.report:
        return None, None
    if output is not None:
        log = RequestLog(Stderr() if output == STDERR else LogFile(output), recorder)
    put = log.put if log is not None else None
    return Reports(names, options.report, put, versions.engine_place(vllm_config).number), log
