"""A receiver of metrics by OTLP over HTTP, which keeps the last value of each series."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

Labels = frozenset[tuple[str, str]]


class Received(NamedTuple):
    """A number, or a histogram's sum with the counts of its buckets."""

    value: float
    buckets: tuple[int, ...] = ()


class MetricsReceiver:
    """Listens inside the ``with`` block; ``requests`` counts what has come."""

    def __init__(self) -> None:
        self.requests = 0
        self._series: dict[str, dict[Labels, Received]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the name that the base class has
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/metrics"

    def take(self, body: bytes) -> None:
        """Keep what a request says."""
        with self._lock:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        self._series.setdefault(metric.name, {}).update(_points(metric))
            self.requests += 1

    def series(self, name: str) -> dict[Labels, Received]:
        """Return the series of a metric."""
        with self._lock:
            return dict(self._series.get(name, {}))


def _points(metric: Any) -> dict[Labels, Received]:
    found = {}
    for point in getattr(metric, metric.WhichOneof("data")).data_points:
        labels = frozenset((pair.key, pair.value.string_value) for pair in point.attributes)
        if metric.HasField("histogram"):
            found[labels] = Received(point.sum, tuple(point.bucket_counts))
        else:
            found[labels] = Received(getattr(point, point.WhichOneof("value")))
    return found
