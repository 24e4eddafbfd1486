"""What the check says is what vLLM builds, and what it calls a mistake ends the start: on vLLM's real configuration."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.v1.engine.output_processor import OutputProcessor

import kvobs
from kvobs.children import known
from kvobs.cli.check import port
from kvobs.cli.check.check import Flags, check, check_text
from kvobs.cli.check.rewrite import Router
from kvobs.config import PATH
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.host import RUST_FRONTEND
from kvobs.plugin import VARIABLE
from kvobs.testing import engine_config
from kvobs.topology import Engine
from tests.support.configurations import TWO, config_of, layerwise, scripted, start, starts
from tests.support.contexts import no_otel_variables

# --- what is built is what was said


def isolated() -> dict[str, Any]:
    """Return a configuration with a best-effort child."""
    children = [scripted(), layerwise("kv_both")]
    return config_of(children, {"isolate": ["LayerwiseConnector"]}, kv_load_failure_policy="recompute")


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "scripted": lambda: config_of([scripted()]),
    "many": lambda: config_of([scripted(), scripted("HndConnector"), layerwise("kv_both"), scripted()]),
    "layerwise": lambda: config_of([
        layerwise("kv_consumer", kv_connector_extra_config={"tag": "LayerwiseConnector", "layerwise": True}),
        layerwise("kv_producer"),
    ]),
    "vLLM's own": lambda: config_of(TWO, {"names": ["bench"]}),
    "isolated": isolated,
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_built_is_what_the_check_says(kind: str) -> None:
    config = GOOD[kind]()
    checked = check(config)
    assert checked.mistakes == []
    scheduler, worker = start(config)
    said = checked.connectors
    assert [child.name for child in said] == [child.name for child in worker._children]
    assert [child.is_isolated for child in said] == [child.gate is not None for child in worker._children]
    assert [child.kv_role for child in said] == [c._kv_transfer_config.kv_role for c in worker._connectors]
    for child, built, other in zip(said, worker._children, scheduler._children, strict=True):
        facts, real = child.facts, built.connector
        assert facts is not None
        assert facts.class_path == f"{type(real).__module__}.{type(real).__qualname__}"
        assert facts.supports_hma == supports_hma(real)
        assert facts.must_deliver == real.requires_kv_delivery
        for one in (built, other):
            assert [one.does(hook) for hook in facts.busy_hooks] == [True] * len(facts.busy_hooks)
            assert [one.does(hook) for hook in facts.empty_hooks] == [False] * len(facts.empty_hooks)
    assert ("hybrid KV cache manager" not in checked.off) == worker._all_support_hma
    assert bool(checked.with_fact("must_deliver", True)) == worker.requires_kv_delivery
    is_piecewise = bool(checked.with_fact("requires_piecewise", True))
    assert is_piecewise == kvobs.MultiConnector.requires_piecewise_for_cudagraph(config[PATH])
    layouts: set[str | None] = {*checked.layouts(is_mla=False).values()}
    assert (layouts or {None}) == {get_kv_connector_cache_layout(engine_config(KVTransferConfig(**config)))}


def test_best_effort_children_start_where_there_are_full_cuda_graphs() -> None:
    """There vLLM asks this before it builds anything, and hands over ``kv_connector_extra_config`` alone."""
    config = isolated()
    assert check(config).mistakes == []
    assert kvobs.MultiConnector.requires_piecewise_for_cudagraph(config[PATH]) is False


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector", "SimpleCPUOffloadConnector"])
def test_classes_of_vllm_say_in_advance_what_they_say_of_this_model(name: str) -> None:
    """Those that need memory or a network to be built, too."""
    own = {"cpu_bytes_to_use": 1 << 30} if "Offload" in name else {}
    transfer = KVTransferConfig(**config_of([{"kv_connector": name, "kv_role": "kv_both", PATH: own}]))
    (child,) = check(vars(transfer)).connectors
    assert child.facts is not None
    assert child.facts.layouts[False] == get_kv_connector_cache_layout(engine_config(transfer))
    assert child.facts.must_deliver == (name == "NixlConnector")
    assert child.facts.has_handshake == (name == "NixlConnector")
    assert child.facts.supports_hma


def test_the_library_behind_a_class_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of([{"kv_connector": "NixlConnector", "kv_role": "kv_both"}])
    facts = check(config).connectors[0].facts
    assert facts is not None
    assert facts.library == f"nixl {version('nixl')}"
    monkeypatch.setattr(known, "is_installed", lambda module: False)
    (mistake,) = check(config).mistakes
    assert mistake.says == "found 'NixlConnector', which needs 'nixl', which is not installed here"
    assert mistake.fix == "install it: pip install nixl"


# --- what does not end the start, and is worth a word


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
        monkeypatch.setenv(VARIABLE, variable)
    else:
        monkeypatch.delenv(VARIABLE, raising=False)
    checked = check(config)
    by_variable = variable == "1" and router is Router.STOCK
    assert checked.by_variable is by_variable
    assert checked.router is (Router.KVOBS if by_variable else router)
    assert [warning.path for warning in checked.warnings] == ([] if by_variable or path is None else [path])
    assert checked.mistakes == []
    assert all(child.facts for child in checked.connectors)


def test_without_stats_kvobs_is_blind_and_with_traces_too_vllm_fails() -> None:
    alone = check(config_of(), Flags(disable_log_stats=True))
    assert ([w.path for w in alone.warnings], alone.mistakes) == (["--disable-log-stats"], [])
    assert alone.off["metrics"] == "--disable-log-stats"
    both = Flags(disable_log_stats=True, otlp_traces_endpoint="http://collector")
    for config in (config_of(), config_of(kvobs={"exporter": {}})):
        mistakes = check(config, both).mistakes
        assert [m.path for m in mistakes] == ["--disable-log-stats, --otlp-traces-endpoint"]


def test_with_the_exporter_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv(RUST_FRONTEND, "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4317")
    monkeypatch.setattr(port, "findings", lambda *_: [])  # whatever listens on this machine
    flags = Flags(disable_log_stats=True, api_server_count=2)
    checked = check(config_of(kvobs={"exporter": {}}), flags)
    assert (checked.warnings, checked.mistakes) == ([], [])
    assert not {"metrics", "tracing", "exemplars"} & checked.off.keys()
    assert checked.metrics_go_to == "http://127.0.0.1:9464/metrics, from kvobs's exporter"
    assert checked.spans_go_to == "http://collector:4317, from kvobs's exporter"


def test_the_rust_front_end_shows_nothing_of_kvobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUST_FRONTEND, "1")
    checked = check(config_of())
    variable = f"environment variable {RUST_FRONTEND}"
    assert [w.path for w in checked.warnings] == [variable]
    assert checked.off["metrics"] == checked.off["tracing"] == variable
    assert checked.metrics_go_to == f"nowhere: {variable}"


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


def test_several_api_servers_have_no_exemplars(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    checked = check(config_of(), Flags(api_server_count=2, otlp_traces_endpoint="http://collector"))
    assert checked.off["exemplars"] == "--api-server-count"
    assert [w.path for w in checked.warnings] == ["--api-server-count"]
    without_traces = check(config_of(), Flags(api_server_count=2))
    assert (without_traces.off["exemplars"], without_traces.warnings) == ("tracing is off", [])


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
