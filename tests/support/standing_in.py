"""What a stand-in for vLLM is that a server can be forked or spawned from; its last argument says what it does."""

import json
import os
import signal
import stat
import sys
import tempfile
import threading
import time

from kvobs.testing.vllm_serve import PARENT

READ_AT_IMPORT = "STANDING_IN_READ"
SET_AT_IMPORT = "STANDING_IN_SET"


def prepare() -> None:
    """Read and set a variable, as imports do."""
    tempfile.gettempdir()
    os.environ[SET_AT_IMPORT] = os.environ.get(READ_AT_IMPORT, "nothing read")


def main() -> None:
    """Do what the last argument says."""
    doing = sys.argv[-1]
    if doing == "sleep":
        print("asleep", flush=True)
        time.sleep(600)
    elif doing == "raise":
        raise RuntimeError("out of luck")
    elif doing == "report":
        print(json.dumps(report()))
    else:
        sys.exit(int(doing))


def report() -> dict[str, object]:
    """Return all that a process gets from the one that starts it."""
    return {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path,
        "writes bytecode": not sys.dont_write_bytecode,
        "temporary files": tempfile.gettempdir(),
        "cores": sorted(os.sched_getaffinity(0)),
        "leads its group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0),
        "parent": os.getppid(),
        "files": open_files(),
        "handled signals": [number for number in sorted(signal.valid_signals()) if callable(signal.getsignal(number))],
        "ignored signals": ignored(),
        "blocked signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": threading.active_count(),
    }


def open_files() -> list[str]:
    """Return what each of this process's file descriptors is."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:  # that of the listing itself
            continue
        found.append(f"{name}: {'a socket' if is_socket else os.readlink(f'/proc/self/fd/{name}')}")
    return sorted(found)


def ignored() -> str:
    """Return which signals it ignores, as Linux writes it."""
    with open("/proc/self/status") as status:
        return next(line for line in status if line.startswith("SigIgn"))


if __name__ == "__main__":
    os.environ.pop(PARENT)
    prepare()
    main()
