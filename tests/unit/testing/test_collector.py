"""The demo's collector, and the one of the tests, fed by the exporters that vLLM uses."""

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind
from opentelemetry.trace.status import Status, StatusCode

from kvobs.testing.collector import Collector, ReceivedSpan
from kvobs.testing.server import HOST
from tests.support.grpc_collector import SERVICE, GrpcCollector

TRACE, OTHER_TRACE = 0xA1, 0xB2


def context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False)


def sdk_span(name: str, span_id: int = 1, trace_id: int = TRACE, **more: Any) -> ReadableSpan:
    return ReadableSpan(name, context(trace_id, span_id), **({"start_time": 1_000, "end_time": 2_000} | more))


@pytest.fixture(params=[Collector, GrpcCollector])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as made:
        yield made


def exporter(collector: Collector, exporters: ExitStack, timeout: float = 60, **more: Any) -> SpanExporter:
    of_grpc = isinstance(collector, GrpcCollector)
    cls: Any = partial(GrpcExporter, insecure=True) if of_grpc else HttpExporter
    made: SpanExporter = cls(endpoint=collector.endpoint, timeout=timeout, **more)
    exporters.callback(made.shutdown)
    return made


def export(collector: Collector, *spans: ReadableSpan, timeout: float = 60, **more: Any) -> SpanExportResult:
    with ExitStack() as stack:
        return exporter(collector, stack, timeout, **more).export(spans)


def test_a_span_arrives_with_all_that_was_sent(collector: Collector) -> None:
    attributes = {"kv_transfer.tokens": 64, "share": 0.5, "outcome": "ok", "is_sync": True, "ranks": [0, 1]}
    sent = sdk_span(
        "kv.load cpu", parent=context(TRACE, 7), kind=SpanKind.SERVER, attributes=attributes,
        links=[Link(context(OTHER_TRACE, 9))], status=Status(StatusCode.ERROR),
        resource=Resource({"service.name": "prefill"}), instrumentation_scope=InstrumentationScope("kvobs"),
    )  # fmt: skip
    assert export(collector, sent, sdk_span("root")) is SpanExportResult.SUCCESS
    arrived, root = sorted(collector.spans, key=lambda span: span.name)
    assert arrived == ReceivedSpan(
        "kv.load cpu", trace_id=f"{TRACE:032x}", span_id=f"{1:016x}", parent_id=f"{7:016x}", start_ns=1_000,
        end_ns=2_000, attributes=attributes, links=((f"{OTHER_TRACE:032x}", f"{9:016x}"),), kind="SERVER",
        error=True, scope="kvobs", resource={"service.name": "prefill"},
    )  # fmt: skip
    assert (root.parent_id, root.links, root.kind, root.error, dict(root.attributes)) == ("", (), "INTERNAL", False, {})


def test_spans_are_kept_in_order_and_many_senders_lose_none(collector: Collector) -> None:
    export(collector, sdk_span("a", 1), sdk_span("b", 2, OTHER_TRACE))
    export(collector, sdk_span("c", 3))
    assert [span.name for span in collector.spans] == ["a", "b", "c"]
    assert [span.name for span in collector.trace(f"{TRACE:032x}")] == ["a", "c"]
    collector.spans.clear()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: export(collector, sdk_span("x", i + 1), sdk_span("y", i + 1)), range(40)))
    assert set(results) == {SpanExportResult.SUCCESS}
    assert sorted(span.span_id for span in collector.spans) == sorted([f"{i + 1:016x}" for i in range(40)] * 2)


def test_http_bodies_may_be_compressed() -> None:
    with Collector() as collector:
        assert export(collector, sdk_span("a"), compression=Compression.Gzip) is SpanExportResult.SUCCESS
    assert [span.name for span in collector.spans] == ["a"]


@pytest.mark.parametrize(("body", "headers"), [(b"\xff\xff", {}), (b"not gzip", {"Content-Encoding": "gzip"})])
def test_malformed_span_is_refused(body: bytes, headers: dict[str, str]) -> None:
    with Collector() as collector:
        request = urllib.request.Request(collector.endpoint, body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=60):
            pass
        caught.value.close()
    assert caught.value.code == 400
    assert collector.spans == []


def test_a_stopped_collector_refuses_and_returns_on_its_port() -> None:
    with GrpcCollector() as collector, ExitStack() as exporters:
        port = collector.port
        sender = exporter(collector, exporters)  # as a server's, it outlives the restart
        sender.export([sdk_span("before", 1)])
        collector.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=1)
        assert export(collector, sdk_span("during", 2), timeout=0.3) is SpanExportResult.FAILURE
        collector.start()
        assert collector.port == port
        assert sender.export([sdk_span("after", 3)]) is SpanExportResult.SUCCESS
    assert [span.name for span in collector.spans] == ["before", "after"]


def test_a_hanging_collector_never_answers_until_it_stops() -> None:
    """Without an exporter, which would try again for a minute."""
    with GrpcCollector() as collector, grpc.insecure_channel(collector.endpoint.partition("://")[2]) as channel:
        collector.hang = True
        waiting = channel.unary_unary(f"/{SERVICE}/Export").future(b"", timeout=60)
        with pytest.raises(grpc.FutureTimeoutError):
            waiting.result(timeout=0.3)
        collector.stop()
        assert waiting.exception(timeout=60).code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert collector.spans == []
