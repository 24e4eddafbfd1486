"""One set of series for each child, whatever its metrics do; nothing is raised into the API server."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.metrics import Families, MultiKVConnectorPromMetrics
from kvobs.recorder import WIDTH
from kvobs.signals import COUNTERS, LOOKUPS, slot
from kvobs.stats import KvobsStats
from tests.rig import child_config, engine_config, transfer_config
from tests.scripted import Script

LABELS = {"model_name": "tiny", "engine": "0"}


class Front:
    """The API server's side: kvobs's metrics in a registry of its own."""

    def __init__(self, *connectors: dict[str, Any], engines: int = 1, **kvobs: Any) -> None:
        self.registry = CollectorRegistry()
        config = engine_config(transfer_config("kvobs", list(connectors), kvobs))
        cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
        types: Any = {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)}
        values: dict[int, list[object]] = {i: ["tiny", str(i)] for i in range(engines)}
        self.metrics: MultiKVConnectorPromMetrics = cls.build_prom_metrics(config, types, list(LABELS), values)

    def value(self, name: str, connector: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {**LABELS, "connector": connector, **labels})


def metered(tag: str, cls: str = "MeteredConnector", **more: Any) -> dict[str, Any]:
    return child_config(Script(tag), cls, **more)


def own(counts: list[int], **children: str) -> dict[str, Any]:
    return KvobsStats.of(children, counts).data


def test_counts_become_counters_of_the_right_child_and_engine() -> None:
    front = Front(metered("a"), metered("b"), engines=2, names=["one", "two"])
    hit = slot(LOOKUPS, "hit")
    front.metrics.observe({"kvobs": own([hit, 2, WIDTH + hit, 3], one="m:C", two="m:C")}, 0)
    front.metrics.observe({"kvobs": own([hit, 10], one="m:C", two="m:C")}, 1)
    front.metrics.observe({"kvobs": own([hit, 1], one="m:C", two="m:C")}, 0)
    assert front.value("kvobs_lookups_total", "one", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "two", outcome="hit") == 3
    assert front.value("kvobs_lookups_total", "one", outcome="hit", engine="1") == 10


def test_series_appear_when_first_used() -> None:
    front = Front(metered("a"))
    assert [s for family in front.registry.collect() if family.name.startswith("kvobs") for s in family.samples] == []


def test_every_counter_of_the_table_is_exposed() -> None:
    front = Front(metered("a"), names=["one"])
    front.metrics.observe({"kvobs": own([n for i in range(WIDTH) for n in (i, i + 1)], one="m:C")})
    exposed = {s.name for family in front.registry.collect() for s in family.samples if s.name.endswith("_total")}
    assert {signal.name for signal in COUNTERS} <= exposed


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "as vLLM before 0.30 sends it"])
def test_childrens_own_metrics_keep_their_names_and_gain_the_label(wrapped: bool) -> None:
    front = Front(metered("a"), metered("b"), names=["one", "two"])
    front.metrics.observe({name: {"data": {"n": n}} if wrapped else {"n": n} for name, n in (("one", 1), ("two", 5))})
    assert front.value("scripted_things_total", "one") == 1
    assert front.value("scripted_things_total", "two") == 5


def test_a_child_whose_metrics_can_not_be_made_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(metered("a", "UnmeterableConnector"), metered("b"), names=["one", "two"])
    front.metrics.observe({"one": {"n": 1}, "two": {"n": 2}})
    assert front.value("scripted_things_total", "two") == 2
    assert "'one' can't define its own metrics" in caplog.text


@pytest.mark.parametrize(
    "bad",
    [
        {"one": {"wrong": 1}},
        {"one": None},
        {"kvobs": None},
        {"kvobs": {"v": 1, "children": {}, "counts": ["x"]}},
        {"kvobs": own([10**9, 1], one="m:C")},
        {"kvobs": own([0, -5], one="m:C")},
        {"stranger": {"n": 1}},
    ],
    ids=str,
)
def test_a_bad_payload_is_contained(bad: dict[str, Any]) -> None:
    front = Front(metered("a"), names=["one"])
    front.metrics.observe(bad)
    front.metrics.observe({"one": {"n": 1}})
    assert front.value("scripted_things_total", "one") == 1


def test_another_versions_counts_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(metered("a"), names=["one"])
    front.metrics.observe({"kvobs": {"v": 2, "table": 1, "children": {"one": "m:C"}, "counts": [0, 1]}})
    assert "another version of kvobs" in caplog.text
    assert front.value("kvobs_lookups_total", "one", outcome="hit") is None


def test_an_engine_built_twice_in_one_process_starts_with_fresh_series() -> None:
    """Into the process's own registry, which refuses a name that it has."""
    for _ in range(2):
        family = Families({Counter: Counter}).make(Counter, "kvobs_twice_total", "Made twice.", ["x"])
        family.labels("1").inc()
        assert family.labels("1")._value.get() == 1
