"""Everything that records in one process, built together: numbers, spans, traces, flight recorder, black box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvobs import faults
from kvobs.schema.options import Options
from kvobs.state.transfer_listener import TransferListener
from kvobs.telemetry.recording.call_event import Tracer
from kvobs.telemetry.recording.call_spans import CallSpans
from kvobs.telemetry.recording.journal import Journal
from kvobs.telemetry.recording.recorder import WALL_OFFSET, Recorder
from kvobs.telemetry.requests.request_log import STDERR, LogFile, RequestLog, Stderr
from kvobs.telemetry.requests.request_reports import ANSWERS, Reports
from kvobs.telemetry.requests.request_traces import Traces
from kvobs.telemetry.requests.sampling import TracingSettings, Verdicts
from kvobs.telemetry.timeline import black_box, flight
from kvobs.telemetry.timeline.flight import Flight
from kvobs.vllm_api import versions


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The recorders of one process.

    ``recorder`` sends the records of ``journal`` with its numbers, passes calls on to ``tracer`` and ``flight``, and
    shows the one in progress in its black box.
    ``listeners`` record the router's transfers, and ``log`` is the request log: both on the scheduler's side.
    """

    recorder: Recorder
    journal: Journal
    tracer: Tracer | None = None
    flight: Flight | None = None
    traces: Traces | None = None
    reports: Reports | None = None
    log: RequestLog | None = None
    listeners: tuple[TransferListener, ...] = ()


def build(
    names: Sequence[str], options: Options, vllm_config: Any, tracing: TracingSettings | None, rank: int | None
) -> Telemetry:
    """Build the telemetry of this process: a worker of this rank, or the scheduler's (None)."""
    journal = Journal()
    recording = flight.begin(options.timeline, vllm_config, rank, names, WALL_OFFSET)
    traces, tracer = _trace(names, journal, tracing, rank) if tracing is not None else (None, None)
    contained = [i for i, name in enumerate(names) if name in options.isolate]
    recorder = Recorder(
        len(names),
        int(options.slow_call_ms * 1e6),
        tuple(names),
        journal=journal,
        tracer=tracer,
        flight=recording,
        box=black_box.begin(vllm_config, names, rank, contained),
    )
    reports, log = _report(names, options, vllm_config, recorder) if rank is None else (None, None)
    listening = (recording, traces, reports) if rank is None else ()
    return Telemetry(
        recorder,
        journal,
        tracer,
        recording,
        traces,
        reports,
        log,
        tuple(listener for listener in listening if listener is not None),
    )


def _trace(
    names: Sequence[str], journal: Journal, tracing: TracingSettings, rank: int | None
) -> tuple[Traces | None, CallSpans | None]:
    """Return the traces of requests, on the scheduler's side, and of calls; None if OpenTelemetry fails."""
    try:
        verdicts = Verdicts()
    except Exception:
        faults.contain("trace")
        return None, None
    if rank is not None:
        return None, CallSpans(names, journal, tracing, verdicts, rank=rank)
    traces = Traces(names, journal, tracing, verdicts)
    return traces, traces.calls


def _report(
    names: Sequence[str], options: Options, vllm_config: Any, recorder: Recorder
) -> tuple[Reports | None, RequestLog | None]:
    """Return the reports of requests, and their log; None for what is off, or can't be made."""
    output, log = options.request_log, None
    if output is None and not options.report:
        return None, None
    try:
        if output is not None:
            log = RequestLog(Stderr() if output == STDERR else LogFile(output), recorder)
        put = log.put if log is not None else None
        return Reports(names, ANSWERS[options.report], put, versions.engine_place(vllm_config).number), log
    except Exception:
        faults.contain("record")
        return None, log
