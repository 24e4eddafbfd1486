"""A collector of spans, by OTLP over gRPC, that can be down or hang."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import grpc

from kvobs.testing.collector import Collector, decode
from kvobs.testing.server import HOST, claim_port

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
THANKS = b""  # an empty ExportTraceServiceResponse: all spans were taken


class GrpcCollector(Collector):
    """Takes spans while it is started: from the beginning of the ``with`` block.

    ``start`` after ``stop`` listens on the same port again, and keeps the earlier spans. With ``hang`` it accepts
    whatever is sent and never answers.
    """

    def __init__(self) -> None:
        super().__init__("grpc")
        self.hang = False
        self.port = 0
        self._stopping = threading.Event()
        self._listening: GrpcListener | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        assert self._listening is None, "it listens already"
        self.port = claim_port(self.port)
        self.endpoint = f"http://{HOST}:{self.port}"
        self._stopping.clear()
        self._listening = GrpcListener(self.port, self._take)

    def stop(self) -> None:
        """Close the port and every connection at once, as if the collector had died."""
        if self._listening is not None:
            self._listening.stop(self._stopping.set)
            self._listening = None

    def _take(self, body: bytes) -> None:
        if self.hang:
            self._stopping.wait()
        else:
            self.spans += list(decode(body))


class GrpcListener:
    """Hands on the bytes of each ExportTraceServiceRequest."""

    def __init__(self, port: int, take: Callable[[bytes], None], host: str = HOST) -> None:
        def export(body: bytes, _context: grpc.ServicerContext) -> bytes:
            take(body)
            return THANKS

        self._pool = ThreadPoolExecutor(4, "collector")
        # Two that share a port would share the spans, too.
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        # Without serializers bytes come in and go out.
        methods = {"Export": grpc.unary_unary_rpc_method_handler(export)}
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        self._server.add_insecure_port(f"{host}:{port}")
        self._server.start()

    def stop(self, free: Callable[[], None] = lambda: None) -> None:
        """Close the port and cancel every call; ``free`` then ends those that hang."""
        stopped = self._server.stop(None)
        free()
        stopped.wait()
        self._pool.shutdown()
