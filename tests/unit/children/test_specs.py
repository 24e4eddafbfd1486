"""Children are built, named and asked about themselves; mistakes name the child and the JSON path."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import kvobs
from kvobs.children.child import Child
from kvobs.children.configured import read_specs
from kvobs.children.specs import load_ends_save
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.schema.config import ConfigError
from kvobs.schema.signals import is_timed
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.testing import Script, cache_config, engine_config, transfer_config
from kvobs.vllm_api.hooks import HOOKS, Cadence
from tests.support.contexts import no_otel_variables, request
from tests.support.rig import child_config


def config_of(*connectors: dict[str, Any], **kvobs_options: Any) -> Any:
    return engine_config(transfer_config("kvobs", list(connectors), kvobs_options))


def build(config: Any, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return kvobs.MultiConnector(config, role, cache_config())


def test_unknown_connectors_and_keys_are_reported_together_with_their_paths() -> None:
    bad = [{"kv_connector": "NoSuch", "kv_role": "kv_both"}, {**child_config(Script("a")), "kv_rol": "kv_both"}]
    with pytest.raises(ConfigError) as error:
        read_specs(transfer_config("kvobs", bad))
    key, name = error.value.mistakes
    assert name.path == "kv_connector_extra_config.connectors[0].kv_connector"
    assert name.found == "found 'NoSuch', which this vLLM does not have"
    assert "OffloadingConnector" in name.allowed
    assert key.path == "kv_connector_extra_config.connectors[1].kv_rol"
    assert key.fix == "use 'kv_role'"


def test_a_module_that_can_not_be_imported_is_named() -> None:
    bad = {**child_config(Script("a")), "kv_connector_module_path": "no.such.module"}
    with pytest.raises(ConfigError, match=r"connectors\[0\].*No module named"):
        read_specs(transfer_config("kvobs", [bad]))


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_children_already_built_are_shut_down_when_a_later_one_fails(role: KVConnectorRole) -> None:
    a, b = Script("a"), Script("b")
    b.raises["__init__"] = OSError("no route to b")
    with pytest.raises(OSError, match="no route to b") as error:
        build(config_of(child_config(a), child_config(b), names=["one", "two"]), role)
    assert a.called("shutdown") == [None]
    assert "while building connector 'two', kv_connector_extra_config.connectors[1]" in error.value.__notes__


def test_a_child_that_can_not_shut_down_either_does_not_hide_the_first_error() -> None:
    a, b = Script("a"), Script("b")
    a.raises["shutdown"] = RuntimeError("stuck")
    b.raises["__init__"] = OSError("no route to b")
    with pytest.raises(OSError, match="no route to b"):
        build(config_of(child_config(a), child_config(b)))


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


def test_layouts_that_differ_are_named_with_their_children() -> None:
    config = config_of(
        child_config(Script("a"), "HndConnector"), child_config(Script("b"), "NhdConnector"), names=["one", "two"]
    )
    with pytest.raises(ValueError, match="one needs HND, two needs NHD"):
        kvobs.MultiConnector.get_required_kvcache_layout(config)


def test_each_child_sees_its_own_transfer_config_and_the_rest_of_vllms() -> None:
    config = config_of(child_config(Script("a")), child_config(Script("b")))
    connector = build(config)
    first, second = connector._connectors
    assert first._kv_transfer_config.kv_connector_extra_config == {"tag": "a"}
    assert second._kv_transfer_config.kv_connector_extra_config == {"tag": "b"}
    assert first._vllm_config.model_config is config.model_config
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


class Bare:
    """A connector with a hook that does something, one that does not, and one that answers a constant."""

    def wait_for_save(self) -> int:
        return len("saved")

    def finish_forward(self) -> None:
        pass

    def get_finished_count(self) -> int:
        return 3


def test_a_childs_hooks_are_recorded_where_they_do_something() -> None:
    recorder = Recorder(1)
    child = Child(0, "bare", Bare(), recorder)
    assert (child.wait_for_save(), child.finish_forward(), child.get_finished_count()) == (5, None, 3)
    assert [hook for _, hook in recorder._tallies] == ["wait_for_save"]
    assert child.wait_for_save is child.wait_for_save, "bound once"
    assert [child.does(hook) for hook in ("wait_for_save", "finish_forward", "get_finished_count")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("name", ["nothing", "requires_kv_delivery", "build_prom_metrics", "__len__"])
def test_what_is_no_hook_of_a_child_at_work_is_no_attribute(name: str) -> None:
    child = Child(0, "bare", Bare(), Recorder(1))
    assert not hasattr(child, name)


# --- calls about a request

ABOUT_A_REQUEST = [hook.name for hook in HOOKS.values() if hook.cadence is Cadence.REQUEST]


@pytest.mark.parametrize("name", ABOUT_A_REQUEST)
def test_a_hook_about_a_request_has_it_first(name: str) -> None:
    """So that the call's context and place follow from it."""
    declared = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
    assert list(inspect.signature(declared).parameters)[:2] == ["self", "request"]


@pytest.mark.parametrize("is_on", [True, False])
def test_calls_about_a_request_and_no_others_are_activated_around_what_is_recorded(is_on: bool) -> None:
    noted: list[str] = []

    def activated(call: Any) -> Any:
        def active(*args: Any) -> Any:
            noted.append("begin")
            try:
                return call(*args)
            finally:
                noted.append("end")

        return active

    class Real:
        def __getattr__(self, name: str) -> Any:
            def hook(*args: Any) -> Any:
                noted.append(name)
                return args

            return hook

    recorder = Recorder(1)
    recorder.notice = lambda *args, **kwargs: noted.append("recorded")  # type: ignore[method-assign]
    recorder.slow_ns = lambda hook: -1  # type: ignore[method-assign]
    child = Child(0, "real", Real(), recorder, activated=activated if is_on else None)
    for hook in HOOKS.values():
        if is_timed(hook):
            noted.clear()
            assert getattr(child, hook.name)("subject", 1) == ("subject", 1)
            inner = [hook.name, "recorded"]
            assert noted == (["begin", *inner, "end"] if is_on and hook.name in ABOUT_A_REQUEST else inner)


def test_an_empty_hook_needs_no_context() -> None:
    class Quiet:
        def on_new_request(self, request: Any) -> None:
            pass

    def activated(call: Any) -> Any:
        raise AssertionError("not to be called")

    assert Child(0, "quiet", Quiet(), Recorder(1), activated=activated).on_new_request("r") is None


@pytest.mark.parametrize("propagates", [True, False])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", None])
def test_children_see_the_requests_context_where_that_is_wanted_and_traced(
    propagates: bool, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_otel_variables(monkeypatch)
    script = Script("a")
    config = config_of(child_config(script), tracing={"propagate": propagates})
    config.observability_config = SimpleNamespace(otlp_traces_endpoint=endpoint)
    connector = build(config)
    seen: list[bool] = []
    child = connector._children[0].connector
    child.on_new_request = lambda request: seen.append(trace.get_current_span().get_span_context().is_valid)
    connector.on_new_request(request("r"))
    assert seen == [propagates and endpoint is not None]


def test_whose_load_ends_its_promised_save_is_known_by_class_also_within_a_router_of_vllm() -> None:
    flexkv = type("Mine", (type("FlexKVConnectorV1", (), {}),), {})()
    other = Script("other")
    assert load_ends_save(flexkv)
    assert load_ends_save(SimpleNamespace(_connectors=[other, flexkv]))
    assert not load_ends_save(SimpleNamespace(_connectors=[other]))
    assert not load_ends_save(other)
