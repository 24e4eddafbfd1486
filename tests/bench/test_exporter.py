"""The CPU time of a process is what the kernel says, and the comparison is the one that is printed."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext

from kvobs.testing.server import ServerError
from kvobs.vllm_api.proc import stat
from tests.bench.exporter import TRACED, Turn, check_traced, configs, lines, receiving, seconds
from tests.bench.report import Verdict


def test_seconds_are_those_of_the_process() -> None:
    before, ours = seconds(stat(os.getpid())[1]), time.process_time()
    while time.process_time() - ours < 0.2:
        pass
    assert seconds(stat(os.getpid())[1]) - before == pytest.approx(time.process_time() - ours, abs=0.05)


def test_servers_are_compared_round_by_round() -> None:
    names = configs(1, Path())
    turns = {name: [Turn(2.0, 1.0, 4.0, 0.0, 3.0, 100.0)] * 4 for name in names}
    turns["kvobs, exporter"] = [Turn(2.1, 1.5, 6.0, 0.2, 3.0, 101.0)] * 4
    found = {line.title: line for line in lines(turns, 41.0)}
    assert found["API server, a request, kvobs, exporter"].median == pytest.approx(1.05)
    assert found["API server, a request, kvobs, exporter"].verdict is Verdict.MISSED
    assert found["EngineCore without its waits, a request, kvobs, exporter"].median == pytest.approx(1.5)
    assert found["EngineCore, a request, kvobs, exporter"].median == pytest.approx(1.1)  # with stock's waits
    assert found["the exporter, of a core"].median == pytest.approx(1.0)  # 150 x 0.2 ms in 3 s
    assert found["the exporter's memory"].median == 41.0
    assert found["completion, p95, exporter against off"].median == pytest.approx(1.01)
    assert {line.verdict for line in found.values()} == {Verdict.MISSED, Verdict.MET, Verdict.NONE}


def test_only_the_router_differs() -> None:
    made = configs(9464, Path())
    assert made["stock"] == made["stock again"]
    assert "kv_connector_module_path" not in made["stock"]
    assert made["kvobs, exporter"]["kv_connector_extra_config"]["kvobs"].pop("exporter") == {"port": 9464}
    assert made["kvobs, exporter"] == made["kvobs"]


@pytest.mark.parametrize("names", [TRACED, set(), {"kvobs"}, {*TRACED, "off"}])
def test_a_tracer_that_is_idle_or_should_be_off_is_not_measured(names: set[str]) -> None:
    with receiving() as (endpoint, bodies):
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
        spans = [span("kvobs", name) for name in names]
        assert exporter.export([*spans, span("vllm", "stock")]) is SpanExportResult.SUCCESS
        exporter.shutdown()
    with nullcontext() if names == TRACED else pytest.raises(ServerError, match="kvobs's spans arrived from"):
        check_traced(bodies)


def span(scope: str, server: str) -> ReadableSpan:
    resource, instrumentation = Resource({"service.name": server}), InstrumentationScope(scope)
    context = SpanContext(1, 2, is_remote=False)
    return ReadableSpan(
        "kv.lookup", context, resource=resource, instrumentation_scope=instrumentation, start_time=1, end_time=7
    )
