"""Which calls into a connector are recorded: of the hooks that its class implements, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvobs.children.child import Child, Unbuilt
from kvobs.children.configured import read_specs
from kvobs.schema.config import ConfigError
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config, transfer_config
from kvobs.vllm_api.hooks import HOOKS, Cadence, is_empty
from tests.engine.children_stats import IdleChild
from tests.support.rig import child_config

OF_EACH_STEP = [hook.name for hook in HOOKS.values() if hook.cadence is Cadence.STEP]


class OwnChild(IdleChild):
    """Keeps its metadata itself."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata


def made(cls: type[IdleChild]) -> tuple[Child, Recorder]:
    connector, recorder = object.__new__(cls), Recorder(1)
    connector._connector_metadata = None
    return Child(0, "one", connector, recorder), recorder


def counted(recorder: Recorder) -> int:
    """Return how many calls were recorded."""
    return sum(sum(now[:-1]) for _, now, _ in recorder._tallies.values())


def test_what_the_base_class_does_by_itself_in_a_step_is_called_and_not_recorded() -> None:
    child, recorder = made(IdleChild)
    child.bind_connector_metadata("metadata")
    assert child.connector._connector_metadata == "metadata"
    assert child.get_block_ids_with_load_errors() == set()
    child.clear_connector_metadata()
    assert child.connector._connector_metadata is None
    assert counted(recorder) == 0


def test_the_same_hooks_are_recorded_where_the_connector_implements_them() -> None:
    child, recorder = made(OwnChild)
    child.bind_connector_metadata("metadata")
    assert child.connector._connector_metadata == "metadata"
    assert counted(recorder) == 1


def test_what_calls_the_connectors_own_code_is_recorded() -> None:
    """vLLM's base class calls the connector's ``get_finished`` there."""
    child, recorder = made(IdleChild)
    child.get_transfer_results(set())
    assert counted(recorder) == 1


def test_no_other_hook_of_each_step_has_a_body_in_the_base_class() -> None:
    """A newer vLLM's may call the connector's own code, and then it has to be recorded."""
    connector = object.__new__(IdleChild)
    inherited = [name for name in OF_EACH_STEP if getattr(IdleChild, name) is getattr(KVConnectorBase_V1, name)]
    bodies = {name for name in inherited if not is_empty(getattr(connector, name))}
    known = {"bind_connector_metadata", "clear_connector_metadata", "get_block_ids_with_load_errors"}
    assert bodies - {"get_transfer_results"} == known


def test_what_is_no_hook_is_an_error() -> None:
    child, _ = made(IdleChild)
    with pytest.raises(AttributeError, match="'role' is not a hook that a child is called by"):
        _ = child.role


ABSENT = {"kv_connector": "Absent", "kv_connector_module_path": "no_such_module_anywhere", "kv_role": "kv_both"}


def unbuilt(role: KVConnectorRole) -> Unbuilt:
    config = engine_config(transfer_config("kvobs", [child_config(Script("x"))]))
    return Unbuilt(config, role, cache_config())


def test_its_scheduler_side_offers_and_promises_nothing() -> None:
    one, request = unbuilt(KVConnectorRole.SCHEDULER), Script("request")
    assert one.get_num_new_matched_tokens(request, 0) == (0, False)
    assert one.request_finished_all_groups(request, ([1],)) == (False, None)
    assert one.build_connector_meta(SchedulerOutput.make_empty()) is None
    one.update_state_after_alloc(request, ([1],), 0)
    output = KVConnectorOutput()
    one.update_connector_output(output)
    assert output.is_empty()
    assert list(one.take_events()) == []
    assert one.has_pending_push_work() is False


def test_its_workers_side_reports_nothing() -> None:
    one: Any = unbuilt(KVConnectorRole.WORKER)
    one.register_kv_caches({})
    one.start_load_kv(None)
    one.wait_for_layer_load("layer.0")
    one.save_kv_layer("layer.0", None, None)
    one.wait_for_save()
    assert not any(one.get_finished({"r"}))
    assert one.get_block_ids_with_load_errors() == set()
    assert one.get_handshake_metadata() is None


def test_what_it_says_of_itself_does_not_weigh() -> None:
    """What all must be able to, it is; what one alone decides, it does not."""
    one = unbuilt(KVConnectorRole.SCHEDULER)
    assert supports_hma(one)
    assert one.supports_divergent_local_hybrid_hits is True
    assert one.requires_kv_delivery is False


def test_a_class_that_can_not_be_imported_is_left_out_if_it_is_isolated(caplog: pytest.LogCaptureFixture) -> None:
    """Not under a whole engine: with the hybrid KV cache manager vLLM imports the classes itself, and ends there."""
    both = [ABSENT, child_config(Script("x"))]
    absent, other = read_specs(transfer_config("kvobs", both, {"isolate": ["Absent"]}))
    assert (absent.connector_class, absent.is_isolated, absent.name) == (Unbuilt, True, "Absent")
    assert other.connector_class is ScriptedConnector
    assert "connector 'Absent' can't be imported" in caplog.text


def test_a_class_that_can_not_be_imported_ends_the_start_otherwise() -> None:
    with pytest.raises(ConfigError, match=r"connectors\[0\].*can.t be imported: ModuleNotFoundError"):
        read_specs(transfer_config("kvobs", [ABSENT, child_config(Script("x"))]))
