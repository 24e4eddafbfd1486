"""What is read from vLLM's source is what vLLM says when it is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvobs.children.known import ELSEWHERE, LIBRARIES, REMOVED, RENAMED
from kvobs.cli.check import vllm_source
from kvobs.cli.check.building import RULES


def test_the_version_and_the_keys_are_vllms() -> None:
    assert vllm_source.vllm_version() == vllm.__version__
    assert vllm_source.transfer_keys() == {field.name for field in dataclasses.fields(KVTransferConfig)}


@pytest.mark.parametrize(
    ("path", "registry"),
    [
        (vllm_source.CONNECTORS, KVConnectorFactory._registry),
        (vllm_source.SPECS, OffloadingSpecFactory._registry),
        (vllm_source.TIERS, SecondaryTierFactory._registry),
        (vllm_source.POLICIES, CachePolicyFactory._registry),
    ],
)
def test_the_registered_names_are_vllms(path: str, registry: dict[str, object]) -> None:
    found = vllm_source.registered(path)
    assert found
    assert found <= registry.keys()
    assert all(name in found for name in registry if not name.startswith(("Scripted", "Kvobs")))


def test_the_tables_agree_with_vllms_names() -> None:
    """What is renamed, removed or another's is not vLLM's; what has a rule or needs a library is."""
    names = vllm_source.registered(vllm_source.CONNECTORS)
    assert names >= {*RENAMED.values(), *LIBRARIES, *RULES}
    assert names.isdisjoint({*RENAMED, *REMOVED, *ELSEWHERE})


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let an empty folder be the installed vLLM."""
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(vllm_source, "find_spec", lambda _: spec)
    caches = (vllm_source.folder, vllm_source.registered, vllm_source.transfer_keys)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("text", [None, "", "class KVTransferConfig(", "class Other: pass", "\0"])
def test_a_source_that_is_not_as_expected_has_no_names(text: str | None, another: Path) -> None:
    """Then vLLM's own keys and names are not known in advance, and nothing is wrong with them."""
    if text is not None:
        (another / "config").mkdir()
        (another / "config" / "kv_transfer.py").write_text(text)
    assert vllm_source.transfer_keys() == frozenset()
    assert vllm_source.registered(vllm_source.CONNECTORS) == frozenset()
