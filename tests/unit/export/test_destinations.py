"""Where metrics and spans go: by the option and what hides the metrics of vLLM's API server."""

from dataclasses import replace

import pytest

from kvobs.export import destinations
from kvobs.export.destinations import (
    MULTIPROCESS,
    RAY,
    RUST,
    SEVERAL,
    STATS_OFF,
    Hidden,
    described_at_start,
    exporter_of,
    exporter_url,
    findings,
    losses,
    metrics_go_to,
    spans_go_to,
)
from kvobs.schema.options import ExporterOption, ExporterOptions
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.vllm_api import versions
from tests.support.contexts import TRACING, no_otel_variables

ON = ExporterOptions()
URL = "http://c:4317"
TRACED = replace(TRACING, endpoint=URL)
OFF = replace(TRACING, is_on=False)
HIDDEN = (STATS_OFF, RUST, SEVERAL, MULTIPROCESS, RAY)


def test_all_that_hides_them_is_known() -> None:
    assert tuple(each for each in vars(destinations).values() if isinstance(each, Hidden)) == HIDDEN
    assert RUST.path.endswith(versions.RUST_FRONTEND)
    assert MULTIPROCESS.path.endswith(versions.MULTIPROCESS)


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda hidden: hidden.path)
def test_hidden_metrics_run_the_exporter_or_warn_with_remedies(hidden: Hidden) -> None:
    (finding,) = findings(None, hidden)
    assert str(finding).startswith(
        f"{hidden.path}: {hidden.found}, and kvobs.exporter is null: metrics and tracing are"
    )
    assert str(finding).endswith(f"remove kv_connector_extra_config.kvobs.exporter; or {hidden.instead}.")
    assert losses(None, hidden) == {"metrics": hidden.path, "tracing": hidden.path}
    for option in ("auto", ON):
        assert (findings(option, hidden), losses(option, hidden), exporter_of(option, hidden)) == ([], {}, ON)
    why = f"http://127.0.0.1:9464/metrics, from kvobs's exporter, which the engine starts: {hidden.path}"
    assert metrics_go_to("auto", hidden) == why


@pytest.mark.parametrize("option", ["auto", None, ON])
def test_where_nothing_hides_them_nothing_is_lost(option: ExporterOption) -> None:
    assert (findings(option, None), losses(option, None)) == ([], {})
    assert exporter_of(option, None) == (ON if option == ON else None)


OTLP, IPV6 = ExporterOptions(port=None, otlp_metrics=True), ExporterOptions(host="::1", otlp_metrics=True)


@pytest.mark.parametrize(
    ("option", "hidden", "tracing", "metrics", "spans"),
    [
        ("auto", None, OFF, "/metrics of vLLM's API server", "nowhere: tracing is off"),
        ("auto", None, TRACED, "/metrics of vLLM's API server", f"{URL}, from vLLM's API server"),
        (None, None, TRACED, "/metrics of vLLM's API server", f"{URL}, from vLLM's API server"),
        (None, STATS_OFF, TRACED, "nowhere: --disable-log-stats", "nowhere: --disable-log-stats"),
        (ON, None, TRACED, "http://127.0.0.1:9464/metrics, from kvobs's exporter", f"{URL}, from kvobs's exporter"),
        (IPV6, SEVERAL, OFF, "http://[::1]:9464/metrics and by OTLP, from kvobs's exporter", "nowhere: tracing is off"),
        (OTLP, None, TRACED, "by OTLP, from kvobs's exporter", f"{URL}, from kvobs's exporter"),
    ],
)
def test_destinations_are_named(
    option: ExporterOption, hidden: Hidden | None, tracing: TracingSettings, metrics: str, spans: str
) -> None:
    assert metrics_go_to(option, hidden) == metrics
    assert spans_go_to(option, hidden, tracing) == spans


def test_a_start_says_what_the_engine_knows() -> None:
    end = (
        "; metrics go to /metrics of vLLM's API server, or to kvobs's exporter if that server does not expose them; "
        "tracing is off"
    )
    assert described_at_start("auto", OFF) == end
    assert described_at_start(None, TRACED).endswith(f"API server; spans go to {URL}, from vLLM's API server")
    of_exporter = "; metrics go to http://127.0.0.1:9464/metrics, from kvobs's exporter; tracing is off"
    assert described_at_start(ON, OFF) == of_exporter


def test_an_exporter_with_tls_has_another_scheme() -> None:
    assert exporter_url("h", 1, None) == "http://h:1/metrics"
    assert exporter_url("fe80::1", 1, "/web.yaml") == "https://[fe80::1]:1/metrics"


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://user:secret@c:4318/v1/traces?key=secret", "https://c:4318/v1/traces"),
        ("user:secret@c:4317", "c:4317"),
        ("c:4317", "c:4317"),
    ],
)
def test_endpoints_are_shown_without_credentials(endpoint: str, shown: str) -> None:
    assert spans_go_to("auto", None, replace(TRACED, endpoint=endpoint)) == f"{shown}, from vLLM's API server"


def test_an_endpoint_may_be_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://k@e:1", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="t:2")
    assert destinations.endpoint_shown(None) == "t:2"
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    assert destinations.endpoint_shown(None) == "http://e:1"
