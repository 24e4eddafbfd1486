"""What a forked server is: `vllm serve` whose own processes are forked, too, and import nothing again.

On Linux without a CPU platform vLLM forks by default, so both ways are real.
"""

import importlib
import multiprocessing
import os
import re

import setproctitle

from kvobs.testing import vllm_serve

IMPORTS = (
    "kvobs.connector",
    "kvobs.demo.host_offload",
    "kvobs.plugin",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.generate.generative_scoring.api_router",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.api_router",
    "vllm.entrypoints.serve.dev.server_info.api_router",
    "vllm.entrypoints.serve.lora.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.renderers.hf",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What API server, engine and workers import before they are ready."""


def prepare() -> None:
    """Import what they import."""
    for name in IMPORTS:
        importlib.import_module(name)
    # Finds where the title is in memory by the environment that follows it, which a server replaces.
    setproctitle.getproctitle()


def main() -> None:
    """Serve as `kvobs.testing.vllm_serve` does."""
    fork_processes()
    vllm_serve.main()


def fork_processes() -> None:
    """Have vLLM fork its own processes."""
    from vllm.utils import system_utils
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (system_utils, coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=bind)


def bind() -> None:
    """Give a worker as many threads as cores, as OpenMP does when it is loaded into a spawned one.

    vLLM says which cores in the environment, only while it starts a worker. Threads that wait for each other on fewer
    cores than they are burn twenty times the CPU time of the work they share, and so do ranks that wander. A worker
    alone is not bound: beside ranks that spin on its core it may wait for minutes.
    """
    import torch

    if cores := re.findall(r"\d+", os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES", "")):
        torch.set_num_threads(len(cores))
        if "|" in os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""):  # several ranks
            os.sched_setaffinity(0, map(int, cores))
