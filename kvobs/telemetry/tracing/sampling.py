"""Tracing settings: the level, the endpoint of spans, and the sampler's decision on a trace.

They depend on the configuration and the environment only, so that all processes of an engine agree.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from kvobs.log import once
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding
from kvobs.schema.options import Options
from kvobs.telemetry.tracing.trace_context import DISABLED, TraceContext, as_otel, is_disabled

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """The tracing settings of an engine.

    With ``is_on`` spans are exported; else only spans of slow and failed loads and calls are written, for readers on
    the host. ``endpoint`` is vLLM's option, None if the standard environment variables set it. Loads longer than
    ``slow_load_ns`` and ``slow_sync_load_ns`` are traced even if not sampled.
    """

    is_on: bool
    has_calls: bool
    propagates: bool
    slow_load_ns: int
    slow_sync_load_ns: int
    endpoint: str | None

    @classmethod
    def of(cls, options: Options, vllm_config: Any) -> TracingSettings:
        """Return the settings; it is off without an OTLP endpoint, with level "off", or OTEL_SDK_DISABLED."""
        endpoint = getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None)
        has_endpoint = bool(endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT))
        level = options.tracing.level or ("requests" if has_endpoint else "off")
        is_on = level != "off" and has_endpoint and not is_disabled()
        return cls(
            is_on=is_on,
            has_calls=is_on and level == "calls",
            propagates=is_on and options.tracing.propagate,
            slow_load_ns=int(options.slow_load_ms * 1e6),
            # It blocks a step, as a call does.
            slow_sync_load_ns=int(min(options.slow_load_ms, options.slow_call_ms) * 1e6),
            endpoint=endpoint or None,
        )


def why_off(options: Options) -> tuple[str, list[Finding]]:
    """Return why nothing is traced, and a warning if the options ask for traces."""
    path, level = f"{PATH}.kvobs.tracing.level", options.tracing.level
    if level == "off":
        return "kvobs.tracing.level is 'off'", []
    why = f"{DISABLED} is true here" if is_disabled() else "--otlp-traces-endpoint is not set"
    fix = f"unset {DISABLED}" if is_disabled() else None
    return why, [] if level is None else [kinds.UNTRACED.at(path, fix=fix, level=level, why=why)]


def warn_about(options: Options, tracing: TracingSettings) -> None:
    """Log tracing settings that do not have the expected effect."""
    if not tracing.is_on:
        for warning in why_off(options)[1]:
            once("tracing:off", logging.WARNING, "%s", warning)
    elif tracing.endpoint is None:
        variable = TRACES_ENDPOINT if os.environ.get(TRACES_ENDPOINT) else ENDPOINT
        text = (
            "spans are sent to the endpoint in %s, but without --otlp-traces-endpoint vLLM drops clients' trace "
            "headers: every request starts its own trace"
        )
        once("tracing:parents", logging.WARNING, text, variable)


class Verdicts:
    """Decisions of the OpenTelemetry sampler that OTEL_TRACES_SAMPLER selects, which is vLLM's own too.

    It decides once for a trace, at its beginning, by the trace id and the parent's flag: the same in every process.
    """

    def __init__(self) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import Decision

        self._sampled = Decision.RECORD_AND_SAMPLE
        self._sampler = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).sampler
        # A sampler uses a parent's flag only, not its ids.
        self._parents = {flag: as_otel(TraceContext("1" * 32, "1" * 16, flag)) for flag in (False, True)}
        self._no_parent = Context()  # None would mean the span that is current here

    def on(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Return whether a trace is to be exported."""
        context = self._parents[parent.is_sampled] if parent is not None else self._no_parent
        result = self._sampler.should_sample(context, int(trace_id, 16), "kv.lookup")
        return result.decision is self._sampled
