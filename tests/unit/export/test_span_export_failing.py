"""An exporter or collector that fails or hangs costs spans that are counted; a process ends in time."""

import atexit
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvobs.export import span_export
from kvobs.export.span_export import make_exporter
from kvobs.testing.server import claim_port
from tests.support.contexts import record
from tests.support.converters import Converter, Hanging, Make

TRANSPORT, GRPC = (
    logging.getLogger(name) for name in ("urllib3.connectionpool", "opentelemetry.exporter.otlp.proto.grpc.exporter")
)
"""Loggers that a real exporter has made before the first span."""


class Failing(SpanExporter):
    """Fails as ordered, with a reason for every batch."""

    def __init__(self, failure: Exception | SpanExportResult) -> None:
        self.failure = failure
        self.is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        TRANSPORT.warning("retrying")
        GRPC.error("no route to collector")
        if isinstance(self.failure, Exception):
            raise self.failure
        return self.failure

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(SpanExportResult.FAILURE, "no route to collector"), (OSError("unplugged.."), "OSError: unplugged")],
    ids=str,
)
def test_a_collectors_outage_has_a_line_for_its_start_and_end(
    failure: Any, reason: str, converter: Make, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Failing(failure)
    mine = converter(exporter)
    for batch in range(3):
        assert mine.convert([record()] * 2) == 2
        mine.send()
        assert mine.lost == {"export": 2 * (batch + 1)}
    assert [line.getMessage() for line in caplog.records] == [
        f"spans can't be exported to the collector: {reason}. Serving is not affected; further losses are only counted "
        "(kvobs_spans_dropped_total)"
    ]
    assert [line.levelno for line in caplog.records] == [logging.ERROR]
    GRPC.error("from vLLM's own exporter")
    assert caplog.records[-1].getMessage() == "from vLLM's own exporter"
    exporter.failure = SpanExportResult.SUCCESS
    mine.convert([record()])
    mine.send()
    assert mine.lost == {"export": 6}
    assert caplog.records[-1].getMessage() == "spans are exported to the collector again"
    mine.converter.close()
    assert exporter.is_shut_down


def test_an_exporter_that_fails_silently_is_reported(converter: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The warning of an earlier batch, which was sent after a retry, is not taken for the reason."""

    class Silent(Failing):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result, self.failure = self.failure, SpanExportResult.FAILURE
            if result is SpanExportResult.SUCCESS:
                TRANSPORT.warning("retrying")
            return result  # type: ignore[return-value] # no exception here

    mine = converter(Silent(SpanExportResult.SUCCESS))
    for _ in range(2):
        mine.convert([record()])
        mine.send()
    assert mine.lost == {"export": 1}
    assert "the exporter gives no reason" in caplog.text


@pytest.mark.parametrize(("protocol", "path"), [("grpc", ""), ("http/protobuf", "/v1/traces")])
def test_the_real_exporters_without_a_collector_log_one_line(
    protocol: str, path: str, converter: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    mine = converter(make_exporter(f"http://127.0.0.1:{claim_port(0)}{path}"))
    for _ in range(2):
        mine.convert([record()])
        mine.send()
    assert mine.lost == {"export": 2}
    (line,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert re.match(r"spans can't be exported to the collector: [^.].*[^.]\. Serving is", line.getMessage())
    assert "gives no reason" not in line.getMessage()


def test_the_endpoint_is_named_without_its_secrets(caplog: pytest.LogCaptureFixture) -> None:
    made = span_export.make_converter(f"http://user:key@127.0.0.1:{claim_port(0)}", "m", lambda *_: None)
    made._exporter._exporter = Failing(SpanExportResult.FAILURE)
    made.convert([[record()]], 0)
    made.close()
    assert re.match(r"spans can't be exported to http://127\.0\.0\.1:\d+: no route", caplog.records[-1].getMessage())


def test_waiting_spans_are_sent_at_the_end(converter: Make) -> None:
    mine = converter()
    mine.convert([record()] * 3)
    mine.converter.close()
    assert len(mine.memory.get_finished_spans()) == 3


def test_a_collector_that_hangs_holds_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_export, "CLOSING_S", 0.3)
    hanging = Hanging()
    mine = Converter(hanging)
    mine.convert([record()])
    mine.converter.close()  # returns while it hangs
    assert hanging.is_called.is_set()
    hanging.may_go.set()


def test_closing_is_registered_once_and_no_more_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    mine = Converter()
    assert registered == [mine.converter.close]
    mine.converter.close()
    assert registered == []


HANGS = """
import time
from opentelemetry.sdk.trace.export import SpanExporter
from kvobs.export import span_export
from kvobs.schema.spans import Record

class Hanging(SpanExporter):
    def export(self, spans):
        time.sleep(1000)

    def shutdown(self):
        time.sleep(1000)

span_export.CLOSING_S = 0.5
converter = span_export.SpanConverter(Hanging(), {}, print)
assert converter.convert([[Record("kv.lookup", "1" * 32, "2" * 16, "", 1, 2, "slow", {})]], 0)
"""


@pytest.mark.parametrize("how", ["", "converter.close()"], ids=["by itself", "closed before"])
def test_a_process_whose_collector_hangs_ends(how: str) -> None:
    command = [sys.executable, "-c", HANGS + how]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
