"""Run the exporter of one server; an engine starts it: ``python -m kvobs.export OPTIONS``, as JSON."""

import json
import logging
import os
import sys
from contextlib import suppress


def main() -> int:
    # Inherited files are closed: otherwise the engine's ports would stay taken after its end.
    for name in {*os.listdir("/proc/self/fd")}.difference({"0", "1", "2"}):
        with suppress(OSError):  # the list's own
            os.close(int(name))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's library starts threads, and this process forks
    from kvobs.export.process import lock_of, serve
    from kvobs.log import log
    from kvobs.schema.options import ExporterOptions

    log_to_stderr()
    try:
        given = json.loads(sys.argv[1])
        server = str(given.pop("server"))
        options = ExporterOptions.model_validate(given)
        lock = lock_of(server)
        # Not a child process of the engine: vLLM kills those with it, and the last numbers would be lost. The engine
        # waits for the first process: from then on one has the lock.
        if not lock.is_mine or os.fork():
            os._exit(0)
        serve(server, options, lock, outlives=True)
    except (IndexError, OSError, ValueError, KeyError) as error:
        log.error("the exporter can't run: %s. To start it manually, use `kvobs exporter`", error)
        return 2
    return 0


def log_to_stderr() -> None:
    """Log as vLLM does, whose logger has no handler in this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [kvobs exporter] %(message)s", "%m-%d %H:%M:%S"))
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())


if __name__ == "__main__":
    sys.exit(main())
