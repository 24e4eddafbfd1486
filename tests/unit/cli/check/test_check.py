"""The check of the text: whether kvobs takes part, where metrics and spans go, and features that are off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.engine.output_processor import OutputProcessor

from kvobs.cli.check import port
from kvobs.cli.check.check import Flags, check, check_text
from kvobs.cli.check.rewrite import Router
from kvobs.schema.config import ENABLE_VARIABLE, PATH
from kvobs.topology import Engine
from kvobs.vllm_api.versions import RUST_FRONTEND
from tests.support.configurations import TWO, config_of, starts
from tests.support.contexts import no_otel_variables


def test_a_policy_of_a_child_is_ignored() -> None:
    config = config_of([TWO[0], {**TWO[1], "kv_load_failure_policy": "recompute"}])
    (warning,) = check(config).warnings
    assert warning.path == f"{PATH}.connectors[1].kv_load_failure_policy"
    assert "no effect here: vLLM reads the top level only, where it is 'fail'" in warning.says
    assert starts(config)
    assert check(config_of([{**TWO[1], "kv_load_failure_policy": "fail"}])).warnings == []


@pytest.mark.parametrize(
    ("config", "router", "path"),
    [
        (config_of(kv_connector_module_path=None), Router.STOCK, "kv_connector_module_path"),
        (dict(TWO[0]), Router.NONE, "kv_connector"),
        (config_of(), Router.KVOBS, None),
    ],
)
@pytest.mark.parametrize("variable", ["1", None])
def test_it_says_whether_kvobs_takes_part(
    config: dict[str, Any], router: Router, path: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable, a plain MultiConnector is kvobs's."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))  # plugins may be loaded
    if variable is not None:
        monkeypatch.setenv(ENABLE_VARIABLE, variable)
    else:
        monkeypatch.delenv(ENABLE_VARIABLE, raising=False)
    checked = check(config)
    by_variable = variable == "1" and router is Router.STOCK
    assert checked.by_variable is by_variable
    assert checked.router is (Router.KVOBS if by_variable else router)
    assert [warning.path for warning in checked.warnings] == ([] if by_variable or path is None else [path])
    assert checked.mistakes == []
    assert all(child.facts for child in checked.connectors)


def test_without_stats_kvobs_is_blind_and_with_traces_too_vllm_fails() -> None:
    alone = check(config_of(kvobs={"exporter": None}), Flags(disable_log_stats=True))
    assert ([w.path for w in alone.warnings], alone.mistakes) == (["--disable-log-stats"], [])
    assert alone.off["metrics"] == "--disable-log-stats"
    both = Flags(disable_log_stats=True, otlp_traces_endpoint="http://collector")
    for config in (config_of(), config_of(kvobs={"exporter": None}), config_of(kvobs={"exporter": {}})):
        mistakes = check(config, both).mistakes
        assert [m.path for m in mistakes] == ["--disable-log-stats, --otlp-traces-endpoint"]


@pytest.mark.parametrize("kvobs", [{}, {"exporter": {}}], ids=["by itself", "by option"])
def test_with_the_exporter_nothing_is_lost(kvobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv(RUST_FRONTEND, "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4317")
    monkeypatch.setattr(port, "findings", lambda *_: [])  # whatever listens on this machine
    flags = Flags(disable_log_stats=True, api_server_count=2)
    checked = check(config_of(kvobs=kvobs), flags)
    assert (checked.warnings, checked.mistakes) == ([], [])
    assert not {"metrics", "tracing", "exemplars"} & checked.off.keys()
    by_itself = "" if kvobs else ", which starts by itself: --disable-log-stats"
    assert checked.metrics_go_to == f"http://127.0.0.1:9464/metrics, from kvobs's exporter{by_itself}"
    assert checked.spans_go_to == "http://collector:4317, from kvobs's exporter"


def test_vllm_does_fail_with_traces_and_no_stats() -> None:
    """Of a request that was registered without stats, when it is finished."""
    untold: Any = SimpleNamespace(stats=None)
    with pytest.raises(AssertionError):
        OutputProcessor.do_tracing(untold, untold, untold, None)


@pytest.mark.parametrize("level", [None, "off", "requests", "calls"])
@pytest.mark.parametrize("endpoint", [None, "http://collector"])
def test_it_says_how_far_tracing_goes(level: str | None, endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    options = {"tracing": {"level": level}} if level else None
    checked = check(config_of(kvobs=options), Flags(otlp_traces_endpoint=endpoint))
    wanted = level or "requests"
    assert checked.tracing == (wanted if endpoint else "off")
    assert ("tracing" in checked.off) == (checked.tracing == "off")
    wants_it_in_vain = level in ("requests", "calls") and endpoint is None
    assert [w.path for w in checked.warnings] == ([f"{PATH}.kvobs.tracing.level"] if wants_it_in_vain else [])


def test_the_environment_can_turn_tracing_on_without_parents_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector")
    checked = check(config_of())
    assert checked.tracing == "requests"
    assert "joining clients' traces" in checked.off
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert check(config_of()).off["tracing"] == "OTEL_SDK_DISABLED is true here"


def test_it_says_who_keeps_the_hybrid_manager_off() -> None:
    assert check(config_of()).off["hybrid KV cache manager"] == "not supported by ExampleConnector"


@pytest.mark.parametrize(
    ("what", "on"),
    [
        ("isolation", {"isolate": ["ExampleConnector"]}),
        ("timeline", {"timeline": {"dir": "/tmp/t"}}),
        ("request reports", {"report": True}),
        ("request reports", {"request_log": "stderr"}),
        ("lookup timeout", {"lookup_timeout_ms": 5.0}),
    ],
)
def test_what_an_option_would_switch_on_is_off_without_it(what: str, on: dict[str, Any]) -> None:
    assert check(config_of()).off[what].startswith(("kvobs.", "neither kvobs."))
    assert what not in check(config_of(kvobs=on, kv_load_failure_policy="recompute")).off


@pytest.mark.parametrize(("role", "reads"), [("kv_producer", (2, 4)), ("kv_consumer", (4, 2)), ("kv_both", (4, 2))])
def test_a_producer_is_read_from_and_any_other_reads(role: str, reads: tuple[int, int]) -> None:
    own, other = Engine(2, 16), Engine(4, 16)
    engines = check(config_of(kv_role=role), Flags(kv_heads=8, engines=(own, other))).engines
    assert engines is not None
    assert (engines.prefill.tp_size, engines.decode.tp_size) == reads


def test_engines_that_do_not_fit_are_a_mistake() -> None:
    checked = check(config_of(), Flags(kv_heads=8, engines=(Engine(2, 16), Engine(3, 16))))
    assert [m.path for m in checked.mistakes] == ["--tensor-parallel-size, --remote-tensor-parallel-size"]
    assert checked.engines is None


def test_nothing_of_what_may_be_a_secret_is_printed() -> None:
    secret = "hunter2"
    bad = config_of([{**TWO[0], "kv_port": secret, "password": secret, PATH: secret}], engine_id=[secret])
    checked = check(bad)
    assert len(checked.mistakes) == 4
    assert secret not in repr(checked)


@pytest.mark.parametrize(
    ("endpoint", "is_one"),
    [
        ("http://collector:4317", True),
        ("collector:4317", True),
        ("grpc://collector", True),
        ("dns:collector:4317", True),
        ("[::1]:4317", True),
        ("nonsense", False),
        ("", False),
        ("http://", False),
    ],
)
def test_an_endpoint_without_scheme_and_port_is_a_slip(endpoint: str, is_one: bool) -> None:
    noted = [w.path for w in check_text(config_of(), Flags(otlp_traces_endpoint=endpoint)).warnings]
    assert noted == ([] if is_one else ["--otlp-traces-endpoint"])
