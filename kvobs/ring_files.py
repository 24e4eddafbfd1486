"""The folder of the recordings: one file for each process, private to its user; of earlier processes, the newest few.

Whoever writes a file holds a lock on it, which goes with the process, however that ends: no file of a living process
is ever removed, whoever shares the folder.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".ring"
EARLIER = 3  # files of ended processes that are kept, for each place in an engine


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open the folder, made if it is not there; nobody else may write to it.

    Raises:
        ValueError: it is somebody else's, or others may write to it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(opened)
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path} belongs to user {state.st_uid} and has mode {stat.S_IMODE(state.st_mode):o}; allowed: a "
                f"folder of user {os.geteuid()} that nobody else may write to, or one that is not there yet"
            )
        yield opened
    finally:
        os.close(opened)


def create(path: Path, place: str, size: int) -> mmap.mmap:
    """Make the file of the process that has this place in its engine, and map it; remove what is too old.

    All of it is allocated at once: a page that the disk had no room for would end the process when it is written.

    Raises:
        OSError: there is no room, or no right to do this.
        ValueError: the folder is not private.
    """
    name = f"{place}-{time.time_ns()}-{os.getpid()}{SUFFIX}"
    with _folder(path) as folder:
        _remove_earlier(folder, place)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(name, flags, 0o400, dir_fd=folder)  # writable for us only: no slip of a hand truncates it
        try:
            fcntl.flock(opened, fcntl.LOCK_EX)
            os.posix_fallocate(opened, 0, size)
            return mmap.mmap(opened, size)  # has a descriptor of its own, and with it the lock
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise
        finally:
            os.close(opened)


def _remove_earlier(folder: int, place: str) -> None:
    """Remove the files that ended processes left at this place, but for the newest."""
    names = (name for name in os.listdir(folder) if name.endswith(SUFFIX) and name.startswith(f"{place}-"))
    ended = [name for name in names if not is_written(name, folder)]
    for name in sorted(ended, key=_started, reverse=True)[EARLIER:]:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _started(name: str) -> int:
    """Return when the process of a file began, as its name says."""
    parts = name.removesuffix(SUFFIX).rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0  # noqa: PLR2004 - place, time, process


def is_written(name: str | Path, folder: int | None = None) -> bool:
    """Return whether a process has this file open for its records, or it is not to be had at all."""
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(opened)
    return False
