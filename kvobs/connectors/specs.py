"""A configured connector: its name, class and configuration, whether it can be isolated, and how much it stores."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from kvobs.log import once
from kvobs.schema import signals
from kvobs.state.events import Observer

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvobs.probe.recorder import Recorder
    from kvobs.state.cache_layout import CacheLayout

_INNER = "HiSparseConnector"  # a class that, like those that hand KV over, can't be isolated

WORDS = "__words__"
"""The attribute of what stands for a class that has been read, not imported: the texts in its source."""

NEVER_AGAIN = frozenset({"SimpleCPUOffloadConnector"})
"""Connector classes whose hits can't be trusted after a failure on a worker: a save that was never begun counts as done
as soon as a later one is."""

LOAD_ENDS_SAVE = frozenset({"FlexKVConnectorV1"})
"""Connector classes that promise to save a request that ends during their load of it, and then report the load only."""

STATED_BYTES: dict[str, dict[str, bool]] = {
    "HF3FSKVConnector": {"hf3fs_file_size": True},
    "OffloadingConnector": {"cpu_bytes_to_use": False},
    "SimpleCPUOffloadConnector": {"cpu_bytes_to_use_per_rank": True, "cpu_bytes_to_use": False},
}
"""Connector classes -> their options for the bytes that they store, the first that is set; whether on each rank."""

LMCACHE_CHUNK = 256
"""Tokens, unless its configuration has another number."""
_CHUNKED = frozenset({"OffloadingConnector", "LMCacheConnectorV1", "LMCacheMPConnector"})

STORES_MORE = ("secondary_tiers", "disk_path")  # options of theirs by which they store more than that


@dataclass(frozen=True, slots=True)
class ConnectorSpec:
    """One entry of ``connectors``: the class to build and its configuration."""

    index: int
    name: str
    connector_class: type[KVConnectorBase_V1]
    transfer_config: KVTransferConfig
    is_best_effort: bool = False

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """Return vLLM's configuration with this connector's own transfer configuration."""
        config = copy.copy(parent)
        config.kv_transfer_config = self.transfer_config
        return config


def between_engines(specs: Iterable[ConnectorSpec]) -> list[ConnectorSpec]:
    """Return the connectors that transfer KV from one engine to another."""
    return [spec for spec in specs if hands_over(spec.connector_class)]


def hands_over(connector_class: type) -> bool:
    """Return whether a class, or one that it builds, finds in a request's params or id which engine has its KV."""
    words = _words(connector_class)
    by_params = "do_remote_prefill" in words and any(word.startswith("remote_") for word in words)
    return by_params or any("___prefill_addr_" in word for word in words)  # P2pNcclConnector's


@cache
def _words(connector_class: type) -> frozenset[str]:
    """Return the texts in the code of a class, and of the classes and functions of its packages that this names."""
    if (stated := vars(connector_class).get(WORDS)) is not None:
        return frozenset(stated)
    bases = [base for base in connector_class.__mro__ if base.__name__ != "KVConnectorBase_V1"]
    packages = tuple(base.__module__.rpartition(".")[0] or base.__module__ for base in bases if base is not object)
    words, seen, todo = set[str](), set[int](), list[Any](bases)
    while todo:
        each = todo.pop()
        if id(each) in seen or not str(getattr(each, "__module__", "")).startswith(packages):
            continue
        seen.add(id(each))
        for method in vars(each).values() if isinstance(each, type) else [each]:
            with suppress(Exception):  # of an object that another package has among its methods
                texts, named = _content(method)
                words |= texts
                todo += named
    return frozenset(words)


def _content(method: Any) -> tuple[set[str], list[Any]]:
    """Return the texts in the code of a method, and the classes and functions that it names."""
    function = getattr(method, "__func__", getattr(method, "fget", method))
    known, parts = getattr(function, "__globals__", {}), [getattr(function, "__code__", None)]
    texts, named = set[str](), list[Any]()
    while parts:
        match parts.pop():
            case str(text):
                texts.add(text)
            case tuple() | frozenset() as constants:
                parts += constants
            case CodeType() as code:
                parts += code.co_consts
                named += [found for name in code.co_names if callable(found := known.get(name))]
    return texts, named


def is_kvobs(connector_class: type) -> bool:
    """Return whether a class is kvobs's own, or a subclass of it."""
    return "kvobs.connector" in [base.__module__ for base in connector_class.__mro__]


def why_not_isolated(spec: ConnectorSpec) -> str | None:
    """Return why this connector can't be isolated; None if it can."""
    if spec.transfer_config.kv_role == "kv_producer":
        return "has kv_role kv_producer: another engine waits for what it saves"
    if name_among(spec.connector_class, ("MultiConnector",)) is not None:
        return "is a MultiConnector: list its connectors next to the others, and name them instead"
    return what_it_is(spec.connector_class)


def what_it_is(connector_class: type) -> str | None:
    """Return what a class does that its engine can't do without, as a phrase; None if it only stores KV."""
    if name_among(connector_class, (_INNER,)):
        return "is a part of vLLM's KV cache manager"
    return "transfers KV to another engine" if hands_over(connector_class) else None


def load_ends_save(connector: object) -> bool:
    """Return whether a connector, or one within a router of vLLM, reports no save of what ended during its load."""
    within = getattr(connector, "_connectors", ())
    return name_among(type(connector), LOAD_ENDS_SAVE) is not None or any(map(load_ends_save, within))


def name_among(connector_class: type, names: Container[str]) -> str | None:
    """Return the first of these class names that a class or one of its bases has."""
    return next((base.__name__ for base in connector_class.__mro__ if base.__name__ in names), None)


def name_of_size(spec: ConnectorSpec) -> str:
    """Return the name under which a class states its size; empty if it states none."""
    return name_among(spec.connector_class, STATED_BYTES) or ""


def stated_bytes(name: str, options: Mapping[str, Any], ranks: int) -> int:
    """Return how many bytes all ranks of a connector's class in STATED_BYTES store, by its options."""
    key = next(filter(options.get, STATED_BYTES[name]), None)
    return int(options[key]) * (ranks if STATED_BYTES[name][key] else 1) if key else 0


def chunk_tokens(specs: Sequence[ConnectorSpec], block_size: int) -> dict[int, int]:
    """Return, by a connector's position, how many tokens it stores at once, where its options state it."""
    chunks = {}
    for spec in specs:
        options, name = spec.transfer_config.kv_connector_extra_config, name_among(spec.connector_class, _CHUNKED)
        stated: Any = None
        with suppress(TypeError, ValueError):  # the connector itself refuses such a value
            if name == "OffloadingConnector":
                stated = options.get("block_size") or int(options.get("blocks_per_chunk") or 0) * block_size
            elif name:  # a file of its configuration may state it: then it is not known here
                stated = options.get("lmcache.chunk_size") or os.environ.get("LMCACHE_CHUNK_SIZE")
                stated = stated or (0 if os.environ.get("LMCACHE_CONFIG_FILE") else LMCACHE_CHUNK)
            if stated and (tokens := int(stated)) > 0:
                chunks[spec.index] = tokens
    return chunks


def too_small(size: int, tokens: int, longest: int) -> str:
    """Return the warning that a connector's memory has no room for one long prompt."""
    return (
        f"its {size:,} bytes of memory (cpu_bytes_to_use) have room for {tokens:,} tokens, but a prompt may have "
        f"{longest:,} (max_model_len): the end of such a prompt evicts its start, so the prompt is never loaded"
    )


class StoreSizes(Observer):
    """Records how many tokens each connector stores, if its options state it and all tokens take the same.

    ``copies`` of the ``ranks`` have the same KV cache. It warns of memory without room for ``longest``
    tokens: the longest prompt, whatever follows it.
    """

    def __init__(
        self, recorder: Recorder, specs: Sequence[ConnectorSpec], ranks: int, copies: int, longest: int = 0
    ) -> None:
        self._recorder, self._specs, self._ranks, self._copies = recorder, specs, ranks, copies
        self._longest = longest

    def laid_out(self, layout: CacheLayout) -> None:
        for spec in self._specs if layout.bytes_per_token else ():
            size = self._stated_bytes(spec)
            tokens = int(size / layout.bytes_per_token)
            if size and not any(map(spec.transfer_config.kv_connector_extra_config.get, STORES_MORE)):
                self._recorder.set_gauge(spec.index, signals.slot(signals.CAPACITY_TOKENS), tokens)
            if (
                size
                and tokens < self._longest
                and any(key.startswith("cpu_") for key in STATED_BYTES[name_of_size(spec)])
            ):
                text = too_small(size, tokens, self._longest)
                once(f"small:{spec.name}", logging.WARNING, "connector %r: %s", spec.name, text)  # it is laid out twice

    def _stated_bytes(self, spec: ConnectorSpec) -> int:
        """Return how many bytes a connector stores in memory, or a folder, by its options; 0 if unknown."""
        options, name = spec.transfer_config.kv_connector_extra_config, name_of_size(spec)
        # With MLA it may store one copy.
        is_unclear = name == "OffloadingConnector" and self._copies == self._ranks > 1
        if not name or is_unclear or options.get("disk_path"):
            return 0
        return stated_bytes(name, options, self._ranks)
