"""What the check says of a connector's own options is what vLLM's class does with them when it is built."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.cli.check import building
from kvobs.config import PATH
from tests.support.configurations import config_of, start

GIB = 1 << 30
TIERING = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": GIB}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no size": ("OffloadingConnector", {}),
    "size of 0": ("OffloadingConnector", {"cpu_bytes_to_use": 0}),
    "size of old": ("OffloadingConnector", {"num_cpu_blocks": 100}),
    "size with a unit": ("OffloadingConnector", {"cpu_bytes_to_use": "10GB"}),
    "unknown spec": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "spec_name": "TieredOffloadingSpec"}),
    "spec of a strange kind": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "spec_name": ["x"]}),
    "both chunk sizes": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "block_size": 16, "blocks_per_chunk": 1}),
    "no blocks in a chunk": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 0}),
    "unknown policy": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "eviction_policy": "lfu"}),
    "threshold as text": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "store_threshold": "two"}),
    "threshold of null": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "store_threshold": None}),
    "tiers as an object": ("OffloadingConnector", {**TIERING, "secondary_tiers": {"type": "fs"}}),
    "threshold with tiers": ("OffloadingConnector", {**TIERING, "store_threshold": 2}),
    "unknown backend": ("SimpleCPUOffloadConnector", {"kv_offload_backend": "ssd"}),
    "disk without a path": ("SimpleCPUOffloadConnector", {"kv_offload_backend": "disk"}),
    "size with a unit, simple": ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": "10GB"}),
    "no library": ("FlexKVConnectorV1", {}),
}
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "size": ("OffloadingConnector", {"cpu_bytes_to_use": GIB}),
    "size as text": ("OffloadingConnector", {"cpu_bytes_to_use": str(GIB)}),
    "policy": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "eviction_policy": "arc", "store_threshold": 2}),
    "chunks": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 4}),
    "ignored tiers": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "secondary_tiers": [{"type": "fs"}]}),
}


def entry_of(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", PATH: extra}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_called_a_mistake_ends_the_start(kind: str) -> None:
    entry = entry_of(*REFUSED[kind])
    mistakes, _ = building.findings(entry, "", has_vllm=True)
    assert mistakes
    assert all(finding.fix for finding in mistakes)
    # The caches of this engine are too small for a SimpleCPUOffloadConnector: an AssertionError, which proves nothing.
    with pytest.raises(ValueError if "Simple" in entry["kv_connector"] else Exception):
        start(config_of([entry]))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_what_vllm_builds_is_no_mistake(kind: str) -> None:
    entry = entry_of(*ACCEPTED[kind])
    assert building.findings(entry, "", has_vllm=True)[0] == []
    start(config_of([entry]))


def test_a_class_of_its_own_has_options_of_its_own() -> None:
    elsewhere = {**entry_of("OffloadingConnector", {}), "kv_connector_module_path": "somebody.elses"}
    assert building.findings(elsewhere, "", has_vllm=True) == ([], [])
    own_spec = entry_of("OffloadingConnector", {"spec_name": "Mine", "spec_module_path": "my.specs"})
    assert building.findings(own_spec, "", has_vllm=True) == ([], [])


def test_without_vllm_no_library_is_missed() -> None:
    """The engine may be elsewhere."""
    assert building.findings(entry_of("FlexKVConnectorV1", {}), "", has_vllm=False) == ([], [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "backpressure"]), inner),
    max_leaves=4,
)
KEYS = st.sampled_from([
    "cpu_bytes_to_use", "spec_name", "secondary_tiers", "eviction_policy", "store_threshold", "block_size",
    "kv_offload_backend", "disk_path", "backend", "http_port", "host_pool_gib", "backends", "num_threads",
])  # fmt: skip


@given(st.sampled_from(sorted(building.RULES)), st.dictionaries(KEYS, VALUES), st.booleans())
def test_whatever_is_there_has_an_answer(connector: str, extra: dict[str, Any], has_tiers: bool) -> None:
    own = {**extra, **(TIERING if has_tiers else {})}
    for findings in building.findings(entry_of(connector, own), "", has_vllm=False):
        assert all(finding.path.startswith(PATH) for finding in findings)
