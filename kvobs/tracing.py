"""API server: cut spans from the records in the payload, and export them by OpenTelemetry's own means.

The ids and times are chosen already, so that a span goes to a batch processor as it is, past any tracer: a sixth of the
cost. The processor and its exporter are kvobs's own, never the global ones; a collector that is slow or gone costs
spans, which are counted, and nothing else.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread, local
from time import monotonic
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvobs import __version__, spans
from kvobs.context import parse
from kvobs.notices import once
from kvobs.spans import Record, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

Dropped = Callable[[str, int], None]  # place, how many: see kvobs_spans_dropped_total

A_SECOND = 200  # spans, sustained: above it the API server's event loop feels the encoding
RESERVED = 50  # of those, for slow and failed ones
DELAY_MS = 1_000  # between batches: with several API servers vLLM leaves no time to send what is left at the end
CLOSING_S = 3.0
_QUEUE, _BATCH = 2048, 512  # OpenTelemetry's defaults

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(spans.SCOPE, __version__)


class SpanCutter:
    """Makes spans of records, and hands them to the exporter.

    Args:
        exporter: where they go.
        attributes: what each span carries.
        dropped: told of each span that is lost; also from the exporter's thread.
        clock: a monotonic time in seconds.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        attributes: Mapping[str, Value],
        dropped: Dropped,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._attributes = attributes
        self._dropped = dropped
        self._clock = clock
        self._room, self._since = float(A_SECOND), clock()
        self._queue_size = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE)
        self._handed_on = 0
        self._exporter = CountingExporter(exporter, dropped)
        self._resource = _resource()
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._queue_size,
            max_export_batch_size=min(self._queue_size, _from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH)),
            schedule_delay_millis=_from_environment("OTEL_BSP_SCHEDULE_DELAY", DELAY_MS),
        )
        atexit.register(self.close)

    def cut(self, groups: Iterable[Sequence[Any]], engine: int) -> list[Record]:
        """Export the records of one payload, group by group; return those that are on their way."""
        exported: list[Record] = []
        for group in groups:
            records = [record for row in group if (record := Record.read(row)) is not None]
            lost = self._lost(records) if len(records) == len(group) else "malformed"
            if lost:
                self._dropped(lost, len(group))
                continue
            for record in records:
                self._processor.on_end(self._span(record, engine))
            self._handed_on += len(records)
            exported += records
        return exported

    def _lost(self, records: Sequence[Record]) -> str:
        """Return where a group is lost, if it is: at the rate that is allowed, or in the queue."""
        now = self._clock()
        self._room = min(A_SECOND, self._room + (now - self._since) * A_SECOND)
        self._since = now
        is_urgent = any(record.is_urgent for record in records)
        if self._room - len(records) < (0 if is_urgent else RESERVED):
            return "rate"
        if self._handed_on - self._exporter.handled + len(records) > self._queue_size:
            return "queue"
        self._room -= len(records)
        return ""

    def _span(self, record: Record, engine: int) -> ReadableSpan:
        attributes = {**record.attributes, **self._attributes, spans.ENGINE: engine, spans.REASON: str(record.reason)}
        is_error = spans.ERROR_TYPE in record.attributes
        links = tuple(Link(_context(link.trace_id, link.span_id)) for value in record.links if (link := parse(value)))
        return ReadableSpan(
            name=record.title,
            context=_context(record.trace_id, record.span_id),
            parent=_context(record.trace_id, record.parent_id) if record.parent_id else None,
            resource=self._resource,
            attributes=attributes,
            links=links,
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR) if is_error else Status(),
            start_time=record.start_ns,
            end_time=record.end_ns,
            instrumentation_scope=_SCOPE,
        )

    def close(self) -> None:
        """Send what is left, for a few seconds at most; to be called once."""
        atexit.unregister(self.close)
        # A collector that is gone would hold the process for as long as the exporter tries again.
        shutdown: Callable[[], None] = self._processor.shutdown
        closing = Thread(target=shutdown, name="kvobs-closing", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # Python 3.12.0 and 3.12.1 start no thread any more at this time
            shutdown()
        else:
            closing.join(CLOSING_S)


class CountingExporter(SpanExporter):
    """Counts what an exporter handles and loses, and says once that it loses something."""

    def __init__(self, exporter: SpanExporter, dropped: Dropped) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self.handled = 0
        _listen_to_exporters()

    def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            with _quietly():
                result = self._exporter.export(batch)
        except Exception as error:
            _muted.last = f"{type(error).__name__}: {error}"
            result = SpanExportResult.FAILURE
        self.handled += len(batch)
        if result is not SpanExportResult.SUCCESS:
            self._dropped("export", len(batch))
            once(
                "export",
                logging.ERROR,
                "spans can't be exported: %s. Serving goes on; what is lost is counted in kvobs_spans_dropped_total, "
                "and not logged again",
                getattr(_muted, "last", "the exporter does not say why"),
            )
        return result

    def shutdown(self) -> None:
        with _quietly():
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


_muted = local()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what the exporter says of every batch out of the log; its last word is kept for ours."""
    _muted.is_on = True
    try:
        yield
    finally:
        _muted.is_on = False


class _Mute(logging.Filter):
    """Drops what is logged on a thread that exports kvobs's spans; vLLM's own exporter logs as ever."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(_muted, "is_on", False):
            return True
        _muted.last = record.getMessage()
        return False


_MUTE = _Mute()


def _listen_to_exporters() -> None:
    """Put the filter on the loggers of exporters and of what they send with: a filter is not inherited."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("opentelemetry.exporter", "urllib3")):
            logging.getLogger(name).addFilter(_MUTE)


def make_exporter(endpoint: str | None) -> SpanExporter:
    """Return an OTLP exporter, as vLLM makes it for ``endpoint``, or else as the OTEL_* variables say.

    Raises:
        ValueError: the protocol is neither "grpc" nor "http/protobuf".
    """
    variables = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
    if endpoint is None:
        variables.append("OTEL_EXPORTER_OTLP_PROTOCOL")  # which vLLM does not read
    protocol = next((value for name in variables if (value := os.environ.get(name))), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        # As vLLM does: plain text for grpc:// and http://; https:// is TLS all the same.
        return Grpc(endpoint=endpoint, insecure=True if endpoint is not None else None)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise ValueError(f"the OTLP protocol is {protocol!r}, allowed: 'grpc', 'http/protobuf'")


def _resource() -> Resource:
    """Return the resource of vLLM's own spans, so that both are one service; else what the environment says."""
    resource = getattr(trace.get_tracer_provider(), "resource", None)
    return resource if isinstance(resource, Resource) else TracerProvider(shutdown_on_exit=False).resource


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


def _from_environment(name: str, default: int) -> int:
    """Return a positive number from the environment; the default where there is none, or something else."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and int(value) > 0 else default
