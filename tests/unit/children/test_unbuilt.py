"""What stands for an isolated connector that can't be built, or imported, answers everything and does nothing."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvobs.children.configured import read_specs
from kvobs.children.unbuilt import Unbuilt
from kvobs.schema.config import ConfigError
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config, transfer_config
from tests.support.rig import child_config

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
