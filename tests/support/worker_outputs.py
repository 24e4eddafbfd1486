"""What workers report in a step, and an aggregator for it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.aggregation.aggregator import KVOutputAggregator

STUCK_AFTER = 10


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Meta(KVConnectorWorkerMetadata):
    """Worker metadata: who contributed."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Meta":
        return Meta(*self.ranks, *other.ranks)


def said(**fields: Any) -> ModelRunnerOutput:
    """Return a worker's output."""
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**fields))


def silent() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={})


def result(aggregator: Any, *outputs: ModelRunnerOutput | None, rank: int = 0) -> KVConnectorOutput:
    """Return what the scheduler gets."""
    output = aggregator.aggregate(list(outputs), rank)
    assert output is outputs[rank]
    assert output is not None
    return output.kv_connector_output


def build(router: str, expected: int) -> Any:
    return {"kvobs": KVOutputAggregator, "stock": stock.KVOutputAggregator}[router](expected)
