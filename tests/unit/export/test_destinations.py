"""Where metrics and spans go, and the exporter that starts by itself: in every set-up, and from a start."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvobs
from kvobs.export import feed as feed_module
from kvobs.export.destinations import CASES, Case, Setup, findings, losses, metrics_go_to, spans_go_to
from kvobs.schema.config import EXPORTER_VARIABLE
from kvobs.schema.options import ExporterOptions, Options
from kvobs.telemetry.payload.wire import EngineInfo
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import Script, cache_config, engine_config, transfer_config
from kvobs.vllm_api import versions
from tests.support.contexts import no_otel_variables
from tests.support.rig import child_config

ON = ExporterOptions()
RUST = f"environment variable {versions.RUST_FRONTEND}"
FILES = f"environment variable {versions.MULTIPROCESS}"
ALL, METRICS = ["metrics", "tracing"], ["metrics", "exemplars"]

SETUPS: dict[str, tuple[dict[str, Any], str | None, list[str]]] = {
    "as most": ({}, None, []),
    "stats on": ({"has_stats": True}, None, []),
    "stats off": ({"has_stats": False}, "--disable-log-stats", ALL),
    "Rust": ({"has_stats": True, "has_rust_frontend": True}, RUST, ALL),
    "Rust, stats off": ({"has_stats": False, "has_rust_frontend": True}, "--disable-log-stats", ALL),
    "several servers": ({"api_servers": 2}, "--api-server-count", METRICS),
    "several servers, and files": ({"api_servers": 2, "has_multiprocess_metrics": True}, "--api-server-count", METRICS),
    "files": ({"has_multiprocess_metrics": True}, FILES, METRICS),
    "another host": ({"has_core": False}, "ranks on several hosts", ["calls that hang", "ends"]),
    "Ray": ({"is_in_ray_actor": True}, "Ray Serve", METRICS),
    "all at once": ({"has_stats": False, "has_rust_frontend": True, "api_servers": 2}, "--disable-log-stats", ALL),
}


@pytest.mark.parametrize("kind", SETUPS)
def test_where_something_would_be_lost_it_is_reported_once_or_the_exporter_runs(kind: str) -> None:
    given, path, things = SETUPS[kind]
    setup = Setup(None, **given)
    mistakes = findings(setup)
    assert [finding.path for finding in mistakes] == ([] if path is None else [path])
    assert all(f"kvobs.exporter is null: {' and '.join(things)} are lost" in f.found for f in mistakes)
    assert losses(setup) == dict.fromkeys(things, path)
    for setup in (Setup(**given), Setup(ON, **given)):
        assert (findings(setup), losses(setup)) == ([], {})
    assert Setup(**given).running == (None if path is None else ON)
    by_itself = f"http://127.0.0.1:9464/metrics, from kvobs's exporter, which starts by itself: {path}"
    assert metrics_go_to(Setup(**given)) == ("/metrics of vLLM's API server" if path is None else by_itself)
    assert metrics_go_to(Setup(ON, **given)) == "http://127.0.0.1:9464/metrics, from kvobs's exporter"


def test_each_engine_of_a_host_has_its_address() -> None:
    assert metrics_go_to(Setup(ON), 2) == "http://127.0.0.1:9466/metrics, from kvobs's exporter"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_each_case_has_its_words_and_both_remedies(case: Case) -> None:
    given = next(given for given, path, _ in SETUPS.values() if path == case.path)
    (finding,) = findings(Setup(None, **given))
    assert str(finding).startswith(f"{case.path}: {case.found}, ")
    assert str(finding).endswith(f"exporter, which then starts by itself; or {case.instead}.")


OFF, URL = "nowhere: tracing is off", "http://c:4317"
TRACED = TracingSettings(False, False, 1, 1, endpoint=URL)


@pytest.mark.parametrize(
    ("setup", "tracing", "metrics", "spans"),
    [
        (Setup(), None, "/metrics of vLLM's API server", OFF),
        (Setup(), TRACED, "/metrics of vLLM's API server", f"{URL}, from vLLM's API server"),
        (Setup(None, has_stats=False), TRACED, "nowhere: --disable-log-stats", "nowhere: --disable-log-stats"),
        (Setup(None, api_servers=2), TRACED, "nowhere: --api-server-count", f"{URL}, from vLLM's API server"),
        (
            Setup(has_stats=False),
            TRACED,
            "http://127.0.0.1:9464/metrics, from kvobs's exporter, which starts by itself: --disable-log-stats",
            f"{URL}, from kvobs's exporter",
        ),
        (
            Setup(ExporterOptions(host="::1", otlp_metrics=True)),
            None,
            "http://[::1]:9464/metrics and by OTLP, from kvobs's exporter",
            OFF,
        ),
        (Setup(ExporterOptions(port=None, otlp_metrics=True)), None, "by OTLP, from kvobs's exporter", OFF),
    ],
)
def test_destinations_are_named(setup: Setup, tracing: TracingSettings | None, metrics: str, spans: str) -> None:
    assert metrics_go_to(setup) == metrics
    assert spans_go_to(setup, tracing) == spans


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://user:secret@c:4318/v1/traces?key=secret", "https://c:4318/v1/traces"),
        ("user:secret@c:4317", "c:4317"),
        ("c:4317", "c:4317"),
    ],
)
def test_endpoints_are_shown_without_credentials(endpoint: str, shown: str) -> None:
    assert spans_go_to(Setup(), replace(TRACED, endpoint=endpoint)) == f"{shown}, from vLLM's API server"


class Scheduler:
    """Builds the connector as vLLM's scheduler does, and notes the exporters that it would feed."""

    def __init__(self, patch: pytest.MonkeyPatch, log_stats: bool, kvobs_options: dict[str, Any] | None = None) -> None:
        self.fed: list[EngineInfo] = []
        patch.setattr(feed_module, "Feed", self.fed.append)  # no process of its own
        config = engine_config(transfer_config("kvobs", [child_config(Script("a"))], kvobs_options))
        config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank_local = 3
        self.connector = kvobs.MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if "kvobs.exporter" in r.getMessage()]


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for variable in (versions.RUST_FRONTEND, versions.MULTIPROCESS, EXPORTER_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize("variable", [None, versions.RUST_FRONTEND, versions.MULTIPROCESS])
@pytest.mark.parametrize("log_stats", [True, False])
def test_a_start_says_in_one_line_where_metrics_are_if_not_at_the_api_server(
    log_stats: bool, variable: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    scheduler = Scheduler(monkeypatch, log_stats)
    is_seen = log_stats and variable is None
    assert [(engine.host, engine.port) for engine in scheduler.fed] == ([] if is_seen else [("127.0.0.1", 9467)])
    lines = said(caplog)
    assert len(lines) == (not is_seen)
    for level, line in lines:
        assert (level, "\n" in line) == (logging.INFO, False)
        assert "metrics are at http://127.0.0.1:9467/metrics" in line
        assert f"{EXPORTER_VARIABLE}=0.0.0.0:9464 in the environment" in line


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize(
    ("exporter", "feeds", "levels"), [(None, 0, [logging.WARNING]), ({}, 1, []), ("auto", 1, [logging.INFO])]
)
def test_the_option_decides_whether_it_starts(
    exporter: Any, feeds: int, levels: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(monkeypatch, False, {"exporter": exporter})
    assert len(scheduler.fed) == feeds
    assert [level for level, _ in said(caplog)] == levels


@pytest.mark.usefixtures("_plain")
def test_an_engines_servers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    config = engine_config(transfer_config("kvobs", [child_config(Script("a"))]))
    config.parallel_config._api_process_count = 2
    assert Setup.of_engine(Options(), config) == Setup(api_servers=2)
    del config.parallel_config._api_process_count
    assert Setup.of_engine(Options(), config).api_servers == 1
