"""Ask what stores report about themselves, in their own metrics: how much they hold, what they evict and refuse.

KV cache events have tokens, but not every connector publishes its evictions as events (LMCache, Mooncake). Each metric
here was read in the source of the version that stands with it. Each is a separate query: where a site has no such
store it finds nothing, and the panel's other series stay.
"""

from __future__ import annotations

from dashboards import looks
from dashboards.panels import Query
from dashboards.promql import ratio
from dashboards.questions import SELECTION, VLLM


def _sum(name: str, *by: str) -> str:
    """Return a gauge of a store's package: it has no labels of an engine, and a master serves many."""
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} ({_series(name)})"


def _rate(name: str) -> str:
    return f"sum (rate({_series(name)}[{SELECTION.window}]))"


def _series(name: str) -> str:
    return f'{{__name__=~"{name}",cluster=~"$cluster"}}'


def held() -> tuple[Query, ...]:
    """Return what stores hold, and what transfers keep in them."""
    return (
        # vllm 0.32.0, v1/kv_offload/cpu/spec.py: a share of the memory, pinned by transfers; a full store may have 0.
        Query(
            VLLM.vllm_gauge("kv_offload_cpu_cache_usage_perc", "connector", how="max"),
            "{{connector}} in transfers (OffloadingConnector)",
            looks.VLLM,
            unit="percentunit",
        ),
        # vllm 0.32.0, v1/simple_kv_offload/metrics.py: the same, in blocks.
        Query(
            VLLM.vllm_gauge("simple_kv_offload_used_blocks", "connector"),
            "{{connector}} blocks in transfers (SimpleCPUOffloadConnector)",
            looks.VLLM,
            unit="none",
        ),
        # lmcache 0.5.6, lmcache/observability.py.
        Query(_sum("lmcache[:_]local_cache_usage"), "LMCache's memory", unit="bytes"),
        Query(_sum("lmcache[:_]local_storage_usage"), "LMCache's disk", unit="bytes"),
        Query(_sum("lmcache[:_]pinned_memory_objs_count"), "LMCache's pinned chunks", unit="none"),
        # lmcache 0.5.6, lmcache/v1/distributed/l1_manager.py and storage_manager.py: of a server for several engines.
        Query(_sum("lmcache_mp_l1_memory_usage_bytes"), "LMCache server's memory", unit="bytes"),
        Query(_sum("lmcache_mp_l2_usage_bytes", "l2_name"), "LMCache server's {{l2_name}}", unit="bytes"),
        # Mooncake 0110d6b6, mooncake-store/src/master_metric_manager.cpp.
        Query(
            ratio(_sum("master_allocated_bytes"), _sum("master_total_capacity_bytes")),
            "Mooncake's memory",
            unit="percentunit",
        ),
        Query(
            ratio(_sum("master_allocated_file_size_bytes"), _sum("master_total_file_capacity_bytes")),
            "Mooncake's files",
            unit="percentunit",
        ),
    )


def evicted() -> tuple[Query, ...]:
    """Return what stores evict per second, and the saves for which they have no room."""
    return (
        # vllm 0.32.0, v1/.../offloading/metrics.py and v1/simple_kv_offload/metrics.py.
        Query(
            VLLM.vllm_rate("kv_offload_allocation_failure_total", "connector"),
            "{{connector}} saves/s without room (OffloadingConnector)",
            looks.BAD,
            unit="none",
        ),
        Query(
            VLLM.vllm_rate("simple_kv_offload_save_outcomes_total", "connector", matching='outcome="dropped_cpu_full"'),
            "{{connector}} blocks/s without room (SimpleCPUOffloadConnector)",
            looks.BAD,
            unit="none",
        ),
        # lmcache 0.5.6, lmcache/observability.py.
        Query(_rate("lmcache[:_]local_cpu_evict_keys_count_total"), "LMCache's evicted chunks/s", unit="none"),
        # lmcache 0.5.6, lmcache/v1/mp_observability/subscribers/metrics/l1.py and l2.py.
        Query(_rate("lmcache_mp_l1_evicted_chunks_total"), "LMCache server's evicted chunks/s", unit="none"),
        Query(
            _rate("lmcache_mp_l2_evicted_objects_chunks_total"), "LMCache server's evicted chunks/s (L2)", unit="none"
        ),
        # Mooncake 0110d6b6, mooncake-store/src/master_metric_manager.cpp: a counter, without the usual ending.
        Query(_rate("master_evicted_size_bytes"), "Mooncake's evicted bytes", unit="Bps"),
    )
