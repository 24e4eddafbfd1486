"""What a forked script is that uses vLLM's `LLM`: its imports are made, and those of its own processes, too."""

import importlib
import runpy
import sys

from tests.engine import forking_serve


def prepare() -> None:
    """Import what the script and its processes import."""
    forking_serve.prepare()
    importlib.import_module("vllm.entrypoints.llm")


def main() -> None:
    """Run the script that the first argument names, with those that follow."""
    forking_serve.fork_processes()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
