"""Whether to trace, and what: the level, where spans go, and the sampler's verdict on a trace.

Every process of an engine comes to the same answers: they follow from the configuration and the environment alone.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from kvobs.config import Options
from kvobs.context import TraceContext, as_otel
from kvobs.notices import once

TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DISABLED = "OTEL_SDK_DISABLED"


@dataclass(frozen=True, slots=True)
class Tracing:
    """What is traced.

    ``endpoint`` is the one that vLLM was given, None where the standard variables say it. ``slow_load_ns`` and
    ``slow_sync_load_ns`` are the durations above which a load is traced whatever was sampled.
    """

    has_calls: bool
    has_layers: bool
    propagates: bool
    slow_load_ns: int
    slow_sync_load_ns: int
    endpoint: str | None

    @classmethod
    def of(cls, options: Options, vllm_config: Any) -> Tracing | None:
        """Return None where nothing is traced: no OTLP endpoint, level "off", or OTEL_SDK_DISABLED."""
        endpoint = getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None)
        has_endpoint = bool(endpoint or os.environ.get(TRACES_ENDPOINT) or os.environ.get(ENDPOINT))
        level = options.tracing.level or ("requests" if has_endpoint else "off")
        if level == "off" or not has_endpoint or os.environ.get(DISABLED, "").strip().lower() == "true":
            return None
        return cls(
            has_calls=level == "calls",
            has_layers=options.tracing.layers,
            propagates=options.tracing.propagate,
            slow_load_ns=int(options.slow_load_ms * 1e6),
            # A step waits for it, as for a call.
            slow_sync_load_ns=int(min(options.slow_load_ms, options.slow_ms("start_load_kv")) * 1e6),
            endpoint=endpoint or None,
        )


def warn_about(options: Options, tracing: Tracing | None) -> None:
    """Log what an operator would wonder about later."""
    level = options.tracing.level
    if tracing is None and level not in (None, "off"):
        once(
            "tracing:off",
            logging.WARNING,
            "tracing.level is %r, and nothing is traced: there is no OTLP endpoint, or OTEL_SDK_DISABLED is true. "
            "Start vLLM with --otlp-traces-endpoint, or set %s",
            level,
            TRACES_ENDPOINT,
        )
    if tracing is not None and tracing.endpoint is None:
        once(
            "tracing:parents",
            logging.WARNING,
            "spans go where %s says, but vLLM drops its clients' trace headers without --otlp-traces-endpoint: every "
            "request starts a trace of its own",
            TRACES_ENDPOINT if os.environ.get(TRACES_ENDPOINT) else ENDPOINT,
        )


class Verdicts:
    """The verdict of OpenTelemetry's sampler, as OTEL_TRACES_SAMPLER names it, and so vLLM's own.

    It is asked once for a trace, where that begins: a function of the trace id and the parent's flag, it says the same
    in every process.
    """

    def __init__(self) -> None:
        from opentelemetry.context import Context
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import Decision

        self._sampled = Decision.RECORD_AND_SAMPLE
        self._sampler = TracerProvider(resource=Resource.get_empty(), shutdown_on_exit=False).sampler
        # A sampler looks at a parent's flag only; its ids don't matter.
        self._parents = {flag: as_otel(TraceContext("1" * 32, "1" * 16, flag)) for flag in (False, True)}
        self._no_parent = Context()  # None would stand for whatever span is current here

    def on(self, trace_id: str, parent: TraceContext | None) -> bool:
        """Return whether a trace is to be exported."""
        context = self._parents[parent.is_sampled] if parent is not None else self._no_parent
        result = self._sampler.should_sample(context, int(trace_id, 16), "kv.lookup")
        return result.decision is self._sampled
