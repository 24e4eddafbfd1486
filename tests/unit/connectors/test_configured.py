"""Connectors are found by their classes, built and named; mistakes name the connector and the JSON path."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvobs
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.connectors.configured import _fix_of_import, read_specs
from kvobs.connectors.specs import ConnectorSpec
from kvobs.connectors.sub_connector import Unbuilt
from kvobs.schema.config import ConfigError
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config, transfer_config
from tests.support.contexts import no_otel_variables, request
from tests.support.rig import entry_for
from tests.support.scripted import OddConnector


def config_of(*connectors: dict[str, Any], **kvobs_options: Any) -> Any:
    return engine_config(transfer_config("kvobs", list(connectors), kvobs_options))


def build(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return kvobs.MultiConnector(config, role, cache_config())


def test_unknown_connectors_and_keys_are_reported_with_paths() -> None:
    bad = [{"kv_connector": "NoSuch", "kv_role": "kv_both"}, {**entry_for(Script("a")), "kv_rol": "kv_both"}]
    bad += [{"kv_connector": "LMCacheConnector", "kv_role": "kv_both"}]
    with pytest.raises(ConfigError) as error:
        read_specs(transfer_config("kvobs", bad))
    key, name, renamed = error.value.mistakes
    assert name.path == "kv_connector_extra_config.connectors[0].kv_connector"
    assert name.found == "found 'NoSuch', which this vLLM does not have"
    assert "OffloadingConnector" in name.allowed
    assert renamed.found.endswith(", which this vLLM does not have: it is now called 'LMCacheConnectorV1'")
    assert key.path == "kv_connector_extra_config.connectors[1].kv_rol"
    assert key.fix == "use 'kv_role'"


def test_a_module_that_can_not_be_imported_is_named() -> None:
    bad = {**entry_for(Script("a")), "kv_connector_module_path": "no.such.module"}
    with pytest.raises(ConfigError, match=r"connectors\[0\].*No module named"):
        read_specs(transfer_config("kvobs", [bad]))
    # A library is missing where vLLM's own class needs it.
    error = ModuleNotFoundError(name="no")
    assert _fix_of_import("MooncakeConnector", None, error).startswith("mooncake.engine: ")
    assert _fix_of_import("MooncakeConnector", "no.such", error).startswith("correct kv_connector_module_path, ")


@pytest.mark.parametrize("is_stuck", [False, True])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_built_connectors_are_shut_down_when_a_later_one_fails(role: KVConnectorRole, is_stuck: bool) -> None:
    a, b = Script("a"), Script("b")
    if is_stuck:
        a.raises["shutdown"] = RuntimeError("stuck")  # hides nothing
    b.raises["__init__"] = OSError("no route to b")
    with pytest.raises(OSError, match="no route to b") as error:
        build(config_of(entry_for(a), entry_for(b), names=["one", "two"]), role)
    assert a.called("shutdown") == [None]
    assert "while building connector 'two', kv_connector_extra_config.connectors[1]" in error.value.__notes__


def test_connectors_without_hma_are_named_when_hma_is_on() -> None:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="hybrid KV cache manager: two. Start vLLM with --disable-hybrid"):
        build(config_of(entry_for(Script("a")), example, names=["one", "two"]))


def test_layouts_must_agree() -> None:
    scripts = [Script("a"), Script("b"), Script("c")]
    classes = ["HndConnector", "ScriptedConnector", "HndConnector"]
    config = config_of(*(entry_for(s, c) for s, c in zip(scripts, classes, strict=True)))
    assert kvobs.MultiConnector.get_required_kvcache_layout(config) == "HND"
    assert get_kv_connector_cache_layout(config) == "HND"
    assert get_kv_connector_cache_layout(config_of(entry_for(Script("d")))) is None
    assert get_kv_connector_cache_layout() is None


def test_each_connector_sees_its_config_and_the_rest_of_vllms() -> None:
    config = config_of(entry_for(Script("a")), entry_for(Script("b")))
    first, second = build(config)._connectors
    assert first._kv_transfer_config.kv_connector_extra_config == {"tag": "a"}
    assert second._kv_transfer_config.kv_connector_extra_config == {"tag": "b"}
    assert first._vllm_config.model_config is config.model_config
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


@pytest.mark.parametrize("propagates", [True, False])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", None])
def test_connectors_see_the_context(propagates: bool, endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    config = config_of(entry_for(Script("a")), tracing={"propagate": propagates})
    config.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
    seen: list[bool] = []

    def look(connector: Any, request: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    monkeypatch.setattr(ScriptedConnector, "on_new_request", look)
    connector = build(config)
    connector.on_new_request(request("r"))
    assert seen == [propagates and endpoint is not None]


@pytest.mark.parametrize("error", ["OSError('libcuda.so.1')", "RuntimeError()", "ValueError('numpy')", "SystemExit(1)"])
@pytest.mark.parametrize("is_best_effort", [True, False])
def test_a_module_whose_import_raises_is_survived_if_isolated(
    error: str, is_best_effort: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_module.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    connectors = [
        {**entry_for(Script("a")), "kv_connector_module_path": "raising_module"},
        entry_for(Script("b")),
    ]
    options = {"names": ["a", "b"], "best_effort": ["a"] * is_best_effort}
    if is_best_effort:
        assert [spec.connector_class.__name__ for spec in config_specs(connectors, options)] == [
            "Unbuilt",
            "ScriptedConnector",
        ]
    else:
        with pytest.raises(ConfigError, match="whose class can't be imported"):
            config_specs(connectors, options)


def config_specs(connectors: list[dict[str, Any]], options: dict[str, Any]) -> tuple[ConnectorSpec, ...]:
    return read_specs(transfer_config("kvobs", connectors, options))


@pytest.mark.parametrize(
    "odd", [{"kv_connector": "NoSuchClass"}, {"kv_connector": "NoSuch", "kv_connector_module_path": None}]
)
def test_a_class_that_is_misspelt_ends_the_start_isolated_or_not(odd: dict[str, Any]) -> None:
    connectors = [entry_for(Script("a")) | odd, entry_for(Script("b"))]
    with pytest.raises(ConfigError, match="NoSuch"):
        config_specs(connectors, {"names": ["a", "b"], "best_effort": ["a"]})


class Raising(BaseException):
    """As the panic of a library in Rust."""


@pytest.mark.parametrize("answer", [Raising(), LookupError(), 7])
def test_an_isolated_connectors_class_may_fail_when_it_is_asked(
    answer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(cls: type, *_: Any) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    for hook in ("get_required_kvcache_layout", "requires_piecewise_for_cudagraph"):
        monkeypatch.setattr(OddConnector, hook, classmethod(ask))
    connectors = [entry_for(Script("a"), "OddConnector"), entry_for(Script("b"))]
    isolating, other = (config_of(*connectors, names=["a", "b"], best_effort=names) for names in (["a"], []))
    of, extra = kvobs.MultiConnector, "kv_connector_extra_config"
    assert of.get_required_kvcache_layout(isolating) is None
    assert "connector 'a' failed in get_required_kvcache_layout" in caplog.text
    assert of.requires_piecewise_for_cudagraph(getattr(isolating.kv_transfer_config, extra)) is True
    first, _ = build(isolating)._connectors
    assert type(first) is Unbuilt, "with any layout it would save and load something else"
    if answer != 7:
        with pytest.raises(type(answer)):
            of.get_required_kvcache_layout(other)
