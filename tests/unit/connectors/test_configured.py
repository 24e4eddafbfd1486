"""Children are found by their classes, built and named; mistakes name the child and the JSON path."""

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import kvobs
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.connectors.configured import _fix_of_import, read_specs
from kvobs.schema.config import ConfigError
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config, transfer_config
from tests.support.contexts import no_otel_variables, request
from tests.support.rig import child_config


def config_of(*connectors: dict[str, Any], **kvobs_options: Any) -> Any:
    return engine_config(transfer_config("kvobs", list(connectors), kvobs_options))


def build(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return kvobs.MultiConnector(config, role, cache_config())


def test_unknown_connectors_and_keys_are_reported_together_with_their_paths() -> None:
    bad = [{"kv_connector": "NoSuch", "kv_role": "kv_both"}, {**child_config(Script("a")), "kv_rol": "kv_both"}]
    bad += [{"kv_connector": "LMCacheConnector", "kv_role": "kv_both"}]
    with pytest.raises(ConfigError) as error:
        read_specs(transfer_config("kvobs", bad))
    key, name, renamed = error.value.mistakes
    assert name.path == "kv_connector_extra_config.connectors[0].kv_connector"
    assert name.found == "found 'NoSuch', which this vLLM does not have"
    assert "OffloadingConnector" in name.allowed
    assert renamed.found.endswith(", which this vLLM does not have: it is called 'LMCacheConnectorV1' today")
    assert key.path == "kv_connector_extra_config.connectors[1].kv_rol"
    assert key.fix == "use 'kv_role'"


def test_a_module_that_can_not_be_imported_is_named() -> None:
    bad = {**child_config(Script("a")), "kv_connector_module_path": "no.such.module"}
    with pytest.raises(ConfigError, match=r"connectors\[0\].*No module named"):
        read_specs(transfer_config("kvobs", [bad]))
    # A library is missing where vLLM's own class needs it.
    error = ModuleNotFoundError(name="no")
    assert _fix_of_import("MooncakeConnector", None, error).startswith("mooncake.engine: ")
    assert _fix_of_import("MooncakeConnector", "no.such", error).startswith("correct kv_connector_module_path, ")


@pytest.mark.parametrize("is_stuck", [False, True])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_children_already_built_are_shut_down_when_a_later_one_fails(role: KVConnectorRole, is_stuck: bool) -> None:
    a, b = Script("a"), Script("b")
    if is_stuck:
        a.raises["shutdown"] = RuntimeError("stuck")  # hides nothing
    b.raises["__init__"] = OSError("no route to b")
    with pytest.raises(OSError, match="no route to b") as error:
        build(config_of(child_config(a), child_config(b), names=["one", "two"]), role)
    assert a.called("shutdown") == [None]
    assert "while building connector 'two', kv_connector_extra_config.connectors[1]" in error.value.__notes__


def test_children_without_hma_are_named_when_hma_is_on() -> None:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="hybrid KV cache manager: two. Start vLLM with --disable-hybrid"):
        build(config_of(child_config(Script("a")), example, names=["one", "two"]))


def test_layouts_must_agree() -> None:
    scripts = [Script("a"), Script("b"), Script("c")]
    classes = ["HndConnector", "ScriptedConnector", "HndConnector"]
    config = config_of(*(child_config(s, c) for s, c in zip(scripts, classes, strict=True)))
    assert kvobs.MultiConnector.get_required_kvcache_layout(config) == "HND"
    assert get_kv_connector_cache_layout(config) == "HND"
    assert get_kv_connector_cache_layout(config_of(child_config(Script("d")))) is None
    assert get_kv_connector_cache_layout() is None


def test_each_child_sees_its_own_transfer_config_and_the_rest_of_vllms() -> None:
    config = config_of(child_config(Script("a")), child_config(Script("b")))
    first, second = build(config)._connectors
    assert first._kv_transfer_config.kv_connector_extra_config == {"tag": "a"}
    assert second._kv_transfer_config.kv_connector_extra_config == {"tag": "b"}
    assert first._vllm_config.model_config is config.model_config
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


@pytest.mark.parametrize("propagates", [True, False])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", None])
def test_children_see_the_context(propagates: bool, endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    config = config_of(child_config(Script("a")), tracing={"propagate": propagates})
    config.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
    seen: list[bool] = []

    def look(connector: Any, request: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().is_valid)

    monkeypatch.setattr(ScriptedConnector, "on_new_request", look)
    connector = build(config)
    connector.on_new_request(request("r"))
    assert seen == [propagates and endpoint is not None]
