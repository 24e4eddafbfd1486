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


def note(**line: Any) -> None:
    """Write a line of what is counted."""
    with open(os.environ["GPU_PATH_COUNTS"], "a") as counts:
        counts.write(json.dumps(line) + "\n")


def count_calls(module: Any) -> None:
    """Write a line for each lookup, allocation and promised save that a connector of this module is called for."""
    name, connector = next((name, getattr(module, cls)) for cls, name in COUNTED.items() if hasattr(module, cls))
    lookup, allocation = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> Any:
        answer = lookup(self, request, num_computed_tokens)
        note(connector=name, call="lookup", request=request.request_id, tokens=answer[0])
        return answer

    def update_state_after_alloc(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        note(connector=name, call="allocation", request=request.request_id, tokens=num_external_tokens)
        allocation(self, request, blocks, num_external_tokens)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc
    for end in {"request_finished", "request_finished_all_groups"} & vars(connector).keys():
        setattr(connector, end, counting_promises(name, getattr(connector, end)))


def counting_promises(name: str, finished: Any) -> Any:
    """Return this hook for a request's end, with a line for each save that its answer promises."""

    def request_finished(self: Any, request: Any, blocks: Any) -> Any:
        answer = finished(self, request, blocks)
        if answer[0]:
            note(connector=name, call="promise", request=request.request_id)
        return answer

    return request_finished


def note_scheduler(module: Any) -> None:
    """Write a line when an asynchronous scheduler is made."""
    init = module.AsyncScheduler.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(call="scheduler", name=type(self).__name__)
        init(self, *args, **kwargs)

    module.AsyncScheduler.__init__ = noted


COUNTED = {
    "OffloadingConnector": "OffloadingConnector",
    "ExampleConnector": "ExampleConnector",
    "NixlBaseConnector": "NixlConnector",
    "LMCacheMPConnector": "LMCacheMPConnector",
}
"""The connectors' classes, and the names under which their calls are counted."""
COUNTED_IN = ("offloading_connector", "example_connector", "nixl.connector", "lmcache_mp_connector")

COMPLETED: dict[str, dict[str, Any]] = {
    "GPU_PATH_ASYNC": {"vllm.platforms.cpu": keep_async_scheduling},
    "GPU_PATH_STAGES": {"vllm.v1.worker.gpu_model_runner": make_stage_buffer},
    "TRITON_INTERPRET": {"triton.backends": add_backend},
    "GPU_PATH_COUNTS": {
        **{CONNECTORS + name: count_calls for name in COUNTED_IN},
        "vllm.v1.core.sched.async_scheduler": note_scheduler,
    },
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
