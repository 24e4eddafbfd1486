"""SpoolCache's connector on a machine without an accelerator, as a connector's module path names it.

Its page mover has host memory in the place of the device's and of pinned memory. Files, checksums, inventories,
handshake and the protocol in its stats are SpoolCache's own.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from spoolcache import gpu
from spoolcache.vllm import connector
from spoolcache.vllm.connector import SpoolCacheConnector
from vllm.config import ModelConfig

from tests.connectors.servers.cpu import Event

__all__ = ["SpoolCacheConnector"]


class Pinned(torch.Tensor):
    """Host memory that counts as pinned."""

    def is_pinned(self, *_: Any) -> bool:
        return True


RUNTIME = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
CUDA = SimpleNamespace(Event=Event, cudart=lambda: RUNTIME, current_stream=lambda _device: Event())


def frombuffer(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.frombuffer(*args, **kwargs).as_subclass(Pinned)


def see(module: ModuleType, kind: type, name: str, value: object) -> None:
    """Have a module see this value in one attribute of all objects of a class, wherever it reads it with `getattr`."""

    def read(owner: object, asked: str, *default: object) -> Any:
        return value if asked == name and isinstance(owner, kind) else getattr(owner, asked, *default)

    module.getattr = read  # type: ignore[attr-defined]


TORCH = SimpleNamespace(**vars(torch) | {"cuda": CUDA, "frombuffer": frombuffer})
gpu._torch = lambda: TORCH
see(gpu, torch.device, "type", "cuda")
# In vLLM 0.32 this one raises for models without images, and SpoolCache then refuses them.
see(connector, ModelConfig, "get_multimodal_config", None)
