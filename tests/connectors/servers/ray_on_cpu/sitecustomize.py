"""Let vLLM place ranks with Ray on a machine without accelerators; this folder is on the PYTHONPATH of its processes.

vLLM asks Ray for a resource that the platform names, and the CPU's names none. Python imports a module of this name at
its start, in the workers that Ray starts too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

RESOURCE = "NPU"
"""One that Ray knows, so that it says which of them a worker has, and that no test machine has."""


class NamingLoader(Loader):
    """Loads vLLM's module of the CPU platform, and then names the resource."""

    def __init__(self, loader: Loader) -> None:
        """Take what loads the module."""
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module and add to its class what the others have."""
        self._loader.exec_module(module)
        module.CpuPlatform.ray_device_key = RESOURCE


class Finder(MetaPathFinder):
    """Finds one module, and leaves all others to Python."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module as Python finds it, with a loader that adds to it."""
        if name != "vllm.platforms.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = NamingLoader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
