"""vLLM's example connectors: nothing of them is stood in for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from tests.connectors.memory import BLOCK, LAYERS, chain
from tests.connectors.plug import Plug

FOLDERS: dict[str, Example] = {}


class Example(Plug):
    """Saves whole prompts into files, and loads them synchronously."""

    makes_sync_loads = True

    def config(self) -> dict[str, Any]:
        self.folder = Path(tempfile.mkdtemp(prefix="kvobs-example-"))
        FOLDERS[str(self.folder)] = self
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }

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
                    FOLDERS[child._storage_path].check_store(held == values[: len(held)], f"{len(held)} tokens")

        saved.is_ours = True  # type: ignore[attr-defined]
        patch.setattr(ExampleConnector, "save_kv_layer", saved)

    def leftovers(self) -> list[str]:
        return [f"load of {request}" for request in self.child._requests_need_load]


class DecodeBench(Plug):
    """Fills the KV of every prompt with made-up values: what is computed with it is wrong on purpose."""

    makes_sync_loads = True
    is_a_lie = True

    def config(self) -> dict[str, Any]:
        return {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}

    def leftovers(self) -> list[str]:
        scheduler = self.child.connector_scheduler
        return [f"{book}: {r}" for book in ("_filled_requests", "_pending_fills") for r in getattr(scheduler, book)]
