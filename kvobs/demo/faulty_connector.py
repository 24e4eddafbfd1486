"""The demo's faulty connector: vLLM's OffloadingConnector plus the fault that its option ``fault`` names."""

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SLOW_S = 1.2
"""How much longer a load takes: a slow child's is over `slow_load_ms`."""
SLOW_RANK = 1


class FaultyOffloadingConnector(OffloadingConnector):
    """Loads late on every rank or on one, or raises when it is to load; option ``fault`` is a key of `FAULTS`."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Take the fault from the options."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._fault = str(self._kv_transfer_config.get_from_extra_config("fault", ""))
        rank = vllm_config.parallel_config.rank
        self._holds = self._fault == "slow-connector" or (self._fault == "slow-rank" and rank == SLOW_RANK)
        self._held: dict[str, float] = {}  # loaded request -> when to report it

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Raise on a load, if this is the failing connector."""
        if self._fault == "failing-connector" and num_external_tokens:
            raise ConnectionError("the demo's failing connector has lost its storage")
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Report loads, late if this is the slow connector; vLLM calls again as long as a load is pending."""
        saved, loaded = super().get_finished(finished_req_ids)
        if not self._holds:
            return saved, loaded
        now = time.monotonic()
        self._held.update(dict.fromkeys(loaded, now + SLOW_S))
        due = {request for request, when in self._held.items() if when <= now}
        for request in due:
            del self._held[request]
        return saved, due
