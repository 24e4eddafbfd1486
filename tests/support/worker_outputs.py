"""What workers report in a step, and an aggregator for it."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import KVConnectorKVEvents, KVEventAggregator
from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.aggregation.aggregator import KVOutputAggregator

STUCK_AFTER = 10


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Counts(KVConnectorStats):
    """Stats that extend lists, as NIXL's."""

    def aggregate(self, other: KVConnectorStats) -> Counts:
        self.data["n"] += other.data["n"]
        return self


class OtherCounts(KVConnectorStats):
    """Stats of another type."""


class Meta(KVConnectorWorkerMetadata):
    """Worker metadata: who contributed."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Meta:
        return Meta(*self.ranks, *other.ranks)


class Events(KVConnectorKVEvents):
    """Events, held as LMCache's connector holds them."""

    def __init__(self, *events: str) -> None:
        self.of_all = KVEventAggregator(1)
        self.of_all.add_events(list(events))

    def add_events(self, events: list[Any]) -> None:
        self.of_all.add_events(events)

    def aggregate(self) -> Events:
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.of_all.increment_workers(count)

    def get_all_events(self) -> list[Any]:
        return self.of_all.get_all_events()

    def get_number_of_workers(self) -> int:
        return self.of_all.get_number_of_workers()

    def clear_events(self) -> None:
        self.of_all.clear_events()


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
