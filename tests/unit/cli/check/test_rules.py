"""The rules for a connector's own options are right: vLLM refuses or ignores what they name, and nothing else."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from kvobs.cli.check import rules
from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding, Level
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
    "tier of a strange kind": (
        "OffloadingConnector",
        {"cpu_bytes_to_use": GIB, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": ["fs"]}]},
    ),
    "threshold as text": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "store_threshold": "two"}),
    "size with a unit, simple": ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": "10GB"}),
}
ACCEPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "size": ("OffloadingConnector", {"cpu_bytes_to_use": GIB}),
    "size as text": ("OffloadingConnector", {"cpu_bytes_to_use": str(GIB)}),
    "policy": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "eviction_policy": "arc", "store_threshold": 2}),
    "chunks": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "blocks_per_chunk": 4, "block_size": None}),
    "ignored tiers": ("OffloadingConnector", {"cpu_bytes_to_use": GIB, "secondary_tiers": [{"type": "fs"}]}),
}


def entry_of(connector: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", PATH: extra}


def findings(entry: dict[str, Any], level: Level) -> list[Finding]:
    found = rules.check_entries(config_of([entry]), is_stock=False)
    return [finding for finding in found if finding.kind.level is level]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_mistake_ends_the_start(kind: str) -> None:
    entry = entry_of(*REFUSED[kind])
    mistakes = findings(entry, Level.MISTAKE)
    assert mistakes
    assert all(finding.fix for finding in mistakes)
    # The caches of this engine are too small for a SimpleCPUOffloadConnector: an AssertionError, which proves nothing.
    with pytest.raises(ValueError if "Simple" in entry["kv_connector"] else Exception):
        start(config_of([entry]))


@pytest.mark.parametrize("kind", ACCEPTED)
def test_options_that_vllm_accepts_are_no_mistake(kind: str) -> None:
    entry = entry_of(*ACCEPTED[kind])
    assert findings(entry, Level.MISTAKE) == []
    start(config_of([entry]))


def test_a_disk_path_without_the_backend_is_a_warning() -> None:
    backend = {"kv_offload_backend": "disk"}
    paths = [
        [warning.path for warning in findings(entry_of("SimpleCPUOffloadConnector", extra), Level.WARNING)]
        for extra in ({"disk_path": "/mnt"}, {"disk_path": "/mnt"} | backend, {})
    ]
    assert paths == [[f"{PATH}.connectors[0].{PATH}.disk_path"], [], []]


def test_class_from_elsewhere_has_other_options() -> None:
    elsewhere = {**entry_of("OffloadingConnector", {}), "kv_connector_module_path": "somebody.elses"}
    spec = entry_of("OffloadingConnector", {"spec_name": "Mine", "spec_module_path": "my.specs"})
    for entry in (entry_of("FlexKVConnectorV1", {}), elsewhere, spec):
        assert [*rules.check_entries(config_of([entry]), is_stock=False)] == []


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "x"]), inner),
    max_leaves=4,
)
CONNECTORS = [
    "OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector", "MooncakeStoreConnector", "NixlConnector",
]  # fmt: skip
KEYS = st.sampled_from([
    "cpu_bytes_to_use", "spec_name", "secondary_tiers", "store_threshold", "block_size", "kv_offload_backend",
    "disk_path", "backends",
])  # fmt: skip


@given(st.sampled_from(CONNECTORS), st.dictionaries(KEYS, VALUES), st.booleans())
@example("OffloadingConnector", {"secondary_tiers": [{"type": []}]}, True)
def test_any_value_is_judged(connector: str, extra: dict[str, Any], has_tiers: bool) -> None:
    options = {**extra, **(TIERING if has_tiers else {})}
    found = rules.check_entries(config_of([entry_of(connector, options)]), is_stock=False)
    assert all(finding.path.startswith(f"{PATH}.connectors[0].{PATH}.") for finding in found)
