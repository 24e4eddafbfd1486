"""Servers that begin after all imports: forked from a process that has made them once; see `server_template.py`.

vLLM's imports take six seconds of a start, in each process of a server anew where they are spawned. Right wherever a
test is not about processes that start or end.
"""

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import IO, Any

from kvobs.testing.server import Server, ServerError, environment
from kvobs.testing.vllm_serve import PARENT
from tests.engine.server_template import OF_ONE_SERVER, Request

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
"""For the first answer of a template, which waits for its imports."""
PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess(subprocess.Popen[bytes]):
    """A child process that somebody else has started."""

    def __init__(self, pid: int) -> None:
        self._started = pid
        super().__init__([])

    def _execute_child(self, *_args: object) -> None:
        """Start nothing: the process is there."""
        self.pid, self._child_created = self._started, True


class Template:
    """A process that has imported what servers need, and is forked for each of them."""

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self._lock = Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(TIMEOUT_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.server_template", str(theirs.fileno()), module],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={name: env[name] for name in env if name not in OF_ONE_SERVER} | {PARENT: str(os.getpid())},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def fork(self, args: list[str], env: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
        """Return a new server, a child of this process; raise `ServerError` if the template can't become it."""
        request = Request(args, dict(env), os.getcwd(), sorted(os.sched_getaffinity(0)), os.getpid())
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans among our descendants become our connectors
            try:
                socket.send_fds(self._channel, [request.datagram()], [log.fileno()])
                answer = self._channel.recv(1 << 16)
            except OSError as error:
                raise self._failure(f"no answer: {error}") from error
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise self._failure("it has ended")
        if refused := (said := json.loads(answer)).get("refused"):
            raise ServerError(f"This server can't be forked, start it with is_spawned=True: {refused}.")
        return ForkedProcess(said["pid"])

    def end(self) -> None:
        """End it; its servers go on."""
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _failure(self, what: str) -> ServerError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        return ServerError(f"The process that servers are forked from: {what}. Its output:\n{said}")


@cache
def template(module: str, *variables: tuple[str, str]) -> Template:
    """Return this process's template of a module, with variables that its imports see; it ends with this process."""
    made = Template(module, environment() | dict(variables))
    atexit.register(made.end)
    return made


@dataclass
class ForkedServer(Server):
    """A server like any other, but for the time that it takes to start.

    ``imported_with`` are variables of its environment that its imports read.
    """

    module: str = "tests.engine.forking_serve"
    imported_with: Mapping[str, str] = field(default_factory=dict)

    def launched(self, log: IO[bytes], env: Mapping[str, str]) -> Any:
        """Return a process that serves what the module serves."""
        return template(self.module, *self.imported_with.items()).fork(self.command()[len(self.launch) :], env, log)
