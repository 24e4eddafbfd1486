"""A worker without a model: vLLM's own model runner code calls the connector, in the order of this version.

The V1 runner's part is a mixin that asks for the process's connector; the V2 runner's part is a class. Between them
and the forward stands here what they would do around a model of two layers.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.transparency.life import Life

TOKEN = 7


@dataclass(frozen=True)
class Tensor:
    """Stands for one: the connectors must get this very object."""

    name: str


LAYERS = {name: Tensor(f"{name}'s cache") for name in ("layer.0", "layer.1")}
ATTENTION = Tensor("the attention's metadata")

_TAKES_BATCH = "input_batch" in inspect.signature(ActiveKVConnector.pre_forward).parameters
_HAS_FINISH = hasattr(ActiveKVConnector, "finish_forward")
_DEFERS = "defer_finalize" in inspect.signature(ActiveKVConnector.post_forward).parameters


class Worker:
    """One rank, with its connector."""

    def __init__(self, life: Life, connector: Any, config: Any) -> None:
        self._life, self.connector, self._config = life, connector, config
        self._forwards = 0
        with self._in_this_process():
            if life.runner == "v2":
                self._active = ActiveKVConnector(config, dict(LAYERS))
            else:
                connector.register_kv_caches(dict(LAYERS))
                connector.set_host_xfer_buffer_ops(_copy)

    def execute(self, scheduled: Any, samples: dict[str, int]) -> ModelRunnerOutput:
        """Run a step, in which so many tokens are sampled for each request."""
        with self._in_this_process():
            output = self._run_v2(scheduled) if self._life.runner == "v2" else self._run_v1(scheduled)
        if isinstance(output, ModelRunnerOutput):
            return output
        ids = list(samples)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: i for i, request in enumerate(ids)},
            sampled_token_ids=[[TOKEN] * tokens for tokens in samples.values()],
            kv_connector_output=output,
        )

    @contextmanager
    def _in_this_process(self) -> Iterator[None]:
        """Make this rank's connector the one of the process, as it is in a worker's."""
        before = kv_transfer_state._KV_CONNECTOR_AGENT
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    def _run_v1(self, scheduled: Any) -> Any:
        runner = KVConnectorModelRunnerMixin
        self.connector.handle_preemptions(scheduled.kv_connector_metadata)
        if not scheduled.total_num_scheduled_tokens:
            return runner.kv_connector_no_forward(scheduled, self._config)
        drafts = self._life.drafting
        with (
            set_forward_context(None, self._config),
            runner.maybe_get_kv_connector_output(scheduled, defer_finalize=drafts) as output,
        ):
            self._forward()
        if drafts:
            self._forward()
            runner.finalize_kv_connector()
        return output

    def _run_v2(self, scheduled: Any) -> Any:
        active = self._active
        if not scheduled.total_num_scheduled_tokens:
            return active.no_forward(scheduled)
        ids = list(scheduled.num_scheduled_tokens)
        batch = SimpleNamespace(idx_mapping=list(range(len(ids))), req_ids=ids, num_tokens=len(ids))
        more: tuple[Any, ...] = (batch,) if _TAKES_BATCH else ()
        if self._life.graph:
            active.pre_forward(scheduled, *more, *(({},) if _TAKES_BATCH else ()))
        else:
            with set_forward_context(None, self._config):
                active.pre_forward(scheduled, *more)
                self._forward()
        if _HAS_FINISH:
            active.finish_forward()
        if self._life.drafting and _DEFERS:
            output = active.post_forward(scheduled.finished_req_ids, defer_finalize=True)
            self._forward()
            active.finalize_step()
            return output
        return active.post_forward(scheduled.finished_req_ids)

    def _forward(self) -> None:
        """Do what vLLM's attention layers do; a replayed graph has none of it."""
        if self._life.graph or not self.connector.has_connector_metadata():
            return
        self._forwards += 1
        more = {"more": ATTENTION} if self._life.happens(0.3, "keywords", self._forwards) else {}
        for name, cache in LAYERS.items():
            self.connector.wait_for_layer_load(name)
            self.connector.save_kv_layer(name, cache, ATTENTION, **more)


def _copy(*arguments: Any) -> None:
    """Stand for the operation that copies blocks between host and device."""
