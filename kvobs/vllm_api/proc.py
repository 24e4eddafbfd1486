"""Read Linux's data about a process."""

import os
import signal
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

_VLLM_PORT = 8000
_OF_ENGINES = ("VLLM::EngineCor", "VLLM::Worker")  # Linux cuts names after 15 characters
_EXITING = 0x4  # of the kernel's flags of a process


def stat(pid: int) -> tuple[str, list[str]]:
    """Return a process's name and its /proc fields from the state on; OSError if it has ended."""
    # The name, in parentheses, may hold anything: the fields begin after the last one. It is cut within a character.
    name, _, fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    return name, fields.split()


def _fields(pid: int) -> list[str]:
    """Return the fields; only an X, the state of a dead process, if it has ended or can't be seen."""
    with suppress(OSError):
        return stat(pid)[1]
    return ["X"]


def start_time(pid: int) -> str | None:
    """Return when a process was started, in ticks since the machine's; None if it has ended, or can't be seen."""
    state, *fields = _fields(pid)
    return None if state in ("Z", "X") else fields[18]


def launch(pid: int) -> str:
    """Return a hash of a process's command line and host name, which is the same in its next life."""
    with suppress(OSError):
        return blake2b(Path(f"/proc/{pid}/cmdline").read_bytes() + os.uname().nodename.encode()).hexdigest()[:32]
    return ""


def server_of(pid: int) -> int:
    """Return the nearest of a process and those above it that is neither an engine of vLLM nor a worker."""
    with suppress(OSError, ValueError):
        while (of := stat(pid))[0].startswith(_OF_ENGINES):
            pid = int(of[1][1])
    return pid


def served_port(pid: int) -> int | None:
    """Return the port on a server's command line, vLLM's own if `vllm serve` has none there; None if not known."""
    with suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        for word, following in pairwise(words):
            if word == "--port" or word.startswith("--port="):
                return int(following if word == "--port" else word.partition("=")[2])
        is_default = "serve" in words and not any(word.startswith("--config") for word in words)
        return _VLLM_PORT if is_default else None
    return None


def run_delay_ns(thread: int) -> int:
    """Return how long a thread of this process has waited for a core so far; 0 if the kernel does not count it."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1])
    return 0


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger."""
    return _fields(pid)[0] in ("T", "t")


def is_ending(pid: int) -> bool:
    """Return whether a process runs no more: with much memory the kernel takes seconds to free it."""
    state, *fields = _fields(pid)
    return state in ("Z", "X") or bool(int(fields[5]) & _EXITING)


def exit_status(pid: int) -> int | None:
    """Return the status of a process that has ended, as from ``wait``; None if its parent has read it already."""
    state, *fields = _fields(pid)
    return int(fields[48]) if state in ("Z", "X") and fields else None


def name_of(status: int) -> str:
    """Return the name of a signal, or the exit code, from the status of an ended process."""
    with suppress(ValueError):
        if number := status & 0x7F:
            return signal.Signals(number).name
    return f"exit {status >> 8}"


def cores_of_parent() -> set[int]:
    """Return the cores of the process that started this one: its own may be bound to the model's cores."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return os.sched_getaffinity(0)


def pid_namespace() -> str:
    """Return what identifies the process ids of this process; a reader in another container has others."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
