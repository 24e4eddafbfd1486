"""Give vLLM's CPU build what it lacks for its default path on GPUs, and count what its connectors are asked.

Python runs this at its start wherever this folder is on ``PYTHONPATH``, in each of an engine's processes; which of it,
environment variables say: ``tests.gpu_path.environment`` makes them. It imports nothing that vLLM does not import.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1."


def keep_async_scheduling(cpu: Any) -> None:
    """Leave async scheduling as vLLM has decided before it asks the platform, which switches it off on CPUs."""
    check = cpu.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        decided = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = decided

    cpu.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def add_backend(backends: Any) -> None:
    """Let vLLM find an active Triton backend for CPUs: kernels are interpreted, and no compiler is ever asked."""
    backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def make_stage_buffer(runner: Any) -> None:
    """Make the buffer of a V1 runner's later pipeline stages at its first use: on GPUs a dummy run makes it."""
    gather = runner.GPUModelRunner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self: Any, *args: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args)

    runner.GPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


def count_calls(module: Any) -> None:
    """Write a line for each lookup and each allocation that a connector of this module is called for."""
    name = "OffloadingConnector" if hasattr(module, "OffloadingConnector") else "ExampleConnector"
    connector = getattr(module, name)
    lookup, allocation = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def note(call: str, request: Any, tokens: int | None) -> None:
        line = {"connector": name, "call": call, "request": request.request_id, "tokens": tokens}
        with open(os.environ["GPU_PATH_COUNTS"], "a") as counts:
            counts.write(json.dumps(line) + "\n")

    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        answer = lookup(self, request, num_computed_tokens)
        note("lookup", request, answer[0])
        return answer

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        note("allocation", request, num_external_tokens)
        allocation(self, request, blocks, num_external_tokens)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc


COMPLETED: dict[str, dict[str, Any]] = {
    "GPU_PATH_ASYNC": {"vllm.platforms.cpu": keep_async_scheduling},
    "GPU_PATH_STAGES": {"vllm.v1.worker.gpu_model_runner": make_stage_buffer},
    "TRITON_INTERPRET": {"triton.backends": add_backend},
    "GPU_PATH_COUNTS": {CONNECTORS + name: count_calls for name in ("offloading_connector", "example_connector")},
}
"""Per environment variable that is set, modules and what is done to them before anything else sees them."""


class Completing(MetaPathFinder):
    """Finds the modules of the table, and completes each as soon as it has been executed."""

    def __init__(self) -> None:
        self._steps = {
            name: step
            for variable, modules in COMPLETED.items()
            if os.environ.get(variable)
            for name, step in modules.items()
        }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        step = self._steps.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if step else None
        if step and spec:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                step(module)

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Completing())
