"""The connectors of the cells: vLLM's own, whose loads take some steps, and fail when a test has them fail."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tests.connectors.files import Example
from tests.connectors.offloading import Offloading

JUNK = 0x41
"""Bytes of a poisoned block: as 32-bit numbers they are 12.1."""


class Faults:
    """Which loads fail, in this process."""

    store: ClassVar[str] = ""
    """Every second load of this one; none: all go well."""
    loads: ClassVar[int] = 0
    failed: ClassVar[int] = 0
    is_raised: ClassVar[bool] = False
    """Whether a failed synchronous load raises, in place of being reported."""

    @classmethod
    def strikes(cls, store: str) -> bool:
        """Return whether the load that begins now is to fail."""
        if store != cls.store:
            return False
        cls.loads += 1
        cls.failed += cls.loads % 2
        return bool(cls.loads % 2)


class FailingOffloadingConnector(OffloadingConnector):
    """Poisons the blocks of a failed load, and reports the request, or all but its first block, in turn."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._failing: dict[str, tuple[list[int], bool]] = {}  # request -> its blocks, whether the first is good
        self._bad: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata: Any = self._connector_metadata
        for job in metadata.load_jobs.values():
            if Faults.strikes("host"):
                blocks = job.dst_spec.block_ids.tolist()
                self._failing[job.req_id] = blocks, len(blocks) > 1 and bool(Faults.failed % 2)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request in results.finished_recving & self._failing.keys():
            blocks, is_partial = self._failing.pop(request)
            assert self.connector_worker is not None
            poison(self.connector_worker.worker.engine, blocks[1:] if is_partial else blocks)
            if is_partial:
                self._bad.update(blocks[1:])
            else:
                results.failed_recving.add(request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad


class FailingExampleConnector(ExampleConnector):
    """Poisons the blocks of a failed load within its step, and reports them, or raises."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._bad: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata: Any = self._get_connector_metadata()
        layers = [layer.kv_cache for layer in forward_context.no_compile_layers.values()]
        bad: set[int] = set()
        for request in metadata.requests:
            if not request.is_store and Faults.strikes("disk"):
                bad.update((request.slot_mapping // self._block_size).tolist())
        poison([layer.view(torch.int8) for layer in layers], bad)
        if bad and Faults.is_raised:
            raise ConnectionError("the store has gone")
        self._bad |= bad

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad


def poison(caches: Iterable[torch.Tensor], blocks: Iterable[int]) -> None:
    """Overwrite blocks in these caches, whose first dimension is the block."""
    for cache in caches:
        cache[list(blocks)] = JUNK


class Host(Offloading):
    """Offloading to 64 MiB of host memory; a copy takes some steps."""

    def delay(self) -> int:
        return self.random.choice((1, 2, 4, 8))

    def config(self) -> dict[str, Any]:
        config = super().config() | {"kv_connector": FailingOffloadingConnector.__name__}
        config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 2**26
        return config


class Disk(Example):
    """Files, which are loaded within a step."""

    def config(self) -> dict[str, Any]:
        return super().config() | {"kv_connector": FailingExampleConnector.__name__}


STORES: dict[str, type[Host] | type[Disk]] = {"host": Host, "disk": Disk}

# vLLM's MultiConnector rebuilds stats by the names in this registry.
for _connector in (FailingOffloadingConnector, FailingExampleConnector):
    KVConnectorFactory.register_connector(_connector.__name__, __name__, _connector.__name__)
