"""A pytest plugin for vLLM's own tests: each connector of a scheduler becomes the one child of a MultiConnector.

Most of vLLM's tests of the scheduler use a single connector, real or a mock. With ``KVOBS_AROUND=stock`` or ``=kvobs``
vLLM's scheduler talks to vLLM's or kvobs's router around it, and the test goes on looking at its own connector. What a
test says that the workers have reported goes through the router's worker side first, as it would in an engine.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import NonCallableMock

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults, SupportsHMA
from vllm.v1.outputs import KVConnectorOutput

from kvobs.testing import Script, entry_of

if TYPE_CHECKING:
    import pytest

ROUTERS = {"stock": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "kvobs": "kvobs"}

ANSWERS: dict[str, Any] = {
    "get_finished_count": None,
    "get_kv_connector_stats": None,
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
    "register_finished_partial_tail": False,
    "request_finished": (False, None),
    "take_events": (),
}
"""What a mock answers unless its test says otherwise: vLLM's base class does, a bare mock answers with a mock."""


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("KVOBS_AROUND"):
        surround(ROUTERS[os.environ["KVOBS_AROUND"]])


class Given:
    """Builds to an object that is there already."""

    given: Any = None

    def __new__(cls, vllm_config: Any, role: Any, kv_cache_config: Any) -> Any:
        return cls.given


class GivenWithHma(Given, SupportsHMA):
    """Builds to one that supports the hybrid memory allocator, which vLLM asks of the class."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class Routed:
    """A router around one connector, in a scheduler and in its one worker."""

    def __init__(self, scheduler: Any, connector: Any, module: str) -> None:
        self.connector = connector
        if isinstance(connector, NonCallableMock):
            _complete(connector)
        Given.given = connector
        given = "GivenWithHma" if isinstance(connector, SupportsHMA) else "Given"
        entry = {"kv_connector": given, "kv_connector_module_path": __name__}
        self.router = self._build(scheduler, module, KVConnectorRole.SCHEDULER, entry)
        self.noted = Script("noted")  # the worker's side of the test's connector reports what the test says
        self.worker = self._build(scheduler, module, KVConnectorRole.WORKER, entry_of(self.noted))

    @staticmethod
    def _build(scheduler: Any, module: str, role: KVConnectorRole, entry: dict[str, Any]) -> Any:
        config = copy.copy(scheduler.vllm_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.disable_hybrid_kv_cache_manager = entry["kv_connector"] == "Given"
        single = config.kv_transfer_config
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_module_path=module,
            kv_role=single.kv_role,
            engine_id=single.engine_id,
            kv_load_failure_policy=single.kv_load_failure_policy,
            kv_connector_extra_config={"connectors": [entry | {"kv_role": single.kv_role}]},
        )
        router = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        return router(config, role, scheduler.kv_cache_config)

    def work(self, scheduled: Any, result: Any) -> Any:
        """Return a step's result as it is when what the workers say has gone through the router."""
        meta = scheduled.kv_connector_metadata
        if meta is None:
            return result
        output, noted = result.kv_connector_output or KVConnectorOutput(), self.noted
        noted.reports[0] = KVConnectorTransferResults(
            finished_sending=set(output.finished_sending or ()),
            finished_recving=set(output.finished_recving or ()),
            failed_recving=set(output.failed_recving),
        )
        noted.bad_blocks[0] = set(output.invalid_block_ids)
        noted.events[0], noted.worker_meta[0] = output.kv_cache_events, output.kv_connector_worker_meta
        noted.stats = [output.kv_connector_stats] if output.kv_connector_stats is not None else []
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_save()
        done = worker.get_transfer_results(set(scheduled.finished_req_ids))
        result = copy.copy(result)
        result.kv_connector_output = KVConnectorOutput(
            finished_sending=done.finished_sending or None,
            finished_recving=done.finished_recving or None,
            failed_recving=done.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
            expected_finished_count=output.expected_finished_count,
        )
        worker.clear_connector_metadata()
        return result


def _complete(mock: Any) -> None:
    for name, answer in ANSWERS.items():
        method: Any = getattr(mock, name, None)
        if isinstance(getattr(method, "return_value", None), NonCallableMock) and method.side_effect is None:
            method.return_value = answer
    if isinstance(getattr(mock, "requires_kv_delivery", None), NonCallableMock):
        mock.requires_kv_delivery = False


def surround(module: str) -> None:
    """Have every scheduler talk to a router of this module around the connector that it is given."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def get(self: Any) -> Any:
        routed = vars(self).get("_routed")
        if not isinstance(routed, Routed):
            return routed
        is_test = f"{os.sep}tests{os.sep}" in sys._getframe(1).f_code.co_filename
        return routed.connector if is_test else routed.router

    def put(self: Any, connector: Any) -> None:
        is_single = connector is not None and type(connector).__name__ != "MultiConnector"
        vars(self)["_routed"] = Routed(self, connector, module) if is_single else connector

    plain = Scheduler.update_from_output

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        routed = vars(self).get("_routed")
        if isinstance(routed, Routed):
            model_runner_output = routed.work(scheduler_output, model_runner_output)
        return plain(self, scheduler_output, model_runner_output)

    Scheduler.connector = property(get, put)
    Scheduler.update_from_output = update_from_output
