"""Which of vLLM's own tests are run, which of them kvobs does not pass, and why it is right not to."""

UNIT = "v1/kv_connector/unit"

IN_PLACE: tuple[str, ...] = (
    f"{UNIT}/test_multi_connector.py",
    f"{UNIT}/test_output_aggregator.py",
    f"{UNIT}/test_transfer_topology_sharded.py",
    f"{UNIT}/test_tp_mapping.py",
    f"{UNIT}/test_kv_connector_lifecycle.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_handshake_pp_aggregation.py",
    f"{UNIT}/test_hma_auto_config.py",
    f"{UNIT}/test_remote_decode_lifecycle.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
    f"{UNIT}/test_scheduler_kv_connector_override.py",
    f"{UNIT}/test_decode_bench_connector.py",
    f"{UNIT}/test_config.py",
    f"{UNIT}/test_hisparse_connector.py",
    "v1/executor/test_executor.py",
)
"""Files, below vLLM's folder ``tests``, that are run with kvobs's classes in the place of vLLM's (``in_place.py``).

Those that a version lacks are left out.
"""

AROUND: tuple[str, ...] = (
    f"{UNIT}/test_kv_load_failure_recovery.py",
    f"{UNIT}/test_invalid_blocks_correctness.py",
    f"{UNIT}/test_cache_pollution_prevention.py",
    f"{UNIT}/test_error_propagation.py",
    f"{UNIT}/test_kv_connector_lifecycle.py",
    f"{UNIT}/test_remote_decode_lifecycle.py",
    f"{UNIT}/test_remote_prefill_lifecycle.py",
)
"""Files that are run with a router, vLLM's or kvobs's, around the one connector of each scheduler (``around.py``)."""

_MULTI = f"{UNIT}/test_multi_connector.py"
_SWAPPED = (
    "the test puts other children into the private list of a built router; kvobs binds its children's recorded hooks "
    "when it builds them, and vLLM never replaces one. The rule itself: "
    "tests/unit/routing/test_routing.py, and R7 of the design"
)

EXPECTED_IN_PLACE: dict[str, str] = {
    f"{_MULTI}::test_multi_connector_forwards_mem_pool_context": _SWAPPED,
    f"{_MULTI}::test_multi_connector_rejects_multiple_mem_pool_contexts": _SWAPPED,
    f"{_MULTI}::TestMultiConnectorStats::test_build_kv_connector_stats_raises_error_for_unknown_connector": (
        "an unregistered child's stats end the API server in vLLM (issue 57683); kvobs keeps their raw numbers"
    ),
    f"{_MULTI}::test_multi_connector_overrides_all_base_methods": (
        "the test reads the class body; kvobs inherits vLLM's class, which overrides them all, and puts its own hooks "
        "on the instance. That every hook is routed: tests/unit/vllm_api/test_hooks.py and tests/contract"
    ),
}
"""Test -> why kvobs's answer is another one; a name without its parameters stands for all of them."""

EXPECTED_AROUND: dict[str, str] = {
    f"{UNIT}/test_remote_prefill_lifecycle.py::test_deferred_lookup_does_not_block_parked_load": (
        "the test patches a hook of a connector that was built before; kvobs binds a hook once, as its recorded call"
    ),
}
"""The same for the connectors that have a router around them."""
