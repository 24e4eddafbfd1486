"""The same engine with its spans in memory, and what is asked of them."""

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvobs.testing import Script
from tests.support.observed import Observed

CLIENT_TRACE, CLIENT_SPAN = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
NOT_SAMPLED = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"}


class Traced(Observed):
    """An engine whose spans end in memory."""

    make_exporter: Any = InMemorySpanExporter

    def __init__(self, patch: pytest.MonkeyPatch, *scripts: Script, level: str | None = None, **more: Any) -> None:
        self.exporter = self.make_exporter()
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        patch.setattr("kvobs.export.span_export.make_exporter", lambda _endpoint: self.exporter)
        tracing = {**more.pop("tracing", {}), **({"level": level} if level else {})}
        more.setdefault("slow_call_ms", 60_000)  # a busy machine's pause is no slow call here
        super().__init__(patch, *scripts, tracing=tracing, **more)

    def spans(self, name: str = "") -> list[ReadableSpan]:
        """Return the spans whose names begin so, in the order of their start."""
        self._deliver()
        self.front.export_spans()
        found = [span for span in self.exporter.get_finished_spans() if span.name.startswith(name)]
        return sorted(found, key=lambda span: span.start_time or 0)

    def span(self, name: str) -> ReadableSpan:
        (span,) = self.spans(name)
        return span


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Return trace id, span id and parent's id, in hex."""
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return kvobs's own attributes, without their prefix."""
    prefix = "kv_transfer."
    return {k.removeprefix(prefix): v for k, v in (span.attributes or {}).items() if k.startswith(prefix)}


def load(engine: Traced, request: str = "r", by: Script | None = None, **headers: Any) -> None:
    """Let a request load, from the first connector by default: the ranks report one and two steps after the order."""
    by = by or engine.scripts[0]
    engine.rig.add(request, max_tokens=1, **headers)
    engine.step(2)
    by.say(0, received=request)
    engine.step()
    by.say(1, received=request)
    engine.step(3)
