"""What is read from vLLM's source is what vLLM says when it is imported."""

import dataclasses
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvobs.cli.check import vllm_source
from kvobs.connectors.known import ELSEWHERE, LIBRARIES, REMOVED, RENAMED
from kvobs.connectors.sync_loads import ASYNC_ONLY


def test_the_version_and_the_names_are_vllms() -> None:
    assert vllm_source.vllm_version() == vllm.__version__
    assert vllm_source.transfer_keys() == {field.name for field in dataclasses.fields(KVTransferConfig)}
    for path, factory in (("", OffloadingSpecFactory), ("tiering/", SecondaryTierFactory)):
        assert vllm_source.registered(f"v1/kv_offload/{path}factory.py").keys() == factory._registry.keys()


def test_the_tables_agree_with_vllms_names() -> None:
    """A connector that was renamed or removed, or belongs to another package, is not vLLM's; all others are."""
    names = KVConnectorFactory._registry.keys()
    assert names >= {*RENAMED.values(), *LIBRARIES, *ASYNC_ONLY}
    assert names.isdisjoint({*RENAMED, *REMOVED, *ELSEWHERE} - {"KvobsConnector"})


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let an empty folder be the installed vLLM."""
    spec = ModuleSpec("vllm", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(vllm_source, "find_spec", lambda _: spec)
    vllm_source.folder.cache_clear()
    yield tmp_path
    vllm_source.folder.cache_clear()


@pytest.mark.parametrize("text", [None, "", "class KVTransferConfig(", "class Other: pass", "\0"])
def test_a_source_that_is_not_as_expected_has_no_names(text: str | None, another: Path) -> None:
    """Then vLLM's own keys and names are not known in advance, and nothing is wrong with them."""
    if text is not None:
        (another / "config").mkdir()
        (another / "config" / "kv_transfer.py").write_text(text)
    assert vllm_source.transfer_keys() == frozenset(vllm_source.registered()) == frozenset()
