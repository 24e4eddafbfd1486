"""What stores report about themselves stands on the panels next to KV cache events, and is missed by no one."""

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards import frame, stores
from dashboards.__main__ import FILES
from dashboards.panels import Query
from tests.support.boards import panels
from tests.support.promtool import answers

HELD, EVICTED = stores.held(), stores.evicted()
EVERY = {query.legend: query for query in (*HELD, *EVICTED)}
OF_CPU = {'kvobs_connector_info{connector="cpu",index="0"}': "1x20"}
RISING = "0+600x20"  # a minute: ten per second
# By the legend: the series of the one store, and what the panel has of it.
STORES: dict[str, tuple[dict[str, str], dict[str, float]]] = {
    "{{connector}} in transfers (OffloadingConnector)": (
        {'vllm:kv_offload_cpu_cache_usage_perc{connector="cpu"}': "0.5x20"}, {"cpu": 0.5}),
    "{{connector}} blocks in transfers (SimpleCPUOffloadConnector)": (
        {'vllm:simple_kv_offload_used_blocks{connector="cpu"}': "7x20"}, {"cpu": 7}),
    "LMCache's memory": ({f'lmcache:local_cache_usage{{worker_id="{i}"}}': "5x20" for i in (0, 1)}, {"": 10}),
    "LMCache's disk": ({"lmcache:local_storage_usage{}": "5x20"}, {"": 5}),
    "LMCache's pinned chunks": ({"lmcache:pinned_memory_objs_count{}": "5x20"}, {"": 5}),
    "LMCache server's memory": ({"lmcache_mp_l1_memory_usage_bytes{}": "5x20"}, {"": 5}),
    "LMCache server's {{l2_name}}": (
        {f'lmcache_mp_l2_usage_bytes{{l2_name="{name}"}}': "5x20" for name in ("fs", "redis")}, {"fs": 5, "redis": 5}),
    "Mooncake's memory": ({"master_allocated_bytes{}": "5x20", "master_total_capacity_bytes{}": "10x20"}, {"": 0.5}),
    "Mooncake's files": (
        {"master_allocated_file_size_bytes{}": "5x20", "master_total_file_capacity_bytes{}": "10x20"}, {"": 0.5}),
    "{{connector}} saves/s without room (OffloadingConnector)": (
        {'vllm:kv_offload_allocation_failure_total{connector="cpu"}': RISING}, {"cpu": 10}),
    "{{connector}} blocks/s without room (SimpleCPUOffloadConnector)": (
        {f'vllm:simple_kv_offload_save_outcomes_total{{connector="cpu",outcome="{outcome}"}}': RISING
         for outcome in ("stored", "dropped_cpu_full")}, {"cpu": 10}),
    "LMCache's evicted chunks/s": ({"lmcache:local_cpu_evict_keys_count_total{}": RISING}, {"": 10}),
    "LMCache server's evicted chunks/s": ({"lmcache_mp_l1_evicted_chunks_total{}": RISING}, {"": 10}),
    "LMCache server's evicted chunks/s (L2)": ({"lmcache_mp_l2_evicted_objects_chunks_total{}": RISING}, {"": 10}),
    "Mooncake's evicted bytes": ({"master_evicted_size_bytes{}": RISING}, {"": 10}),
}  # fmt: skip


def expressions(title: str) -> dict[str, str]:
    board: dict[str, Any] = json.loads(FILES[f"boards/{frame.CONNECTOR}.json"]())
    (panel,) = [panel for panel in panels(board) if panel["title"] == title]
    return {target["legendFormat"]: target["expr"] for target in panel["targets"]}


@pytest.mark.parametrize(
    ("title", "queries", "of_events"),
    [
        ("Tokens in each store; its size (dashed)", HELD, ["{{connector}} {{medium}}", "{{connector}} size"]),
        (
            "Tokens saved and evicted (tokens/s)",
            EVICTED,
            [f"{{{{connector}}}} {{{{medium}}}} {what}" for what in ("saved", "evicted", "evicted, then asked for")],
        ),
    ],
)
def test_each_store_is_a_query_of_the_panel_about_events(
    title: str, queries: tuple[Query, ...], of_events: list[str]
) -> None:
    """A query that finds nothing takes no other series with it."""
    assert list(expressions(title)) == [*of_events, *(query.legend for query in queries)]
    for legend in of_events:
        assert not any(name in expressions(title)[legend] for name in ("lmcache", "master_", "vllm"))


def test_every_store_has_a_case() -> None:
    assert STORES.keys() == EVERY.keys()
    assert len(EVERY) == len(HELD) + len(EVICTED)


@pytest.mark.tools
@pytest.mark.parametrize("legend", STORES)
def test_a_store_that_reports_has_a_series_and_another_has_none(legend: str, tmp_path: Path) -> None:
    series, found = STORES[legend]
    label = "l2_name" if "l2_name" in legend else "connector"
    assert answers(tmp_path, OF_CPU | series, EVERY[legend].expr, label=label) == found
    assert answers(tmp_path, OF_CPU, EVERY[legend].expr, label=label) == {}
