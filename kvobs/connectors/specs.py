"""A configured connector: its name, class and configuration, whether it can be isolated, and how much it stores."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvobs.schema import signals
from kvobs.state.events import Observer

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvobs.probe.recorder import Recorder
    from kvobs.state.cache_layout import CacheLayout

BETWEEN_ENGINES = ("NixlBaseConnector", "NixlConnector", "MooncakeConnector", "P2pNcclConnector", "MoRIIOConnector")
HAND_OFF = dict.fromkeys(BETWEEN_ENGINES, "hands KV over to another engine")
HAND_OFF["HiSparseConnector"] = "is a part of vLLM's KV cache manager"
"""Connector classes (and their subclasses) that can't be isolated, with the reason."""

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

STORES_MORE = ("secondary_tiers", "disk_path")  # options of theirs by which they store more than that


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One entry of ``connectors``: the class to build and its configuration."""

    index: int
    name: str
    connector_class: type[KVConnectorBase_V1]
    transfer_config: KVTransferConfig
    is_isolated: bool = False

    def vllm_config(self, parent: VllmConfig) -> VllmConfig:
        """Return vLLM's configuration with this child's own transfer configuration."""
        config = copy.copy(parent)
        config.kv_transfer_config = self.transfer_config
        return config


def between_engines(specs: Iterable[ChildSpec]) -> list[ChildSpec]:
    """Return those of the connectors that hand KV from one engine to another."""
    return [spec for spec in specs if name_among(spec.connector_class, BETWEEN_ENGINES)]


def is_kvobs(connector_class: type) -> bool:
    """Return whether a class is kvobs's own, or a subclass of it."""
    return "kvobs.connector" in [base.__module__ for base in connector_class.__mro__]


def why_not_isolated(spec: ChildSpec) -> str | None:
    """Return why this child can't be isolated; None if it can."""
    if spec.transfer_config.kv_role == "kv_producer":
        return "has kv_role kv_producer: another engine waits for what it saves"
    if name_among(spec.connector_class, ("MultiConnector",)) is not None:
        return "is a MultiConnector: list its connectors beside the others, and name those"
    name = name_among(spec.connector_class, HAND_OFF)
    return None if name is None else HAND_OFF[name]


def load_ends_save(connector: object) -> bool:
    """Return whether a connector, or one within a router of vLLM, reports no save of what ended during its load."""
    within = getattr(connector, "_connectors", ())
    return name_among(type(connector), LOAD_ENDS_SAVE) is not None or any(map(load_ends_save, within))


def name_among(connector_class: type, names: Container[str]) -> str | None:
    """Return the first of these class names that a class or one of its bases has."""
    return next((base.__name__ for base in connector_class.__mro__ if base.__name__ in names), None)


class StoreSizes(Observer):
    """Records how many tokens each connector stores, if its options state it and all tokens take the same.

    ``copies`` of the ``ranks`` have the same KV cache.
    """

    def __init__(self, recorder: Recorder, specs: Sequence[ChildSpec], ranks: int, copies: int) -> None:
        self._recorder, self._specs, self._ranks, self._copies = recorder, specs, ranks, copies

    def laid_out(self, layout: CacheLayout) -> None:
        for spec in self._specs if layout.bytes_per_token else ():
            if size := self._stated_bytes(spec):
                tokens = int(size / layout.bytes_per_token)
                self._recorder.set_gauge(spec.index, signals.slot(signals.CAPACITY_TOKENS), tokens)

    def _stated_bytes(self, spec: ChildSpec) -> int:
        """Return how many bytes a connector stores by its options; 0 if unknown."""
        options, name = spec.transfer_config.kv_connector_extra_config, name_among(spec.connector_class, STATED_BYTES)
        # With MLA it may store one copy.
        is_unclear = name == "OffloadingConnector" and self._copies == self._ranks > 1
        if name is None or is_unclear or any(map(options.get, STORES_MORE)):
            return 0
        key = next(filter(options.get, STATED_BYTES[name]), None)
        return int(options[key]) * (self._ranks if STATED_BYTES[name][key] else 1) if key else 0
