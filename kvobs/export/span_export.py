"""Convert the span records of an engine's pages to OpenTelemetry spans, and export them: in whoever reads these pages.

Ids and times are already set, so that spans go directly to a batch processor without a tracer: a sixth of the cost. The
processor and its exporter are kvobs's own, never the global ones; a slow or absent collector costs spans, which are
counted, and nothing else.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread, local
from time import monotonic
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvobs.export.destinations import endpoint_shown
from kvobs.log import Outage, line
from kvobs.schema import __version__, spans
from kvobs.schema.spans import Record, Value
from kvobs.telemetry.tracing.trace_context import otlp_protocol, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

Dropped = Callable[[str, int], None]  # place, how many: see kvobs_spans_dropped_total

DELAY_MS = 1_000  # between batches: with several API servers vLLM leaves no time to send the rest at the end
CLOSING_S = 3.0
_QUEUE, _BATCH = 2048, 512  # OpenTelemetry's defaults

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(spans.SCOPE, __version__)


class SpanConverter:
    """Converts records to spans, and passes them to the exporter; every span has the ``attributes``.

    ``dropped`` is called for lost spans, also from the exporter's thread. ``to`` is where they go, for the log.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        attributes: Mapping[str, Value],
        dropped: Dropped,
        clock: Callable[[], float] = monotonic,
        to: str = "the collector",
    ) -> None:
        self._attributes = attributes
        self._dropped = dropped
        self._queue_size = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE)
        self._handed_on = 0
        self._exporter = CountingExporter(exporter, dropped, to, clock)
        self._resource = _resource()
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=self._queue_size,
            max_export_batch_size=min(self._queue_size, _from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH)),
            schedule_delay_millis=_from_environment("OTEL_BSP_SCHEDULE_DELAY", DELAY_MS),
        )
        # An absent collector would delay the end for as long as the exporter retries, so a thread waits for it. Started
        # now: Python 3.12.0 and 3.12.1 start none at the end.
        self._is_closed = Event()
        self._closing = Thread(target=self._shut_down, name="kvobs-closing", daemon=True)
        self._closing.start()
        atexit.register(self.close)

    def convert(self, groups: Iterable[Sequence[Record]], engine: int) -> list[Record]:
        """Export records, group by group; return those for which the queue had room."""
        exported: list[Record] = []
        for records in groups:
            if len(records) > self.room:
                self._dropped("queue", len(records))
                continue
            for record in records:
                self._processor.on_end(self._span(record, engine))
            self._handed_on += len(records)
            exported += records
        return exported

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

    @property
    def queued(self) -> int:
        """Return how many spans wait for the collector."""
        return max(0, self._handed_on - self._exporter.handled)

    @property
    def room(self) -> int:
        """Return how many more may wait."""
        return self._queue_size - self.queued

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most; called once."""
        atexit.unregister(self.close)
        self._is_closed.set()
        self._closing.join(CLOSING_S)

    def _shut_down(self) -> None:
        self._is_closed.wait()
        shutdown: Callable[[], None] = self._processor.shutdown
        shutdown()


class CountingExporter(SpanExporter):
    """Counts the spans that an exporter handles and loses, and logs the first loss, and when it works again."""

    def __init__(self, exporter: SpanExporter, dropped: Dropped, to: str, clock: Callable[[], float]) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self._to, self._outage = to, Outage(clock)
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
            text = (
                "spans can't be exported to %s: %s. Serving is not affected; further losses are only counted "
                "(kvobs_spans_dropped_total)"
            )
            self._outage.begins(logging.ERROR, text, self._to, line(_muted.last.rstrip("."), 1000))
        else:
            self._outage.ends("spans are exported to %s again", self._to)
        return result

    def shutdown(self) -> None:
        with _quietly():
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


_muted = local()


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the exporter's log lines; the last one is kept for kvobs's own log line."""
    _muted.is_on, _muted.last = True, "the exporter gives no reason"
    try:
        yield
    finally:
        _muted.is_on = False


def _is_logged(record: logging.LogRecord) -> bool:
    """Drop log records of threads that export kvobs's spans; vLLM's own exporter logs as before."""
    if not getattr(_muted, "is_on", False):
        return True
    _muted.last = record.getMessage()
    return False


def _listen_to_exporters() -> None:
    """Put the filter on the loggers of exporters and their transports: filters are not inherited."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("opentelemetry.exporter", "urllib3")):
            logging.getLogger(name).addFilter(_is_logged)


def make_converter(endpoint: str | None, model: str, dropped: Dropped) -> SpanConverter:
    """Return what exports the spans of an engine with this model; raises what ``make_exporter`` does."""
    to = endpoint_shown(endpoint)
    return SpanConverter(make_exporter(endpoint), {spans.GEN_AI_MODEL: model}, dropped, to=to)


def make_exporter(endpoint: str | None) -> SpanExporter:
    """Return an OTLP exporter, created as in vLLM for ``endpoint``, otherwise by the OTEL_* variables.

    Raises:
        ValueError: the protocol is neither "grpc" nor "http/protobuf".
    """
    variables = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"]
    if endpoint is None:
        variables.append("OTEL_EXPORTER_OTLP_PROTOCOL")  # which vLLM does not read
    if otlp_protocol(*variables) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        # As vLLM does: plain text for grpc:// and http://; https:// still means TLS.
        return Grpc(endpoint=endpoint, insecure=True if endpoint is not None else None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint=endpoint)


def _resource() -> Resource:
    """Return the resource of vLLM's own spans, so that both are one service; otherwise the environment's."""
    resource = getattr(trace.get_tracer_provider(), "resource", None)
    return resource if isinstance(resource, Resource) else TracerProvider(shutdown_on_exit=False).resource


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)


def _from_environment(name: str, default: int) -> int:
    """Return a positive number from the environment; the default if it is missing or invalid."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() and int(value) > 0 else default
