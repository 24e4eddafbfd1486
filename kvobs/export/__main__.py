"""Run the exporter of one engine; EngineCore starts it: ``python -m kvobs.export FD``."""

import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn


def _report_end(exporter: int, channel: int) -> NoReturn:
    """Wait for the exporter, which is no child of the engine, and send the engine how it has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to every process of a unit
    _, status = os.waitpid(exporter, 0)
    with suppress(OSError):  # the engine has ended
        os.write(channel, b'{"status": %d}\n' % status)
    os._exit(0)


def main() -> int:
    # Inherited files are closed: otherwise the engine's ports would stay taken after its end.
    for name in {*os.listdir("/proc/self/fd")}.difference({"0", "1", "2", *sys.argv[1:]}):
        with suppress(OSError):  # the list's own
            os.close(int(name))
    # No child of the engine: vLLM kills those with it, and the last numbers would be lost. It sees the engine's end.
    if len(sys.argv) > 1 and os.fork():
        os._exit(0)
    if len(sys.argv) > 1 and (exporter := os.fork()):
        _report_end(exporter, int(sys.argv[1]))
    from kvobs.export.process import Exporter, first_lines
    from kvobs.log import log

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [kvobs exporter] %(message)s", "%m-%d %H:%M:%S"))
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper())
    try:
        channel = socket.socket(fileno=int(sys.argv[1]))
        engine, rest = first_lines(channel)
    except (IndexError, OSError, ValueError) as error:
        log.error("the exporter is started by an engine, see docs/exporter.md: %s", error)
        return 2
    Exporter(channel, engine).run(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
