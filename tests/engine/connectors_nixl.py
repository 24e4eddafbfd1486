"""NixlConnector with its host buffer in use: vLLM has it for devices that NIXL can't register, and never on CPUs.

Everything but the decision is vLLM's own: the buffers, the metadata, when blocks are copied, and what NIXL transfers.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector


class HostBufferedNixl(NixlConnector):
    """Has every block pass through a host buffer, on both sides."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (self.connector_scheduler or self.connector_worker).use_host_buffer = True

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.connector_worker.copy_blocks = copy_operation
