"""Records become spans with the ids and times they have; what a collector does costs spans, and nothing else."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode

import kvobs
from kvobs.export.span_export import make_exporter
from kvobs.schema import spans
from kvobs.schema.spans import Reason, Record
from tests.support.contexts import SAMPLED, UNSAMPLED, no_otel_variables, record, records
from tests.support.converters import MODEL, Converter, Hanging, Make


def test_a_span_has_the_ids_and_times_of_its_record(converter: Make) -> None:
    mine = converter()
    attributes = {"kv_transfer.connector": "disk", "kv_transfer.tokens": 64, "kv_transfer.rank_skew": 0.5}
    made = record(parent_id="3" * 16, attributes=attributes, links=(UNSAMPLED.traceparent, "nonsense"))
    assert mine.convert([made], engine=7) == 1
    (span,) = mine.sent()
    assert (span.name, span.start_time, span.end_time) == ("kv.load disk", 1_000, 3_000)
    assert (span.context.trace_id, span.context.span_id) == (int("1" * 32, 16), int("2" * 16, 16))
    assert span.context.trace_flags.sampled
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (int("1" * 32, 16), int("3" * 16, 16))
    assert span.attributes == {**attributes, **MODEL, "kv_transfer.engine": 7, "kv_transfer.sampling.reason": "parent"}
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [
        (int(UNSAMPLED.trace_id, 16), int(UNSAMPLED.span_id, 16))
    ]
    assert (span.status.status_code, span.events) == (StatusCode.UNSET, ())
    assert span.instrumentation_scope is not None
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("kvobs", kvobs.__version__)


@given(records)
def test_the_real_encoder_takes_every_record_as_it_is_read(lasting: Converter, made: Record) -> None:
    lasting.again()
    assert lasting.convert([msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Record)]) == 1
    (sent,) = encode_spans(lasting.sent()).resource_spans[0].scope_spans[0].spans
    assert (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex()) == made[1:4]
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano, sent.name) == (made.start_ns, made.end_ns, made.title)
    assert {attribute.key for attribute in sent.attributes} == {
        *made.attributes,
        *MODEL,
        "kv_transfer.engine",
        "kv_transfer.sampling.reason",
    }
    assert [link.trace_id.hex() for link in sent.links] == [SAMPLED.trace_id] * len(made.links)
    assert sent.status.code == (StatusCode.ERROR if spans.ERROR_TYPE in made.attributes else StatusCode.UNSET).value


def test_kvobs_is_the_same_service_as_vllm(converter: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a provider of vLLM's, the environment says which one it is."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    mine = converter()
    mine.convert([record()])
    assert mine.sent()[0].resource.attributes["service.name"] == "mine"
    resource = Resource({"service.name": "vllm-server", "vllm.process_id": "1"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    mine = converter()
    mine.convert([record()])
    assert mine.sent()[0].resource is resource


def test_the_global_provider_is_left_alone(converter: Make) -> None:
    before = trace.get_tracer_provider()
    converter().convert([record()])
    assert trace.get_tracer_provider() is before


def test_a_full_queue_loses_new_spans_until_it_is_empty(converter: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, n in (("OTEL_BSP_MAX_QUEUE_SIZE", 10), ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 4)):
        monkeypatch.setenv(name, str(n))
    hanging = Hanging()
    mine = Converter(hanging)
    assert mine.converter.room == 10
    assert mine.convert(*[[record()]] * 15) == 10
    assert (mine.lost, mine.converter.room, mine.converter.queued) == ({"queue": 5}, 0, 10)
    assert hanging.is_called.wait(60)
    assert mine.convert([record()]) == 0, "what is being sent is not sent yet"
    hanging.may_go.set()
    mine.send()
    assert mine.convert(*[[record()] * 5] * 2) == 10
    assert mine.convert([record(reason=Reason.SLOW)]) == 0
    mine.converter.close()
    assert mine.lost == {"queue": 7}


ENDPOINT = "http://collector:4317"
TRACES_PROTOCOL, PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("endpoint", "variables", "expected"),
    [
        (ENDPOINT, {}, Grpc),
        (ENDPOINT, {TRACES_PROTOCOL: "grpc"}, Grpc),
        (ENDPOINT, {TRACES_PROTOCOL: "http/protobuf"}, Http),
        (ENDPOINT, {PROTOCOL: "http/protobuf"}, Grpc),  # vLLM does not read it
        (ENDPOINT, {PROTOCOL: "nonsense"}, Grpc),
        (None, {}, Grpc),
        (None, {PROTOCOL: "http/protobuf"}, Http),
        (None, {PROTOCOL: "grpc", TRACES_PROTOCOL: "http/protobuf"}, Http),
        (None, {PROTOCOL: "http/protobuf", TRACES_PROTOCOL: "grpc"}, Grpc),
        (None, {PROTOCOL: "http/protobuf", TRACES_PROTOCOL: ""}, Http),
    ],
)
def test_the_protocol_is_vllms_or_else_the_environments(
    endpoint: str | None, variables: dict[str, str], expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://elsewhere:4318/v1/traces", **variables)
    exporter: Any = make_exporter(endpoint)
    assert ("collector:4317" if endpoint else "elsewhere:4318") in exporter._endpoint
    exporter.shutdown()
    assert type(exporter) is expected


@pytest.mark.parametrize("endpoint", [ENDPOINT, None])
def test_a_protocol_that_is_none_is_named(endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch, **{TRACES_PROTOCOL: "http/json"})
    with pytest.raises(ValueError, match="'http/json', allowed: 'grpc', 'http/protobuf'"):
        make_exporter(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "variables", "insecure"),
    [
        ("http://c:1", {}, True),
        ("grpc://c:1", {}, True),
        ("c:1", {}, True),
        ("https://c:1", {}, False),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c:1"}, False),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:1"}, False),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:1", "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true"}, True),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1"}, True),
    ],
)
def test_text_is_plain_where_vllm_or_the_environment_makes_it_so(
    endpoint: str | None, variables: dict[str, str], insecure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_otel_variables(monkeypatch, **variables)
    exporter: Any = make_exporter(endpoint)
    assert (exporter._insecure, exporter._endpoint) == (insecure, "c:1")
    exporter.shutdown()


@pytest.mark.parametrize(
    ("variables", "queue", "batch", "delay_ms"),
    [
        ({}, 2048, 512, 1000),
        ({"MAX_QUEUE_SIZE": "100", "SCHEDULE_DELAY": "250"}, 100, 100, 250),
        ({"MAX_QUEUE_SIZE": "4096", "MAX_EXPORT_BATCH_SIZE": "1024"}, 4096, 1024, 1000),
        ({"MAX_QUEUE_SIZE": "100", "MAX_EXPORT_BATCH_SIZE": "512"}, 100, 100, 1000),
        ({"MAX_QUEUE_SIZE": "0", "MAX_EXPORT_BATCH_SIZE": "-1"}, 2048, 512, 1000),
        ({"MAX_QUEUE_SIZE": "many", "MAX_EXPORT_BATCH_SIZE": "1.5"}, 2048, 512, 1000),
        ({"MAX_QUEUE_SIZE": "", "MAX_EXPORT_BATCH_SIZE": " "}, 2048, 512, 1000),
    ],
    ids=str,
)
def test_the_queue_and_its_delay_are_as_the_environment_says(  # noqa: PLR0917 - a table's columns, and fixtures
    variables: dict[str, str], queue: int, batch: int, delay_ms: int, converter: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    mine = converter().converter._processor._batch_processor
    found = (mine._max_queue_size, mine._max_export_batch_size, mine._schedule_delay_millis)
    assert found == (queue, batch, delay_ms)
