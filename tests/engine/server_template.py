"""`python -m tests.engine.server_template FD MODULE` imports once what servers need, and forks a server on request.

MODULE has `prepare()`, which imports it, and `main()`, which serves. A request comes over the socket FD: one datagram
of JSON, see `Request`, with the descriptor of the server's log. The answer is the server's process number, or why this
process cannot become that server. Each server is made a child of the process at the other end, which adopts it once
the one between them has ended. This process ends when the socket is closed.
"""

import gc
import importlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from types import ModuleType
from typing import Self

from setproctitle import setproctitle

from kvobs.testing.vllm_serve import PARENT, end_with_parent

LARGEST_REQUEST = 1 << 17
BEFORE_PYTHON = ("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
"""What these variables begin with is read by the loader, by the interpreter or by a library as soon as it is loaded."""
APPLIED = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
"""Of those, what `become` applies to a running interpreter."""
WITHOUT_EFFECT = {
    PARENT: "taken out of the environment before anything is imported",
    "OTEL_RESOURCE_ATTRIBUTES": "OpenTelemetry makes the default resource of log records of it, which nobody here has",
    "OTEL_SERVICE_NAME": "the same",
    "TMPDIR": "`tempfile` is reset; vLLM keeps its locks of downloads there, and Inductor its precompiled headers",
}
"""What may differ though it is read at import, and why."""
OF_ONE_SERVER = ("PYTEST_CURRENT_TEST", "TMPDIR", "VLLM_CPU_OMP_THREADS_BIND", *APPLIED[1:])
"""Kept out of the environment in which the imports take place: there is nothing that they could read."""


@dataclass(frozen=True)
class Request:
    """What makes one server different from another."""

    args: list[str]
    env: dict[str, str]
    folder: str
    """Its working directory."""
    cores: list[int]
    parent: int
    """The process whose child it becomes."""

    @classmethod
    def parse(cls, datagram: bytes) -> Self:
        return cls(**json.loads(datagram))

    def datagram(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Imported:
    """What the imports of this process have read and set of its environment."""

    env: Mapping[str, str]
    """As it was before them."""
    read: frozenset[str]
    set_: Mapping[str, str]

    def obstacles(self, request: Request) -> list[str]:
        """Return why a process after these imports is not what the request would get from a new interpreter."""
        found = [
            f"the environment variable {name} is read at import or before: found {request.env.get(name)!r}, "
            f"imported with {self.env.get(name)!r}"
            for name in sorted(self.env.keys() | request.env.keys())
            if self.env.get(name) != request.env.get(name)
            and (name in self.read or name.startswith(BEFORE_PYTHON))
            and name not in (*APPLIED, *WITHOUT_EFFECT)
        ]
        imported = {name.partition(".")[0] for name in sys.modules}
        return found + [
            f"{folder} on the PYTHONPATH has modules that are imported already: {', '.join(twice)}"
            for folder in paths(request.env)
            if folder not in sys.path and (twice := sorted(imported & modules_in(folder)))
        ]


def paths(env: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def modules_in(folder: str) -> set[str]:
    """Return the names of the modules and packages in a folder."""
    try:
        return {name.partition(".")[0] for name in os.listdir(folder)}
    except OSError:
        return set()


def imports(module: ModuleType) -> Imported:
    """Have the module import what it needs, and see what that reads and sets of the environment."""
    before, read, encode = dict(os.environ), set[str](), os.environ.encodekey

    def noting(name: str) -> str:  # bytes, whatever its annotation says
        read.add(name)
        return encode(name)

    os.environ.encodekey = noting
    try:
        module.prepare()
    finally:
        os.environ.encodekey = encode
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return Imported(before, frozenset(read), changed)


def become_server(channel: socket.socket, imported: Imported) -> Request | None:
    """Answer requests; return in each server with its request, and in the template with None, when it has to end."""
    while True:
        datagram, logs, _flags, _from = socket.recv_fds(channel, LARGEST_REQUEST, 1)
        if not datagram:
            return None
        request = Request.parse(datagram)
        if obstacles := imported.obstacles(request):
            channel.send(json.dumps({"refused": "; ".join(obstacles)}).encode())
        elif (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            become(request, imported, logs[0])
            channel.send(json.dumps({"pid": os.getpid()}).encode())
            return request
        else:
            os.waitpid(between, 0)
        for log in logs:
            os.close(log)


def become(request: Request, imported: Imported, log: int) -> None:
    """Make this process what `subprocess.Popen` makes of a new one, and wait until it is its parent's child."""
    os.setpgid(0, 0)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    sys.argv[1:] = request.args
    # By their command lines kvobs knows two lives of one server.
    setproctitle(f"{sys.argv[0]} {sha256(json.dumps(request.args).encode()).hexdigest()}")
    # An interpreter adds the folder of an installed package only where the PYTHONPATH does not have it.
    first = [request.folder, *paths(request.env)]
    sys.path[:] = [*first, *(folder for folder in sys.path[1:] if folder not in (*paths(imported.env), *first))]
    sys.dont_write_bytecode = bool(request.env.get("PYTHONDONTWRITEBYTECODE"))
    os.environ.clear()
    os.environ.update({**request.env, **imported.set_})
    tempfile.tempdir = None
    deadline = time.monotonic() + 10
    while os.getppid() != request.parent and time.monotonic() < deadline:
        time.sleep(0.001)


def main(descriptor: str, name: str) -> None:
    """Prepare, fork servers until the socket is closed, and serve in each of them."""
    module = importlib.import_module(name)
    with socket.socket(fileno=int(descriptor)) as channel:
        imported = imports(module)
        # Nothing that is imported is ever garbage: a collection in a server would only copy its pages.
        gc.collect()
        gc.freeze()
        request = become_server(channel, imported)
    if request is not None:
        os.environ.pop(PARENT, None)
        end_with_parent(request.parent)
        module.main()


if __name__ == "__main__":
    end_with_parent(int(os.environ.pop(PARENT)))
    main(*sys.argv[1:])
