"""Connectors of the stack's runs: steered, and with what no other one does, so that every metric has data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count, repeat
from typing import Any

import torch

from tests.engine.connectors_stats import CallStats
from tests.engine.connectors_steered import SteeredConnector, SteeredMetadata

EVERY = 40
"""One of so many calls for stats returns some that kvobs can't take: its fault is contained and counted."""


class BrokenStats(CallStats):
    """Stats that EngineCore can't hand to the API server."""

    def to_dict(self) -> dict[str, Any]:
        raise TypeError("these stats can't be converted")


class BufferedConnector(SteeredConnector):
    """Passes every block through a host buffer, with the operation that it is handed.

    Has an option that ``SteeredConnector`` lacks: ``bad_stats`` (true: it sometimes has stats that can't be converted).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._device: dict[str, Any] = {}
        self._host: dict[str, Any] = {}
        self._copy: Callable[..., None] | None = None
        is_bad = self._rank == 1 and self._kv_transfer_config.get_from_extra_config("bad_stats", False)
        self._asked = count(1) if is_bad else repeat(0)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._device, self._host = kv_caches, {layer: torch.zeros_like(cache) for layer, cache in kv_caches.items()}

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self._copy = copy_operation

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._pass(
            self._host, self._device, [block for load in self._orders().loads for block, _ in load.blocks], "h2d"
        )
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        self._pass(self._device, self._host, [block for block, _ in self._orders().saves], "d2h")

    def _pass(self, source: Mapping[str, Any], target: Mapping[str, Any], blocks: list[int], direction: str) -> None:
        if blocks and self._copy is not None:
            self._copy(source, target, blocks, blocks, direction)

    def get_kv_connector_stats(self) -> CallStats | None:
        return BrokenStats({"calls": {"bad": 1}}) if next(self._asked) % EVERY == 1 else None


class BestEffortConnector(SteeredConnector):
    """May fail: what it has saved need not be delivered."""

    requires_kv_delivery = False

    def _orders(self) -> SteeredMetadata:
        """Return no orders where it is out, and asked only what has become of what it began before."""
        return super()._orders() if self.has_connector_metadata() else SteeredMetadata()
