"""A connector that has a fault as soon as the file ``trigger`` orders it, on the rank of its options.

The file has the hook, a space, and the name of the fault.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload import base

from kvobs.demo.host_offload import HostOffloadingSpec, ShiftingWorker
from tests.engine.connectors_stats import IdleConnector
from tests.support.watched import FAULTS


class FaultyConnector(IdleConnector):
    """Takes part in everything and does nothing but its fault."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        self._trigger = Path(option("trigger", ""))
        self._is_here = vllm_config.parallel_config.rank == option("rank", 0)

    def _pass(self, hook: str) -> None:
        with suppress(FileNotFoundError):
            ordered, _, fault = self._trigger.read_text().partition(" ")
            if self._is_here and hook == ordered:
                self._trigger.unlink()
                FAULTS[fault]()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._pass("get_num_new_matched_tokens")
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._pass("update_state_after_alloc")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._pass("start_load_kv")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._pass("save_kv_layer")

    def wait_for_save(self) -> None:
        self._pass("wait_for_save")


class ShiftingSpec(HostOffloadingSpec):
    """The demo's host memory, of which rank 1 loads the wrong blocks while there is the file ``trigger``."""

    def get_worker(self, kv_caches: base.CanonicalKVCaches) -> base.OffloadingWorker:
        worker = super().get_worker(kv_caches)
        if self.config.parallel.rank == 1:
            worker.__class__, worker.trigger = TriggeredWorker, Path(self.extra_config["trigger"])
        return worker


class TriggeredWorker(ShiftingWorker):
    """Loads the next blocks of its memory while there is a file."""

    trigger: Path

    @property
    def shifts(self) -> bool:
        return self.trigger.exists()
