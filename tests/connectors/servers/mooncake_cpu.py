"""Mooncake's connectors on a machine without an accelerator: vLLM's own classes, as a module path names them.

Nothing else is replaced: keys, transfers, threads and the connection to the master are Mooncake's own.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.connectors.servers.cpu import use_cpu

use_cpu()

# After that: these modules look at the device when they are imported.
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E402
    MooncakeConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (  # noqa: E402
    MooncakeStoreConnector,
)

__all__ = ["FlakyMooncakeStore", "LateMooncakeStore", "MooncakeConnector", "MooncakeStoreConnector"]


class FlakyMooncakeStore(MooncakeStoreConnector):
    """MooncakeStoreConnector whose next lookup raises, once, when the file of its option ``fail_once`` is there."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._fail_once = Path(vllm_config.kv_transfer_config.get_from_extra_config("fail_once", os.devnull))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._fail_once.is_file():
            self._fail_once.rename(self._fail_once.with_suffix(f".{time.monotonic_ns()}"))
            raise ConnectionError("connection reset by peer")
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return answer


class LateMooncakeStore(MooncakeStoreConnector):
    """A connector whose store acknowledges a put before it reads the blocks, while the file ``late`` exists."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            late = Path(vllm_config.kv_transfer_config.get_from_extra_config("late", os.devnull))
            self.connector_worker.store = LateStore(self.connector_worker.store, late)


class LateStore:
    """Puts objects into a store when a file is gone."""

    def __init__(self, store: Any, late: Path) -> None:
        self._store, self._late, self._pool = store, late, ThreadPoolExecutor(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def batch_put_from_multi_buffers(self, keys: list[str], *more: Any) -> list[int]:
        if not self._late.is_file():
            done: list[int] = self._store.batch_put_from_multi_buffers(keys, *more)
            return done
        self._pool.submit(self._put_later, keys, *more)
        return [0] * len(keys)

    def _put_later(self, *arguments: Any) -> None:
        while self._late.is_file():
            time.sleep(0.05)
        self._store.batch_put_from_multi_buffers(*arguments)
