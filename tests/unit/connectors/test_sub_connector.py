"""Which calls into a connector are recorded: of the hooks that its class implements, and no others."""

import inspect
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)

from kvobs.connectors.answers import answer_of
from kvobs.connectors.configured import read_specs
from kvobs.connectors.sub_connector import SubConnector, Unbuilt
from kvobs.probe.recorder import SUM, Recorder
from kvobs.schema.signals import is_timed
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config, transfer_config
from kvobs.vllm_api.hooks import HOOKS, Cadence, is_empty
from kvobs.vllm_api.versions import hooks
from tests.engine.connectors_stats import IdleConnector
from tests.support.numbers import locate
from tests.support.probes import counts
from tests.support.rig import entry_for

OF_EACH_STEP = [hook.name for hook in HOOKS.values() if hook.cadence is Cadence.STEP]


def made(cls: type[IdleConnector]) -> tuple[SubConnector, Recorder]:
    connector, recorder = object.__new__(cls), Recorder(1)
    connector._connector_metadata = None
    return SubConnector(0, "one", connector, recorder), recorder


def counted(recorder: Recorder) -> int:
    """Return how many calls were recorded."""
    return sum(n for slot, n in counts(recorder).items() if locate(slot)[1] != SUM)


def test_base_hooks_with_a_body_are_called_but_not_recorded() -> None:
    connector, recorder = made(IdleConnector)
    connector.bind_connector_metadata("metadata")
    assert connector.wrapped._connector_metadata == "metadata"
    assert connector.get_block_ids_with_load_errors() == set()
    connector.clear_connector_metadata()
    assert connector.wrapped._connector_metadata is None
    assert counted(recorder) == 0
    connector.get_transfer_results(set())
    assert counted(recorder) == 1, "vLLM's base class calls the connector's own get_finished there"


def test_no_other_hook_of_each_step_has_a_body_in_the_base_class() -> None:
    """A newer vLLM's may call the connector's own code, and then it has to be recorded."""
    connector = object.__new__(IdleConnector)
    inherited = [name for name in OF_EACH_STEP if getattr(IdleConnector, name) is getattr(KVConnectorBase_V1, name)]
    bodies = {name for name in inherited if not is_empty(getattr(connector, name))}
    known = {"bind_connector_metadata", "clear_connector_metadata", "get_block_ids_with_load_errors"}
    assert bodies - {"get_transfer_results"} == known


def unbuilt(role: KVConnectorRole) -> Unbuilt:
    return Unbuilt(engine_config(transfer_config("kvobs", [entry_for(Script("x"))])), role, cache_config())


UNBUILT_HOOKS = [name for name, value in vars(Unbuilt).items() if name in HOOKS and inspect.isfunction(value)]


@pytest.mark.parametrize("hook", [*UNBUILT_HOOKS, "get_finished", "get_block_ids_with_load_errors"])
def test_unbuilt_connector_answers_as_a_failed_call_does(hook: str) -> None:
    """And as vLLM's base class, for hooks that it need not implement."""
    call = getattr(unbuilt(KVConnectorRole.WORKER), hook)
    required = [each for each in inspect.signature(call).parameters.values() if each.kind is not each.VAR_KEYWORD]
    _, read, nothing = answer_of(hook)
    answer = call(*[None] * len(required))
    assert (answer if read is None else read(answer, ())) == nothing()


def test_unbuilt_connectors_capabilities_do_not_weigh() -> None:
    """What all must be able to, it is; what one alone decides, it does not."""
    one = unbuilt(KVConnectorRole.SCHEDULER)
    assert supports_hma(one)
    assert one.supports_divergent_local_hybrid_hits is True
    assert one.requires_kv_delivery is False


def test_an_isolated_class_that_fails_to_import_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Not under a whole engine: with the hybrid KV cache manager vLLM imports the classes itself, and ends there."""
    unknown = {"kv_connector": "Absent", "kv_connector_module_path": "no_such_module_anywhere", "kv_role": "kv_both"}
    absent, other = read_specs(transfer_config("kvobs", [unknown, entry_for(Script("x"))], {"best_effort": ["Absent"]}))
    assert (absent.connector_class, absent.is_best_effort, absent.name) == (Unbuilt, True, "Absent")
    assert other.connector_class is ScriptedConnector
    assert "connector 'Absent' can't be imported" in caplog.text


class Bare:
    """A connector with hooks that do something, one that does not, and one that answers a constant."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self.metadata = [connector_metadata]

    def wait_for_save(self) -> int:
        return len("saved")

    def finish_forward(self) -> None:
        pass

    def get_finished_count(self) -> int:
        return 3


def test_a_connectors_hooks_are_recorded_where_they_do_something() -> None:
    recorder = Recorder(1)
    connector = SubConnector(0, "bare", Bare(), recorder)
    connector.bind_connector_metadata("metadata")
    assert connector.wrapped.metadata == ["metadata"]
    assert (connector.wait_for_save(), connector.finish_forward(), connector.get_finished_count()) == (5, None, 3)
    assert {locate(slot)[0].values for slot in counts(recorder)} == {("bind_connector_metadata",), ("wait_for_save",)}
    assert connector.wait_for_save is connector.wait_for_save, "bound once"
    assert {"wait_for_save", "finish_forward", "get_finished_count"} & connector.implemented == {"wait_for_save"}


@pytest.mark.parametrize("name", ["nothing", "requires_kv_delivery", "build_prom_metrics", "__len__"])
def test_other_names_than_hooks_are_no_attributes(name: str) -> None:
    assert not hasattr(SubConnector(0, "bare", Bare(), Recorder(1)), name)


ABOUT_A_REQUEST = [hook.name for hook in HOOKS.values() if hook.cadence is Cadence.REQUEST]


@pytest.mark.parametrize("name", sorted(hooks().intersection(ABOUT_A_REQUEST)))
def test_a_hook_about_a_request_has_it_first(name: str) -> None:
    """So that the call's context and place follow from it."""
    declared = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
    assert list(inspect.signature(declared).parameters)[:2] == ["self", "request"]


@pytest.mark.parametrize("is_on", [True, False])
def test_only_calls_about_a_request_are_active_in_a_trace(is_on: bool) -> None:
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
    recorder.notice = lambda *args: noted.append("recorded") or 0  # type: ignore[func-returns-value, method-assign]
    recorder.slow_ns = dict.fromkeys(HOOKS, -1)
    index = SubConnector(0, "real", Real(), recorder, activated=activated if is_on else None)
    for hook in HOOKS.values():
        assert hasattr(index, hook.name) == (is_timed(hook) and hook.cadence is not Cadence.LAYER)
        if hasattr(index, hook.name):
            noted.clear()
            assert getattr(index, hook.name)("subject", 1) == ("subject", 1)
            inner = [hook.name, "recorded"]
            assert noted == (["begin", *inner, "end"] if is_on and hook.name in ABOUT_A_REQUEST else inner)


def test_an_empty_hook_needs_no_context() -> None:
    class Quiet:
        def on_new_request(self, request: Any) -> None:
            pass

    def activated(call: Any) -> Any:
        raise AssertionError("not to be called")

    assert SubConnector(0, "quiet", Quiet(), Recorder(1), activated=activated).on_new_request("r") is None
