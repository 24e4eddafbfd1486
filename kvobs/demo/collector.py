"""Receive OpenTelemetry spans on this machine, by OTLP over HTTP or gRPC, and keep them to look at.

What decodes them comes with vLLM, and is imported where it is used: this file imports without it.
"""

import gzip
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from kvobs.demo.server import HOST, claim_port

PATH = "/v1/traces"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
THANKS = b""
"""An empty ExportTraceServiceResponse: all spans were taken."""

Take = Callable[[bytes], None]
"""Takes the bytes of an ExportTraceServiceRequest; raises `ValueError` if they are none."""


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
    """Takes spans inside the `with` block and keeps them; after it, or `stop`, nothing listens any more.

        with Collector() as collector, Server(..., args=["--otlp-traces-endpoint", collector.endpoint],
                                              env=collector.env):
            ...
        for span in collector.spans: ...

    `start` after `stop` listens on the same port again, and keeps what came before. With `hang` it accepts whatever is
    sent and never answers, as a collector that is stuck. Entering raises `ServerError` when the port is taken.
    """

    def __init__(
        self, protocol: Literal["http/protobuf", "grpc"] = "http/protobuf", port: int = 0, *, hang: bool = False
    ) -> None:
        self.protocol, self.port, self.hang = protocol, port, hang
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._listener: Listener | None = None

    @property
    def endpoint(self) -> str:
        """What vLLM's `--otlp-traces-endpoint` takes; known once started."""
        return f"http://{HOST}:{self.port}{'' if self.protocol == 'grpc' else PATH}"

    @property
    def env(self) -> dict[str, str]:
        """What a server needs in its environment beside the endpoint."""
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": self.protocol}

    @property
    def spans(self) -> list[Span]:
        """The spans so far, in order of arrival."""
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Span]:
        """Return the spans of one trace so far, in order of arrival."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen."""
        assert self._listener is None, "it listens already"
        self.port = claim_port(self.port)
        self._stopping.clear()
        self._listener = (GrpcListener if self.protocol == "grpc" else HttpListener)(self.port, self._take)

    def stop(self) -> None:
        """Close the port and every connection, at once, as if the collector had died."""
        if self._listener is not None:
            self._listener.cut()
            self._stopping.set()
            self._listener.join()
            self._listener = None

    def _take(self, body: bytes) -> None:
        if self.hang:
            self._stopping.wait()
            return
        spans = list(decode(body))
        with self._lock:
            self._spans += spans


# --- listeners


class Listener(Protocol):
    """Listens from the start, on threads of its own."""

    def cut(self) -> None:
        """Close the port and every connection, whatever is going on there."""

    def join(self) -> None:
        """Return when all its threads have ended."""


class HttpListener(ThreadingTCPServer):
    """OTLP over HTTP; a connection carries one request."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, port: int, take: Take) -> None:
        """Listen on a port, and hand on what comes."""
        self.take = take
        self.connections: set[socket.socket] = set()
        super().__init__((HOST, port), HttpHandler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.02,), name="collector", daemon=True)
        self.thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember a connection, to cut it."""
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that ends."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show what failed, unless only the other side went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def cut(self) -> None:
        """Close the port and every connection."""
        self.shutdown()
        self.socket.close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the threads, one a connection."""
        self.server_close()
        self.thread.join()


class HttpHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: HttpListener

    def do_POST(self) -> None:
        """Take spans."""
        if self.path != PATH:
            return self.send_error(HTTPStatus.NOT_FOUND)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            self.server.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        except (ValueError, OSError, EOFError) as error:  # the last two come from gzip
            return self.send_error(HTTPStatus.BAD_REQUEST, str(error))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(THANKS)))
        self.end_headers()
        self.wfile.write(THANKS)
        return None

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name that the base class has
        """Say nothing."""


class GrpcListener:
    """OTLP over gRPC."""

    def __init__(self, port: int, take: Take) -> None:
        """Listen on a port, and hand on what comes."""
        import grpc

        def export(body: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                take(body)
            except ValueError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return THANKS

        self.pool = ThreadPoolExecutor(4, "collector")
        # Two that share a port would share the spans, too.
        self.server = grpc.server(self.pool, options=[("grpc.so_reuseport", 0)])
        # Without serializers bytes come in and go out.
        methods = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        self.server.add_insecure_port(f"{HOST}:{port}")
        self.server.start()

    def cut(self) -> None:
        """Close the port and cancel every call."""
        self.stopped = self.server.stop(None)

    def join(self) -> None:
        """Wait for the threads."""
        self.stopped.wait()
        self.pool.shutdown()


# --- out of protobuf


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
