"""Find and end all processes of a process group."""

import os
import signal
import time
from contextlib import suppress
from typing import Protocol

from kvobs.vllm_api.proc import stat


class ServerProcess(Protocol):
    """The part of `subprocess.Popen` that is used of a server's process."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit status, None if it runs; that of a process killed by a signal is negative."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended; raise `subprocess.TimeoutExpired` if it has not in time."""

    def send_signal(self, sig: int, /) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    members = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it has ended
            state, _parent, its_group = stat(int(entry))[1][:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(entry))
    return members


def end_group(process: ServerProcess, grace: float) -> None:
    """Terminate the leader of a process group, and kill the rest of the group after `grace` seconds."""
    try:
        process.terminate()
        deadline = time.monotonic() + grace
        while group_members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        kill_group(process.pid)
        process.wait()


def kill_group(group: int) -> None:
    """Kill every process of a process group that we made, and wait up to five seconds until none is left."""
    deadline = time.monotonic() + 5
    while (members := group_members(group)) and time.monotonic() < deadline:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def exit_text(code: int) -> str:
    return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
