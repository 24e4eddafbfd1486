"""Everything that records in one process, built together: numbers, span records, traces, and the flight recorder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs import faults, host
from kvobs.options import Options
from kvobs.state.transfer_listener import TransferListener
from kvobs.telemetry import flight
from kvobs.telemetry.call_event import Tracer
from kvobs.telemetry.call_spans import CallSpans
from kvobs.telemetry.flight import Flight
from kvobs.telemetry.journal import Journal
from kvobs.telemetry.recorder import WALL_OFFSET, Recorder
from kvobs.telemetry.request_log import STDERR, LogFile, RequestLog, Stderr, Unlogged
from kvobs.telemetry.request_reports import ANSWERS, Reports, Unreported
from kvobs.telemetry.request_traces import Traces, Untraced
from kvobs.telemetry.sampling import TracingSettings, Verdicts


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What records in one process.

    ``recorder`` sends the records of ``journal`` with its numbers, and passes calls on to ``tracer`` and ``flight``.
    ``listeners`` record the router's transfers, on the scheduler's side.
    """

    recorder: Recorder
    journal: Journal
    tracer: Tracer | None = None
    flight: Flight | None = None
    traces: Untraced = field(default_factory=Untraced)
    reports: Unreported = field(default_factory=Unreported)
    listeners: tuple[TransferListener, ...] = ()


def build(
    names: Sequence[str], options: Options, vllm_config: Any, tracing: TracingSettings | None, rank: int | None
) -> Telemetry:
    """Build the telemetry of this process: a worker of this rank, or the scheduler's (None)."""
    journal = Journal()
    recording = flight.begin(options.timeline, vllm_config, rank, names, WALL_OFFSET)
    traces, tracer = _trace(names, journal, tracing, rank) if tracing is not None else (None, None)
    recorder = Recorder(
        len(names),
        int(options.slow_call_ms * 1e6),
        tuple(names),
        {hook: int(ms * 1e6) for hook, ms in options.slow_call_ms_by_hook.items()},
        journal=journal,
        tracer=tracer,
        flight=recording,
    )
    reports = _report(names, options, vllm_config, recorder) if rank is None else None
    listening = (recording, traces, reports) if rank is None else ()
    return Telemetry(
        recorder,
        journal,
        tracer,
        recording,
        traces if traces is not None else Untraced(),
        reports if reports is not None else Unreported(),
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


def _report(names: Sequence[str], options: Options, vllm_config: Any, recorder: Recorder) -> Reports | None:
    """Return the reports of requests; None if they are off, or can't be made."""
    output, log = options.request_log, Unlogged()
    if output is None and not options.report:
        return None
    try:
        if output is not None:
            log = RequestLog(Stderr() if output == STDERR else LogFile(output), options.request_log_ratio, recorder)
        return Reports(names, ANSWERS[options.report], log, host.engine_place(vllm_config).number)
    except Exception:
        faults.contain("record")
        return None
