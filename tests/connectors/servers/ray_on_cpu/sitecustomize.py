"""Let vLLM place ranks with Ray on a machine without accelerators; this folder is on the PYTHONPATH of its processes.

vLLM asks Ray for a resource that the platform names, and the CPU's names none. Python imports a module of this name at
its start, in the workers that Ray starts too.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

RESOURCE = "NPU"
"""One that Ray knows, so that it says which of them a worker has, and that no test machine has."""


def named(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run vLLM's module of the CPU platform, and then name the resource."""
    execute(module)
    module.CpuPlatform.ray_device_key = RESOURCE


class Finder(MetaPathFinder):
    """Finds one module, with more to do after it has run, and leaves all others to Python."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "vllm.platforms.cpu":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(named, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
