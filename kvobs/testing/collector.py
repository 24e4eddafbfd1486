"""Receive OpenTelemetry spans on this machine, by OTLP over HTTP, and keep them to look at.

The libraries that decode them come with vLLM, and are imported where they are used: this file imports without them.
"""

import gzip
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any, Self

from kvobs.testing.server import HOST

PATH = "/v1/traces"


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; ids are lower-case hex.

    ``parent_id`` is empty for a root; ``links`` are the trace and span ids of the spans that it links to; ``error`` is
    whether its status is an error; ``scope`` is the instrumentation, and ``resource`` the process that made it.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str = ""
    start_ns: int = 0
    end_ns: int = 0
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    kind: str = "INTERNAL"
    error: bool = False
    scope: str = ""
    resource: Mapping[str, Any] = field(default_factory=dict)


class Collector:
    """Takes spans inside the `with` block and keeps them.

    with Collector() as collector, Server(..., args=["--otlp-traces-endpoint", collector.endpoint],
                                          env=collector.env):
        ...
    for span in collector.spans: ...
    """

    def __init__(self, protocol: str = "http/protobuf") -> None:
        self.spans: list[ReceivedSpan] = []
        self.endpoint = ""
        """The value of vLLM's `--otlp-traces-endpoint`; known inside the block."""
        self.env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
        """The environment that a server needs in addition to the endpoint."""

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def __enter__(self) -> Self:
        self._listener = _Listener(self.spans)
        self.endpoint = f"http://{HOST}:{self._listener.server_address[1]}{PATH}"
        Thread(target=self._listener.serve_forever, args=(0.02,), name="collector", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()


class _Listener(ThreadingTCPServer):
    """Adds the spans that arrive on a free port; a connection carries one request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, spans: list[ReceivedSpan]) -> None:
        super().__init__((HOST, 0), _Handler)
        self.spans = spans

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error, unless only the other side went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Listener

    def do_POST(self) -> None:
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
        pass


def decode(body: bytes) -> Iterator[ReceivedSpan]:
    """Yield the spans in the bytes of an ExportTraceServiceRequest; raise `ValueError` for other bytes."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise ValueError(f"This is not an ExportTraceServiceRequest: {error}.") from error
    for process in request.resource_spans:
        resource = _plain_dict(process.resource.attributes)
        for scope in process.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_plain_dict(span.attributes),
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    error=span.status.code == Status.STATUS_CODE_ERROR,
                    scope=scope.scope.name,
                    resource=resource,
                )


def _plain_dict(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _plain(attribute.value) for attribute in attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(entry) for entry in value.array_value.values]
    if kind == "kvlist_value":
        return _plain_dict(value.kvlist_value.values)
    return getattr(value, kind) if kind else None
