"""Receive spans in a separate process, by OTLP over gRPC, and count them when asked: ``python -m``, see ``exporter``.

What arrives is only kept: decoding would take the servers' core while they are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvobs.demo.collector import decode
from kvobs.demo.server import HOST, claim_port, cores
from tests.support.affinity import keeping_off
from tests.support.grpc_collector import GrpcListener


class Receiver:
    """The process, as those see it who started it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin
        assert process.stdout
        self._questions, self._answers = process.stdin, process.stdout
        self.endpoint = f"http://{HOST}:{int(self._answers.readline())}"

    def take(self) -> dict[str, int]:
        """Return how many of kvobs's spans came since the last call, by server: its OTEL_SERVICE_NAME."""
        self._questions.write("?\n")
        self._questions.flush()
        counts: dict[str, int] = json.loads(self._answers.readline())
        return counts


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver; it ends when it has no one to ask it."""
    command = [sys.executable, "-m", __name__]
    # In a process group of its own: a Ctrl-C in the terminal reaches us, and only us.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        yield Receiver(process)


def main() -> None:
    with keeping_off(cores(1)[0]):  # that one is for the servers' workers
        receive()


def receive() -> None:
    """Keep the spans that arrive, until standard input is closed."""
    bodies: list[bytes] = []
    port = claim_port(0)
    listener = GrpcListener(port, bodies.append)
    print(port, flush=True)
    for _ in sys.stdin:
        number = len(bodies)
        spans = [span for body in bodies[:number] for span in decode(body) if span.scope == "kvobs"]
        del bodies[:number]
        print(json.dumps(Counter(span.resource["service.name"] for span in spans)), flush=True)
    listener.stop()


if __name__ == "__main__":
    main()
