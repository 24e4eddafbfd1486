"""Cures are of the connector's own project: no stranger's package, and no name that only shares the word Connector."""

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import distributed
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs.connectors import known
from kvobs.connectors.known import LIBRARIES, cure, is_installed, nearest
from kvobs.connectors.specs import NEVER_AGAIN, hands_over
from kvobs.connectors.sync_loads import ASYNC_ONLY

NAMES = (
    "ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1", "LMCacheMPConnector",
    "MooncakeConnector", "MooncakeStoreConnector", "MultiConnector", "NixlConnector", "NixlPullConnector",
    "OffloadingConnector", "SimpleCPUOffloadConnector"
)  # fmt: skip

NIXL = ["nixl", "NIXL", "nixlconnector", "NixlConector", "NixlConnectorV1"]
UNKNOWN = ["", *["x", "Connector", "FooConnector", "RedisConnector", "SimpleConnector", "SharedStorageConnector"]]
OTHERS = {
    "MooncakeStore": "MooncakeStoreConnector",
    "lmcache": "LMCacheConnectorV1",
    "FlexKV": "FlexKVConnectorV1",
    "OffloadConnector": "OffloadingConnector",
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [*((name, "NixlConnector") for name in NIXL), *OTHERS.items(), *((name, None) for name in UNKNOWN)],
)
def test_a_name_is_taken_for_the_one_that_was_meant(name: str, meant: str | None) -> None:
    assert nearest(name, NAMES) == meant
    assert nearest("abc", ("AbcLongerConnector", "AbcZ")) == "AbcZ", "the shortest of those that begin so"


def test_a_removed_connector_is_replaced_only_by_an_existing_one() -> None:
    removed = ("it was removed from vLLM", "use 'NixlConnector' or 'MooncakeConnector', whose options differ")
    assert cure("P2pNcclConnector", NAMES) == removed
    assert cure("SharedStorageConnector", NAMES)[1] == "use 'ExampleConnector'"
    assert "ExampleConnector" not in cure("SharedStorageConnector", ("NixlConnector",))[1]


def test_known_names_are_those_of_vllms_connectors() -> None:
    assert {*LIBRARIES, *ASYNC_ONLY, *NEVER_AGAIN} <= {*KVConnectorFactory._registry}


def test_vllm_imports_the_libraries_that_its_connectors_need() -> None:
    texts = "\n".join(path.read_text() for path in Path(next(iter(distributed.__path__))).rglob("*.py"))
    modules = {module for needs in LIBRARIES.values() for need in needs for module in need.modules}
    assert not [name for name in modules if not re.search(rf'(import|from) {re.escape(name)}\b|"{name}"', texts)]


def test_no_strangers_package_is_to_be_installed() -> None:
    """PyPI's `mooncake` and `mori` are others'."""
    for needs in LIBRARIES.values():
        for need in needs:
            package = need.install.partition("pip install ")[2].partition(" ")[0]
            assert package in ("", "nixl", "lmcache", "mooncake-transfer-engine", "amd-mori", "msgpack")


def test_a_library_that_is_installed_as_editable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a finder, and no folder on the path."""
    spec = ModuleSpec("flexkv", None)
    finder = SimpleNamespace(find_spec=lambda name, *_: spec if name == "flexkv" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert known.missing_libraries("FlexKVConnectorV1") == []


def test_a_strangers_package_is_not_taken_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not imported to find that out."""
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("mooncake")
    assert [need.modules for need in known.missing_libraries("MooncakeConnector")] == [("mooncake.engine",)]
    (tmp_path / "mooncake" / "engine.py").write_text("raise SystemExit('its own')")
    assert known.missing_libraries("MooncakeConnector") == []
    assert "mooncake" not in sys.modules


@pytest.mark.parametrize(("name", "is_between"), [
    ("NixlConnector", True), ("NixlPushConnector", True), ("MooncakeConnector", True), ("OffloadingConnector", False),
    ("MooncakeStoreConnector", False), ("SimpleCPUOffloadConnector", False), ("ExampleConnector", False),
])  # fmt: skip
def test_a_class_that_reads_which_engine_has_kv_hands_it_over(name: str, is_between: bool) -> None:
    assert hands_over(KVConnectorFactory.get_connector_class_by_name(name)) is is_between


class Scheduler:
    """Stands for the inner class of another package's connector."""

    def lookup(self, params: dict[str, Any]) -> Any:
        return [params[key] for key in ("remote_host", "remote_port")] if params.get("do_remote_prefill") else None


class Odd:
    """An object that breaks where it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Outer:
    """Builds it."""

    odd = Odd()

    def __init__(self) -> None:
        self.scheduler = Scheduler()


class Skips:
    """Leaves alone what others load."""

    def lookup(self, params: dict[str, Any]) -> bool:
        return not params.get("do_remote_prefill")


class ById:
    """Finds the other engine in the request's id, as P2pNcclConnector of older vLLMs."""

    def address(self, request_id: str) -> Any:
        return re.search(r"___prefill_addr_(.*):(\d+)___", request_id)


def test_a_class_of_another_package_is_known_by_its_code() -> None:
    assert all(map(hands_over, (Scheduler, Outer, ById)))
    assert not hands_over(Skips)
