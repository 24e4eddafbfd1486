#!/usr/bin/env python
"""Stand in for Tempo: take spans by gRPC, and count them in its metrics by their names; with -health ask it."""

import sys
import urllib.request
from threading import Event

from prometheus_client import Counter, start_http_server

from kvobs.testing.collector import decode
from tests.support.grpc_collector import GrpcListener

OTLP, HTTP = 4317, 3200
SPANS = Counter("spans", "Spans that came.", ["name"])


def count(body: bytes) -> None:
    for span in decode(body):
        SPANS.labels(span.name).inc()


if "-health" in sys.argv:
    urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/ready").close()
else:
    listener = GrpcListener(OTLP, count, "0.0.0.0")
    start_http_server(HTTP)
    Event().wait()
