"""A steered connector that leaves the CPU time of EngineCore's waits for its workers where the benchmark reads it.

EngineCore spins while it waits, so most of its CPU time is that of the workers' steps, and of who else wants the core.

Option in ``kv_connector_extra_config``, beside those of ``SteeredConnector``: ``waits``, an existing folder, in which
each EngineCore has a file.
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.engine.connectors_steered import SteeredConnector

SECONDS = struct.Struct("d")


def waited(folder: Path, pid: int) -> float:
    """Return the CPU time in seconds that the EngineCore with this pid has spent waiting."""
    return float(SECONDS.unpack((folder / str(pid)).read_bytes())[0])


class WaitingConnector(SteeredConnector):
    """Does what each request's plan says, and times the waits of the process that schedules."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            _time_waits(Path(self._kv_transfer_config.get_from_extra_config("waits", "")) / str(os.getpid()))


def _time_waits(path: Path) -> None:
    path.write_bytes(SECONDS.pack(0))
    with path.open("r+b") as file:
        words = memoryview(mmap.mmap(file.fileno(), SECONDS.size)).cast("d")
    dequeue = MessageQueue.dequeue

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return dequeue(*args, **kwargs)
        finally:
            words[0] += time.thread_time() - begin

    MessageQueue.dequeue = timed
