"""Find the address that a host and port stand for, and the process that listens there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from kvobs.log import line

_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the address to listen on, and its family; OSError or ValueError if the host has none."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, str(address[0])


def holder(port: int) -> str:
    """Return the process that listens on a port, as "pid 1 (command)"; "another process" where that can't be seen."""
    inodes = _listening(port)
    for entry in os.listdir("/proc") if inodes else ():
        if not entry.isdigit():
            continue
        with suppress(OSError):  # of another user, or gone
            if any(_target(link) in inodes for link in Path(f"/proc/{entry}/fd").iterdir()):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"pid {entry} ({line(words.decode(errors='replace').strip())})"
    return "another process"


def _target(link: Path) -> str:
    with suppress(OSError):  # closed since it was listed
        return os.readlink(link)
    return ""


def _listening(port: int) -> set[str]:
    """Return the sockets that listen on a port, as links of file descriptors show them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = row.split()[:10]
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{inode}]")
    return found
