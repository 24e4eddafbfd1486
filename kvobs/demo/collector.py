"""Receive OpenTelemetry spans on this machine, by OTLP over HTTP, and keep them to look at.

What decodes them comes with vLLM, and is imported where it is used: this file imports without it.
"""

import gzip
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from types import TracebackType
from typing import Any, Self

from kvobs.demo.server import HOST

PATH = "/v1/traces"


@dataclass(frozen=True)
class Span:
    """A span as it arrived; ids are lower-case hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    """Empty for a root."""
    start_ns: int = 0
    end_ns: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    """Trace and span ids of the spans that it links to."""
    kind: str = "INTERNAL"
    error: bool = False
    """Whether its status is an error."""
    scope: str = ""
    """Which instrumentation made it."""
    resource: Mapping[str, Any] = field(default_factory=dict)
    """Which process made it."""


class Collector:
    """Takes spans inside the `with` block and keeps them.

    with Collector() as collector, Server(..., args=["--otlp-traces-endpoint", collector.endpoint],
                                          env=collector.env):
        ...
    for span in collector.spans: ...
    """

    def __init__(self, protocol: str = "http/protobuf") -> None:
        self.spans: list[Span] = []
        self.endpoint = ""
        """What vLLM's `--otlp-traces-endpoint` takes; known inside the block."""
        self.env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
        """What a server needs in its environment beside the endpoint."""

    def trace(self, trace_id: str) -> list[Span]:
        """Return the spans of one trace so far, in order of arrival."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def __enter__(self) -> Self:
        self._listener = Listener(self.spans)
        self.endpoint = f"http://{HOST}:{self._listener.server_address[1]}{PATH}"
        Thread(target=self._listener.serve_forever, args=(0.02,), name="collector", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class Listener(ThreadingTCPServer):
    """Adds the spans that arrive on a free port; a connection carries one request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, spans: list[Span]) -> None:
        super().__init__((HOST, 0), Handler)
        self.spans = spans

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show what failed, unless only the other side went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Listener

    def do_POST(self) -> None:
        """Take spans."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            spans = list(decode(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body))
        except (ValueError, OSError, EOFError) as error:  # the last two come from gzip
            return self.send_error(HTTPStatus.BAD_REQUEST, str(error))
        self.server.spans += spans
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")  # an empty response: all spans were taken
        self.end_headers()
        return None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name that the base class has
        """Say nothing."""


def decode(body: bytes) -> Iterator[Span]:
    """Yield the spans in the bytes of an ExportTraceServiceRequest; raise `ValueError` if they are none."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
    from opentelemetry.proto.trace.v1.trace_pb2 import Status

    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"This is no ExportTraceServiceRequest: {error}.") from error
    for process in request.resource_spans:
        resource = plain_dict(process.resource.attributes)
        for scope in process.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=plain_dict(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    kind=Message.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    error=span.status.code == Status.STATUS_CODE_ERROR,
                    scope=scope.scope.name,
                    resource=resource,
                )


def plain_dict(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    return {attribute.key: plain(attribute.value) for attribute in attributes}


def plain(value: Any) -> Any:
    """Return an attribute's value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(entry) for entry in value.array_value.values]
    if kind == "kvlist_value":
        return plain_dict(value.kvlist_value.values)
    return getattr(value, kind) if kind else None
