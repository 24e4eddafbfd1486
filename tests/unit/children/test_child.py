"""Which calls into a connector are recorded: of the hooks that its class implements, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvobs.children.child import Child
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.vllm_api.hooks import HOOKS, Cadence, is_empty
from tests.engine.children_stats import IdleChild

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
