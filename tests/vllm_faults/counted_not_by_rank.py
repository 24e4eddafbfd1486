"""Let one of two ranks report a save twice, and a failed load that the other never reports."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


def output(**reports: Any) -> ModelRunnerOutput:
    return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**reports))


def reproduce() -> dict[str, Any]:
    aggregator = KVOutputAggregator(expected_finished_count=2)
    for _ in range(2):
        combined = aggregator.aggregate([output(finished_sending={"a"}), output()])
    assert combined is not None
    for i in range(1000):
        aggregator.aggregate([output(finished_recving={f"b{i}"}), output()])
    return {
        "saves complete, though the second rank reported none": combined.kv_connector_output.finished_sending,
        "loads kept that one rank reported": len(aggregator._recv_remaining_count),
    }


if __name__ == "__main__":
    print(reproduce())
