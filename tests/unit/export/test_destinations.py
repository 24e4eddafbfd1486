"""Where metrics and spans go, and the one warning where they get nowhere: in every set-up, and from a start."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvobs
from kvobs import connector as connector_module
from kvobs.export.destinations import Setup, findings, lost, metrics_go_to, spans_go_to, url
from kvobs.schema.options import ExporterOptions, Options
from kvobs.testing import Script, cache_config, engine_config, transfer_config
from kvobs.vllm_api import versions
from tests.support.contexts import no_otel_variables
from tests.support.rig import child_config

ON = ExporterOptions()
RUST = f"environment variable {versions.RUST_FRONTEND}"
ALL = ["metrics", "tracing"]

SETUPS: dict[str, tuple[dict[str, Any], str | None, list[str]]] = {
    "as most": ({}, None, []),
    "stats on": ({"has_stats": True}, None, []),
    "stats off": ({"has_stats": False}, "--disable-log-stats", ALL),
    "Rust": ({"has_stats": True, "has_rust_frontend": True}, RUST, ALL),
    "Rust, stats off": ({"has_stats": False, "has_rust_frontend": True}, "--disable-log-stats", ALL),
    "several servers": ({"api_servers": 2}, None, []),
    "several servers with traces": ({"api_servers": 2, "has_traces": True}, "--api-server-count", ["exemplars"]),
    "one server with traces": ({"has_traces": True}, None, []),
    "all at once": (
        {"has_stats": False, "has_rust_frontend": True, "api_servers": 2, "has_traces": True},
        "--disable-log-stats",
        ALL,
    ),
}


@pytest.mark.parametrize("kind", SETUPS)
def test_what_is_lost_is_reported_once_with_the_exporter_as_the_fix(kind: str) -> None:
    given, path, things = SETUPS[kind]
    setup = Setup(**given)
    found = findings(setup)
    assert [finding.path for finding in found] == ([] if path is None else [path])
    assert all("set kv_connector_extra_config.kvobs.exporter to {}, or KVOBS_EXPORTER=" in f.fix for f in found)
    assert lost(setup) == dict.fromkeys(things, path)


@pytest.mark.parametrize("kind", SETUPS)
def test_with_the_exporter_nothing_is_lost(kind: str) -> None:
    setup = Setup(ON, **SETUPS[kind][0])
    assert (findings(setup), lost(setup)) == ([], {})
    assert metrics_go_to(setup) == "http://127.0.0.1:9464/metrics, from kvobs's exporter"


def test_the_number_of_servers_is_in_the_text() -> None:
    (finding,) = findings(Setup(api_servers=3, has_traces=True))
    assert str(finding).startswith("--api-server-count: found 3: no exemplars, since ")
    assert str(finding).endswith("in the environment; or use 1.")


@pytest.mark.parametrize(
    ("setup", "metrics", "spans"),
    [
        (Setup(), "/metrics of vLLM's API server", "nowhere: tracing is off"),
        (Setup(has_traces=True), "/metrics of vLLM's API server", "http://c:4317, from vLLM's API server"),
        (Setup(has_stats=False, has_traces=True), "nowhere: --disable-log-stats", "nowhere: --disable-log-stats"),
        (
            Setup(ON, has_stats=False, has_traces=True),
            "http://127.0.0.1:9464/metrics, from kvobs's exporter",
            "http://c:4317, from kvobs's exporter",
        ),
        (
            Setup(ExporterOptions(host="::1", otlp_metrics=True)),
            "http://[::1]:9464/metrics and by OTLP, from kvobs's exporter",
            "nowhere: tracing is off",
        ),
        (
            Setup(ExporterOptions(port=None, otlp_metrics=True)),
            "by OTLP, from kvobs's exporter",
            "nowhere: tracing is off",
        ),
    ],
)
def test_destinations_are_named(setup: Setup, metrics: str, spans: str) -> None:
    assert metrics_go_to(setup) == metrics
    assert spans_go_to(setup, "http://c:4317") == spans


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://user:secret@c:4318/v1/traces?key=secret", "https://c:4318/v1/traces"),
        ("user:secret@c:4317", "c:4317"),
        ("c:4317", "c:4317"),
    ],
)
def test_endpoints_are_shown_without_credentials(endpoint: str, shown: str) -> None:
    assert spans_go_to(Setup(has_traces=True), endpoint) == f"{shown}, from vLLM's API server"


def test_the_url_is_that_of_the_first_engine() -> None:
    assert url(ExporterOptions(host="0.0.0.0", port=9500)) == "http://0.0.0.0:9500/metrics"


# --- at the start


class Scheduler:
    """Builds the connector as vLLM's scheduler does."""

    def __init__(self, log_stats: bool, kvobs_options: dict[str, Any] | None = None) -> None:
        config = engine_config(transfer_config("kvobs", [child_config(Script("a"))], kvobs_options))
        self.connector = kvobs.MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def lost_at_start(caplog: pytest.LogCaptureFixture) -> list[str]:
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [line for line in warnings if "kvobs.exporter" in line]


@pytest.mark.parametrize(("log_stats", "lines"), [(True, 0), (False, 1)])
def test_a_start_without_stats_warns_in_one_line(
    log_stats: bool, lines: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(versions.RUST_FRONTEND, raising=False)
    Scheduler(log_stats)
    found = lost_at_start(caplog)
    assert len(found) == lines
    assert all(line.startswith("--disable-log-stats: ") and "\n" not in line for line in found)


@pytest.mark.parametrize("has_exporter", [False, True])
def test_a_start_with_the_rust_front_end_warns_unless_the_exporter_is_on(
    has_exporter: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_feed", lambda *_: None)  # no process of its own
    monkeypatch.setenv(versions.RUST_FRONTEND, "1")
    Scheduler(True, {"exporter": {}} if has_exporter else None)
    assert [line.partition(":")[0] for line in lost_at_start(caplog)] == ([] if has_exporter else [RUST])


def test_an_engines_servers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.RUST_FRONTEND, raising=False)
    no_otel_variables(monkeypatch)
    config = engine_config(transfer_config("kvobs", [child_config(Script("a"))]))
    config.parallel_config._api_process_count = 2
    setup = Setup.of_engine(Options(), config, has_traces=True)
    assert setup == Setup(api_servers=2, has_traces=True)
    del config.parallel_config._api_process_count
    assert Setup.of_engine(Options(), config, has_traces=True).api_servers == 1
