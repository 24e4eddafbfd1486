"""The demo's collector, fed by the exporters that vLLM uses."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Literal

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

from kvobs.demo.collector import PATH, Collector, Span
from kvobs.demo.server import HOST, ServerError

TRACE, OTHER_TRACE = 0xA1, 0xB2


def context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False)


def sdk_span(name: str, span_id: int = 1, trace_id: int = TRACE, **more: Any) -> ReadableSpan:
    times = {"start_time": 1_000, "end_time": 2_000}
    return ReadableSpan(name, context(trace_id, span_id), **(times | more))


@pytest.fixture(params=["http/protobuf", "grpc"])
def protocol(request: pytest.FixtureRequest) -> Literal["http/protobuf", "grpc"]:
    choice: Literal["http/protobuf", "grpc"] = request.param
    return choice


@pytest.fixture
def exporters() -> Iterator[ExitStack]:
    """Shut down at the end what `exporter` made."""
    with ExitStack() as stack:
        yield stack


def exporter(collector: Collector, exporters: ExitStack, timeout: float = 5, **more: Any) -> SpanExporter:
    made: SpanExporter
    if collector.protocol == "grpc":
        made = GrpcExporter(endpoint=collector.endpoint, insecure=True, timeout=timeout, **more)
    else:
        made = HttpExporter(endpoint=collector.endpoint, timeout=timeout, **more)
    exporters.callback(made.shutdown)
    return made


def export(collector: Collector, *spans: ReadableSpan, timeout: float = 5, **more: Any) -> SpanExportResult:
    with ExitStack() as stack:
        return exporter(collector, stack, timeout, **more).export(spans)


def threads_left(before: set[threading.Thread]) -> list[str]:
    """Return the threads that do not end."""
    deadline = time.monotonic() + 30
    while (left := [thread.name for thread in set(threading.enumerate()) - before]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def test_a_span_arrives_with_all_that_was_sent(protocol: Literal["http/protobuf", "grpc"]) -> None:
    sent = sdk_span(
        "kv.load cpu",
        parent=context(TRACE, 7),
        kind=SpanKind.SERVER,
        attributes={"kv_transfer.tokens": 64, "share": 0.5, "outcome": "ok", "is_sync": True, "ranks": [0, 1]},
        links=[Link(context(OTHER_TRACE, 9))],
        status=Status(StatusCode.ERROR),
        resource=Resource({"service.name": "prefill"}),
        instrumentation_scope=InstrumentationScope("kvobs"),
    )
    with Collector(protocol) as collector:
        assert export(collector, sent) is SpanExportResult.SUCCESS
    assert collector.spans == [
        Span(
            name="kv.load cpu",
            trace_id=f"{TRACE:032x}",
            span_id=f"{1:016x}",
            parent_id=f"{7:016x}",
            start_ns=1_000,
            end_ns=2_000,
            attributes={"kv_transfer.tokens": 64, "share": 0.5, "outcome": "ok", "is_sync": True, "ranks": [0, 1]},
            links=((f"{OTHER_TRACE:032x}", f"{9:016x}"),),
            kind="SERVER",
            error=True,
            scope="kvobs",
            resource={"service.name": "prefill"},
        )
    ]


def test_a_root_has_no_parent_no_link_and_no_error(protocol: Literal["http/protobuf", "grpc"]) -> None:
    with Collector(protocol) as collector:
        export(collector, sdk_span("root"))
    (root,) = collector.spans
    assert (root.parent_id, root.links, root.kind, root.error, dict(root.attributes)) == ("", (), "INTERNAL", False, {})


def test_spans_are_kept_in_order_of_arrival_and_by_trace(
    protocol: Literal["http/protobuf", "grpc"], exporters: ExitStack
) -> None:
    with Collector(protocol) as collector:
        sender = exporter(collector, exporters)
        sender.export([sdk_span("a", 1), sdk_span("b", 2, OTHER_TRACE)])
        early = collector.spans
        sender.export([sdk_span("c", 3)])
        assert [span.name for span in early] == ["a", "b"]
        assert [span.name for span in collector.spans] == ["a", "b", "c"]
        assert [span.name for span in collector.trace(f"{TRACE:032x}")] == ["a", "c"]
        assert collector.trace("") == []


@pytest.mark.parametrize("compression", [Compression.Gzip, Compression.NoCompression])
def test_http_bodies_may_be_compressed(compression: Compression) -> None:
    with Collector() as collector:
        assert export(collector, sdk_span("a"), compression=compression) is SpanExportResult.SUCCESS
    assert [span.name for span in collector.spans] == ["a"]


def test_many_senders_at_once_lose_nothing(protocol: Literal["http/protobuf", "grpc"]) -> None:
    with Collector(protocol) as collector, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: export(collector, sdk_span("x", i + 1), sdk_span("y", i + 1)), range(40)))
    assert set(results) == {SpanExportResult.SUCCESS}
    assert sorted(span.span_id for span in collector.spans) == sorted([f"{i + 1:016x}" for i in range(40)] * 2)


def test_a_server_needs_the_endpoint_and_one_variable(protocol: Literal["http/protobuf", "grpc"]) -> None:
    with Collector(protocol) as collector:
        path = {"grpc": "", "http/protobuf": PATH}[protocol]
        assert collector.endpoint == f"http://{HOST}:{collector.port}{path}"
        assert collector.env == {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}


# --- what a test may do to it


def test_a_collector_that_stopped_refuses_and_comes_back_on_its_port(
    protocol: Literal["http/protobuf", "grpc"],
) -> None:
    before = set(threading.enumerate())
    with Collector(protocol) as collector:
        export(collector, sdk_span("before", 1))
        begin, port = time.monotonic(), collector.port
        collector.stop()
        assert time.monotonic() - begin < 0.5
        assert threads_left(before) == []
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=1)
        assert export(collector, sdk_span("during", 2), timeout=0.3) is SpanExportResult.FAILURE
        collector.start()
        assert collector.port == port
        assert export(collector, sdk_span("after", 3)) is SpanExportResult.SUCCESS
    assert [span.name for span in collector.spans] == ["before", "after"]
    assert threads_left(before) == []
    collector.stop()  # once more is nothing


def test_a_sender_outlives_a_restart(protocol: Literal["http/protobuf", "grpc"], exporters: ExitStack) -> None:
    """One exporter, as in a server; its connection ends with the collector."""
    with Collector(protocol) as collector:
        sender = exporter(collector, exporters)
        sender.export([sdk_span("before", 1)])
        collector.stop()
        collector.start()
        assert sender.export([sdk_span("after", 2)]) is SpanExportResult.SUCCESS
        assert [span.name for span in collector.spans] == ["before", "after"]


def test_a_collector_that_hangs_accepts_and_never_answers(protocol: Literal["http/protobuf", "grpc"]) -> None:
    before = set(threading.enumerate())
    with Collector(protocol, hang=True) as collector:
        begin = time.monotonic()
        assert export(collector, sdk_span("a"), timeout=0.5) is SpanExportResult.FAILURE
        assert 0.4 < time.monotonic() - begin < 2
        socket.create_connection((HOST, collector.port), timeout=1).close()
        begin = time.monotonic()
    assert time.monotonic() - begin < 0.5
    assert collector.spans == []
    assert threads_left(before) == []


def test_stopping_frees_who_waits_for_an_answer(protocol: Literal["http/protobuf", "grpc"]) -> None:
    before = set(threading.enumerate())
    with Collector(protocol, hang=True) as collector, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(export, collector, sdk_span("a"), timeout=1.5)
        time.sleep(0.3)
        assert not waiting.done()
        begin = time.monotonic()
        collector.stop()
        assert time.monotonic() - begin < 0.5
        assert waiting.result() is SpanExportResult.FAILURE
    assert threads_left(before) == []


def test_a_connection_that_says_nothing_does_not_hold_up_the_end(protocol: Literal["http/protobuf", "grpc"]) -> None:
    before = set(threading.enumerate())
    with Collector(protocol) as collector, socket.create_connection((HOST, collector.port)) as silent:
        time.sleep(0.1)
        begin = time.monotonic()
        collector.stop()
        assert time.monotonic() - begin < 0.5
        silent.settimeout(1)
        while silent.recv(1024):  # what a gRPC server says first
            pass
    assert threads_left(before) == []


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/metrics", b"", {}, 404),
        (PATH, b"\xff\xff", {}, 400),
        (PATH, b"not gzip", {"Content-Encoding": "gzip"}, 400),
    ],
)
def test_what_is_no_span_is_refused(path: str, body: bytes, headers: dict[str, str], status: int) -> None:
    with Collector() as collector:
        request = urllib.request.Request(f"http://{HOST}:{collector.port}{path}", body, headers)
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(request, timeout=5):
            pass
        caught.value.close()
    assert caught.value.code == status
    assert collector.spans == []


def test_a_taken_port_is_named(protocol: Literal["http/protobuf", "grpc"]) -> None:
    with Collector(protocol) as collector, pytest.raises(ServerError, match=f"Port {collector.port} "):
        Collector(protocol, collector.port).start()
