"""`python -m tests.engine.forking_serve ...` is `vllm serve ...` with forked processes, which import nothing again.

Half of a small server's start is spent by its processes on importing vLLM, each for itself: on a CPU vLLM spawns them.
On Linux without a CPU platform vLLM forks by default, so both ways are real.
"""

import multiprocessing
import os

from kvobs.demo import vllm_serve


def main() -> None:
    """Serve as `kvobs.demo.vllm_serve` does."""
    from vllm.utils import system_utils
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (system_utils, coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    vllm_serve.main()


if __name__ == "__main__":
    if parent := os.environ.pop("KVOBS_DEMO_PARENT", None):
        vllm_serve.end_with_parent(int(parent))
    main()
