"""Stand in for the collector: take spans by gRPC and count them in its metrics, by their names."""

from threading import Event

from prometheus_client import Counter, start_http_server

from kvobs.demo.collector import decode
from tests.support.grpc_collector import GrpcListener

OTLP, METRICS, HEALTH = 4317, 8888, 13133
SPANS = Counter("otelcol_receiver_accepted_spans", "Spans that came.", ["span"])


def count(body: bytes) -> None:
    for span in decode(body):
        SPANS.labels(span.name).inc()


listener = GrpcListener(OTLP, count, "0.0.0.0")
for port in (METRICS, HEALTH):
    start_http_server(port)
Event().wait()
