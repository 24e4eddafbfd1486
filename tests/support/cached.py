"""An engine whose ranks have KV caches, so that kvobs can compare the blocks of loads."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch

from kvobs.testing import BLOCK, Rig

LAYER = "layer.0"


class Cached(Rig):
    """Block i of each prompt is filled with the same numbers, as well by a load as by computing.

    But ``fill`` has, by request and rank, other numbers by block.
    """

    def _configure(self, config: Any) -> None:
        self.caches: dict[int, torch.Tensor] = getattr(self, "caches", {})
        self.fill: dict[tuple[str, int], dict[int, float]] = {}
        cache = self.caches.setdefault(config.parallel_config.rank, torch.rand(64, 2, BLOCK, 4, 8))
        config.compilation_config = copy(config.compilation_config)
        config.compilation_config.static_forward_context = {LAYER: SimpleNamespace(kv_cache=cache)}

    def _forward(self, worker: Any, scheduled: Any) -> None:
        super()._forward(worker, scheduled)
        cached = scheduled.scheduled_cached_reqs
        for request_id in (*[new.req_id for new in scheduled.scheduled_new_reqs], *cached.resumed_req_ids):
            self.fill_blocks(worker._side.rank, request_id)

    def fill_blocks(self, rank: int, request_id: str) -> None:
        """Fill the blocks that a request has now."""
        others = self.fill.get((request_id, rank), {})
        for i, block in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]):
            self.caches[rank][block] = others.get(i, i + 1.0) * torch.arange(8.0)
