"""The check of the text: whether kvobs takes part, where metrics and spans go, and features that are off."""

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.output_processor import OutputProcessor

from kvobs.cli.check.check import check_text
from kvobs.cli.check.flags import ALONE, ELSEWHERE, Flags
from kvobs.cli.check.launch import NETWORK
from kvobs.cli.check.rewrite import Router
from kvobs.schema.config import ENABLE_VARIABLE, EXPORTER_VARIABLE, PATH
from kvobs.testing.server import claim_port
from kvobs.vllm_api.versions import RUST_FRONTEND
from tests.support.configurations import TWO, check, config_of
from tests.support.contexts import no_otel_variables


@pytest.mark.parametrize(
    ("config", "router", "path"),
    [(config_of(kv_connector_module_path=None), Router.STOCK, "kv_connector_module_path"),
     (dict(TWO[0]), Router.NONE, "kv_connector"), (config_of(), Router.KVOBS, None)],
)  # fmt: skip
@pytest.mark.parametrize("variable", ["1", "0"])
def test_router_is_found_with_and_without_the_variable(
    config: dict[str, Any], router: Router, path: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable, a plain MultiConnector is kvobs's, and a single connector has it as its router."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))  # plugins may be loaded
    monkeypatch.setenv(ENABLE_VARIABLE, variable)
    checked = check(config)
    by_variable = variable == "1" and router is not Router.KVOBS
    assert checked.by_variable is by_variable
    assert checked.router is (Router.KVOBS if by_variable else router)
    assert [warning.path for warning in checked.warnings] == ([] if by_variable or path is None else [path])
    assert checked.mistakes == []
    assert all(connector.facts for connector in checked.connectors)


def test_the_variable_leaves_another_packages_router_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    checked = check_text(config_of(kv_connector_module_path="another.package"))
    assert (checked.router, checked.by_variable) == (Router.NONE, False)


def test_a_single_connector_of_dynamo_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLE_VARIABLE, "1")
    checked = check(dict(TWO[0]), Flags(launcher="dynamo.vllm"))
    assert (checked.router, checked.by_variable) == (Router.NONE, False)
    assert "kvobs is not enabled" in checked.warnings[0].says


def test_without_stats_kvobs_is_blind_and_tracing_fails_in_vllm() -> None:
    alone = check(config_of(kvobs={"exporter": None}), Flags(disable_log_stats=True))
    assert ([w.path for w in alone.warnings], alone.mistakes) == (["--disable-log-stats"], [])
    assert alone.off["metrics"] == "--disable-log-stats"
    both = Flags(disable_log_stats=True, otlp_traces_endpoint="http://collector")
    for config in (config_of(), config_of(kvobs={"exporter": None}), config_of(kvobs={"exporter": {}})):
        mistakes = check(config, both).mistakes
        assert [m.path for m in mistakes] == ["--disable-log-stats, --otlp-traces-endpoint"]


@pytest.mark.parametrize("kvobs", [{}, {"exporter": {}}], ids=["auto", "by option"])
def test_with_the_exporter_nothing_is_lost(kvobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv(RUST_FRONTEND, "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4317")
    monkeypatch.setattr("kvobs.export.listening.listen", Mock())  # whatever listens on this machine
    flags = Flags(disable_log_stats=True, api_server_count=2)
    checked = check(config_of(kvobs=kvobs), flags)
    assert (checked.warnings, checked.mistakes) == ([], [])
    assert not {"metrics", "tracing", "exemplars"} & checked.off.keys()
    why = "" if kvobs else ", which the engine starts: --disable-log-stats"
    assert checked.metrics_go_to == f"http://127.0.0.1:9464/metrics, from kvobs's exporter{why}"
    assert checked.spans_go_to == "http://collector:4317, from kvobs's exporter"


def test_vllm_does_fail_with_traces_and_no_stats() -> None:
    """Of a request that was registered without stats, when it is finished."""
    untold: Any = SimpleNamespace(stats=None)
    with pytest.raises(AssertionError):
        OutputProcessor.do_tracing(untold, untold, untold, None)


@pytest.mark.parametrize("level", [None, "off", "requests", "calls"])
@pytest.mark.parametrize("endpoint", [None, "http://collector"])
def test_tracing_level_needs_an_endpoint(
    level: str | None, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_otel_variables(monkeypatch)
    options = {"tracing": {"level": level}} if level else None
    checked = check(config_of(kvobs=options), Flags(otlp_traces_endpoint=endpoint))
    wanted = level or "requests"
    assert checked.tracing == (wanted if endpoint else "off")
    assert ("tracing" in checked.off) == (checked.tracing == "off")
    wants_it_in_vain = level in ("requests", "calls") and endpoint is None
    assert [w.path for w in checked.warnings] == ([f"{PATH}.kvobs.tracing.level"] if wants_it_in_vain else [])


def test_the_environment_turns_tracing_off_or_on_without_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector")
    checked = check(config_of())
    assert checked.tracing == "requests"
    assert "joining clients' traces" in checked.off
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert check(config_of()).off["tracing"] == "OTEL_SDK_DISABLED is true here"


SWITCHES = [
    ("best-effort", {"best_effort": ["ExampleConnector"]}),
    ("request reports", {"request_report": True}), ("request reports", {"request_log": "stderr"}),
    ("lookup timeout", {"lookup_timeout_ms": 5.0}),
]  # fmt: skip


@pytest.mark.parametrize(("feature", "on"), SWITCHES)
def test_a_feature_is_off_without_its_option(feature: str, on: dict[str, Any]) -> None:
    assert check_text(config_of()).off[feature].startswith(("kvobs.", "neither kvobs."))
    assert feature not in check_text(config_of(kvobs=on, kv_load_failure_policy="recompute")).off
    found = check(config_of()).off["hybrid KV cache manager"]
    assert found.startswith("not supported by ExampleConnector: with it a model with sliding windows or Mamba keeps")


def test_values_that_may_be_secret_are_not_printed() -> None:
    secret = "hunter2"
    checked = check(config_of([{**TWO[0], "kv_port": secret, "password": secret, PATH: secret}], engine_id=[secret]))
    assert len(checked.mistakes) == 4
    assert secret not in repr(checked)


@pytest.mark.parametrize("endpoint", ["http://c:4317", "c:4317", "grpc://c", "dns:c:4317", "[::1]:4317"])
def test_an_endpoint_has_a_scheme_or_a_port(endpoint: str) -> None:
    assert check_text(config_of(), Flags(otlp_traces_endpoint=endpoint)).warnings == []
    for slip in ("nonsense", "", "http://"):
        (warning,) = check_text(config_of(), Flags(otlp_traces_endpoint=slip)).warnings
        assert warning.path == "--otlp-traces-endpoint"


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_free_port_stays_free_and_without_a_port_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = {"port": claim_port(0)}
    for _ in range(2):
        assert check_text(config_of(kvobs={"exporter": exporter})).warnings == []
    monkeypatch.setattr("kvobs.export.listening.listen", lambda *_: pytest.fail("tried"))
    for none in (None, {"port": None, "otlp_metrics": True}):
        assert check_text(config_of(kvobs={"exporter": none})).mistakes == []


@pytest.mark.parametrize(
    ("marks", "is_named"), [({ALONE: "1"}, False), ({}, False), ({NETWORK: "host"}, True)], ids=["pod", "chart", "host"]
)
def test_who_has_the_port_here_means_nothing_to_a_pod(marks: dict[str, str], is_named: bool, taken: int) -> None:
    flags = Flags(environment={ELSEWHERE: "1", **marks})
    checked = check_text(config_of(kvobs={"exporter": {"port": taken}}), flags)
    assert ("port-in-use" in {each.kind.name for each in checked.warnings}) is is_named


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_holder_of_the_port_is_named_in_a_warning(host: str, taken: int) -> None:
    checked = check_text(config_of(kvobs={"exporter": {"host": host, "port": taken}}))
    assert checked.mistakes == []
    (warning,) = checked.warnings
    assert warning.path == f"{PATH}.kvobs.exporter"
    assert f"found port {taken}, which is in use on this machine: held by pid {os.getpid()} (" in warning.found
    assert "unless it is the exporter of this server" in warning.fix


def test_a_file_that_is_missing_hides_no_port_in_use(taken: int) -> None:
    exporter = {"port": taken, "web_config": "/missing/web.yml"}
    file, port = check_text(config_of(kvobs={"exporter": exporter})).warnings
    assert file.path == f"{PATH}.kvobs.exporter.web_config"
    assert f"found port {taken}, which is in use" in port.found


def test_the_variable_is_named_where_it_set_the_port(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORTER_VARIABLE, f"127.0.0.1:{taken}")
    checked = check_text(config_of())
    assert [warning.path for warning in checked.warnings] == [f"environment variable {EXPORTER_VARIABLE}"]
    assert checked.metrics_go_to == f"http://127.0.0.1:{taken}/metrics, from kvobs's exporter"
    monkeypatch.setenv(EXPORTER_VARIABLE, "127.0.0.1:1")
    checked = check_text(config_of(kvobs={"exporter": {"port": taken}}))
    assert [warning.path for warning in checked.warnings] == [f"{PATH}.kvobs.exporter"]


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 80, "a\0b"])
def test_an_address_of_another_machine_is_a_warning(host: str) -> None:
    """The check may run elsewhere."""
    (finding,) = check_text(config_of(kvobs={"exporter": {"host": host}})).warnings
    assert "where this machine can't listen: " in finding.found
    assert str(finding).isprintable()


def test_a_mistake_in_the_variable_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORTER_VARIABLE, "9464")
    (mistake,) = check_text(config_of()).mistakes
    assert mistake.path == f"environment variable {EXPORTER_VARIABLE}"
    assert mistake.allowed == "HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:9464"
    assert mistake.fix == "use an allowed value, or unset the variable"
