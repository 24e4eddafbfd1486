"""List connectors by name: vLLM's renamed and removed ones, connectors of other packages, and their libraries.

This needs no vLLM. A name is looked up here only where vLLM itself does not have it: older versions have some.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import NamedTuple

ROUTER = "MultiConnector"
OURS = ("kvobs", "kvobs.connector")
"""Name of the replaced vLLM class; modules that hold kvobs's."""

PD_ROUTER, KVBM = "PdConnector", "kvbm.vllm_integration.connector"
"""NVIDIA Dynamo's subclass of vLLM's router; its module."""

RENAMED = {"SharedStorageConnector": "ExampleConnector", "LMCacheConnector": "LMCacheConnectorV1"}
"""Names that earlier vLLMs had -> the name of the same connector today."""

REMOVED = {
    "P2pNcclConnector": "use 'NixlConnector' or 'MooncakeConnector', whose options differ",
    "PyNcclConnector": "use 'NixlConnector', whose options differ",
}
"""Connectors that vLLM removed -> what to do."""

ELSEWHERE = {
    **dict.fromkeys(
        (
            "AscendMultiConnector",
            "AscendStoreConnector",
            "LMCacheAscendConnector",
            "MooncakeConnectorStoreV1",
            "MooncakeConnectorV1",
            "MooncakeHybridConnector",
            "MooncakeLayerwiseConnector",
        ),
        "install vllm-ascend, vLLM's plugin for Ascend NPUs, in this environment, or check on the machine that has it",
    ),
    "LMCacheConnectorV1Dynamic": "set kv_connector_module_path to 'lmcache.integration.vllm.lmcache_connector_v1'",
    **dict.fromkeys(("DynamoConnector", PD_ROUTER), f"set kv_connector_module_path to {KVBM!r}"),
    "KvobsConnector": "use 'MultiConnector' with kv_connector_module_path 'kvobs'",
}
"""Connectors that are not vLLM's own -> what to do."""


class Library(NamedTuple):
    """A library that a connector of vLLM needs."""

    modules: tuple[str, ...]  # Python modules; one of them must be installed
    install: str  # how to get it; only packages of the library's own project


_NIXL = Library(("nixl", "nixl_rocm"), "install it: pip install nixl")
_LMCACHE = Library(("lmcache",), "install it: pip install lmcache")
_MOONCAKE = "install it: pip install mooncake-transfer-engine ('mooncake' is another project's package)"

LIBRARIES: dict[str, tuple[Library, ...]] = {
    "NixlConnector": (_NIXL,),
    "NixlPullConnector": (_NIXL,),
    "NixlPushConnector": (_NIXL,),
    "LMCacheConnectorV1": (_LMCACHE,),
    "LMCacheMPConnector": (_LMCACHE,),
    "MooncakeConnector": (Library(("mooncake.engine",), _MOONCAKE),),
    "MooncakeStoreConnector": (Library(("mooncake.store",), _MOONCAKE),),
    "FlexKVConnectorV1": (Library(("flexkv",), "build it as described at https://github.com/taco-project/FlexKV"),),
    "HF3FSKVConnector": (Library(("hf3fs_fuse",), "install 3FS's Python client: https://github.com/deepseek-ai/3FS"),),
    "MoRIIOConnector": (
        Library(("mori",), "install it: pip install amd-mori"),
        Library(("msgpack",), "install it: pip install msgpack"),
    ),
}
"""vLLM's connectors -> all that each one needs. Some import it when they are built, or only on a worker."""


def missing_libraries(kv_connector: str) -> list[Library]:
    """Return the libraries of a connector that are missing in this environment."""
    return [need for need in LIBRARIES.get(kv_connector, ()) if not any(map(is_installed, need.modules))]


def is_installed(module: str) -> bool:
    """Return whether a module can be found."""
    return spec_of(module) is not None


def spec_of(module: str) -> ModuleSpec | None:
    """Find a module without importing its package, which may be a stranger's."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    for name in inner:
        spec = PathFinder.find_spec(f"{spec.name}.{name}", spec.submodule_search_locations or ()) if spec else None
    return spec


def cure(name: str, registered: Collection[str]) -> tuple[str, str]:
    """Explain why this vLLM does not have a connector, as a phrase or empty, and return the cure."""
    if name in ELSEWHERE:
        return "", ELSEWHERE[name]
    if name in RENAMED and RENAMED[name] in registered:
        return f"it is now called {RENAMED[name]!r}", f"use {RENAMED[name]!r}"
    if name in REMOVED:
        return "it was removed from vLLM", REMOVED[name]
    if near := nearest(name, registered):
        return "", f"use {near!r}"
    return "", "use one of them, or set kv_connector_module_path to the module of its class"


def is_misspelt(name: str, registered: Collection[str]) -> bool:
    """Return whether a name is nearly one that this vLLM has, or never was one: another vLLM does not have it."""
    others = {*ELSEWHERE, *RENAMED, *REMOVED}
    return name == "KvobsConnector" or (name not in others and nearest(name, registered) is not None)


_SHORTEST = 3  # letters that can be taken for a name


def nearest(name: str, registered: Collection[str]) -> str | None:
    """Return the registered name that was probably meant: one that begins so, or is almost the same."""
    names = {known.lower(): known for known in sorted(registered, key=len)}
    begun = [known for known in names if len(name) >= _SHORTEST and known.startswith(name.lower())]
    meant = begun or difflib.get_close_matches(name.lower(), names, 1, cutoff=0.9)
    return names[meant[0]] if meant else None
