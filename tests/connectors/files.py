"""vLLM's example connectors: nothing of them is stood in for."""

from __future__ import annotations

import tempfile
from functools import cached_property
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.connectors.memory import BLOCK, LAYERS, chain
from tests.connectors.plug import Plug


class Example(Plug):
    """Saves whole prompts into files, and loads them synchronously."""

    connector = "ExampleConnector"

    @cached_property
    def tag(self) -> str:
        return tempfile.mkdtemp(prefix="kvobs-example-")

    def options(self) -> dict[str, Any]:
        return {"shared_storage_path": self.tag}

    def install(self, patch: Any) -> None:
        save = ExampleConnector.save_kv_layer
        if hasattr(save, "is_ours"):
            return

        def saved(child: Any, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
            save(child, layer_name, kv_layer, attn_metadata, **kwargs)
            for request in child._get_connector_metadata().requests:
                if request.is_store and layer_name == LAYERS[0]:
                    slots, values = request.slot_mapping, chain(request.token_ids.tolist())
                    held = kv_layer[slots // BLOCK, 0, slots % BLOCK, 0].tolist()
                    Example.by_tag[child._storage_path].check_store(held == values[: len(held)], f"{len(held)} tokens")

        saved.is_ours = True  # type: ignore[attr-defined]
        patch.setattr(ExampleConnector, "save_kv_layer", saved)

    def leftovers(self) -> list[str]:
        return [f"load of {request}" for request in self.child._requests_need_load]


class DecodeBench(Plug):
    """Fills the KV of every prompt with made-up values: what is computed with it is wrong on purpose."""

    connector = "DecodeBenchConnector"
    is_a_lie = True

    def leftovers(self) -> list[str]:
        scheduler = self.child.connector_scheduler
        return [f"{book}: {r}" for book in ("_filled_requests", "_pending_fills") for r in getattr(scheduler, book)]
