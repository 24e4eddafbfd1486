"""Find and end all processes of a process group."""

import os
import signal
import time
from contextlib import suppress
from subprocess import Popen

from kvobs.vllm_api.proc import stat


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group, without zombies."""
    members = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, ValueError):  # it has ended
            state, _parent, its_group = stat(int(entry))[1][:3]
            if int(its_group) == group and state not in "ZX":
                members.append(int(entry))
    return members


def end_group(process: Popen[bytes], grace: float) -> None:
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
