"""The connectors' own stats are handed on in each step that has some, with the classes that rebuild them."""

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.payload.stats import Classes, MultiKVConnectorStats, class_path

CLASSES = dict.fromkeys(("c0", "c1"), "tests.unit.telemetry.payload.test_collector:Reporting")


class Reporting:
    """A connector that has stats."""

    def __init__(self, *stats: KVConnectorStats | None) -> None:
        self.stats = list(stats)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.stats.pop(0)


def collector(*connectors: Reporting) -> Collector:
    collects = Collector({f"c{i}": class_path(type(c)) for i, c in enumerate(connectors)})
    collects.hooks = [(f"c{i}", c.get_kv_connector_stats) for i, c in enumerate(connectors)]
    return collects


def test_stats_are_passed_with_classes_in_steps_that_have_some() -> None:
    first, second = KVConnectorStats(data={"n": 1}), KVConnectorStats(data={"n": 2})
    collects = collector(Reporting(None, first, first, None), Reporting(None, None, second, None))
    assert collects.collect() is None
    for expected in ({"c0": first}, {"c0": first, "c1": second}):
        stats: Any = collects.collect()
        assert isinstance(stats, MultiKVConnectorStats)
        assert list(stats.data) == [*expected, "kvobs"], "what is rebuilt first"
        assert all(stats[name] is own for name, own in expected.items()), "as they are"
        assert isinstance(stats["kvobs"], Classes)
        assert stats["kvobs"].data == CLASSES
    assert collects.collect() is None


def test_the_classes_of_one_step_are_not_those_of_another() -> None:
    """vLLM keeps what it gets, and merges into it."""
    collects = collector(Reporting(KVConnectorStats(data={}), KVConnectorStats(data={})), Reporting(None, None))
    one: Any = collects.collect()
    one["kvobs"].data.clear()
    two: Any = collects.collect()
    assert two["kvobs"].data == CLASSES


def test_a_connector_without_stats_is_not_asked() -> None:
    collects = Collector({"c0": "m:C"})
    assert collects.collect() is None


def test_a_connectors_error_reaches_vllm_as_from_its_router() -> None:
    """Its hook is the connector's own call: what contains it for an isolated one is not here."""
    collects = collector(Reporting())
    with pytest.raises(IndexError):
        collects.collect()
