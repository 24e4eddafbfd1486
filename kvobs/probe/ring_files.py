"""Manage the folder of the pages: a private file for each process, which its process removes, or the next start.

The writer of a file holds a lock on it until its process ends, so that no file of a running process is removed, even if
several engines share the folder.
"""

import fcntl
import logging
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvobs import faults
from kvobs.log import line, once

NEW_NS = 10 * 10**9


@contextmanager
def reported(message: str, *args: object) -> Iterator[None]:
    """Log once why a file can't be had, the first argument of ``message``; contain any other error."""
    try:
        yield
    except (OSError, ValueError) as error:
        once(message, logging.WARNING, message, line(error, 400), *args)
    except Exception:
        faults.contain("record")


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Open the folder, created if missing; no other user may write to it.

    Raises:
        ValueError: it belongs to another user, or others may write to it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(opened)
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path} belongs to user {state.st_uid} and has mode {stat.S_IMODE(state.st_mode):o}; use a folder of "
                f"user {os.geteuid()} that nobody else may write to, or a new one"
            )
        yield opened
    finally:
        os.close(opened)


def create(path: Path, place: str, size: int, suffix: str) -> tuple[mmap.mmap, Callable[[], None]]:
    """Create and map the file of the process with this position in its engine; remove those of ended processes.

    All of it is allocated at once: writing a page without disk space would kill the process. Return the map, and what
    removes the file.

    Raises:
        OSError: no disk space, or no permission.
        ValueError: the folder is not private.
    """
    name, owner = f"{place}-{time.time_ns()}-{os.getpid()}{suffix}", os.getpid()
    with private_folder(path) as folder:
        # A file that has only just begun may not be locked yet.
        before = time.time_ns() - NEW_NS
        others = [other for other in os.listdir(folder) if other.endswith(suffix) and _started(other) < before]
        for other in others:
            if not _is_written(other, folder):
                with suppress(OSError):
                    os.unlink(other, dir_fd=folder)
        memory = _map(folder, name, size)

    def remove() -> None:
        if os.getpid() == owner:  # else a fork of it
            with suppress(OSError, ValueError), private_folder(path) as folder:
                os.unlink(name, dir_fd=folder)

    return memory, remove


def write(path: Path, name: str, data: bytes) -> None:
    """Write a file that outlives its process; raises what ``create`` does."""
    with private_folder(path) as folder:
        opened = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with open(opened, "wb") as file:
            file.write(data)
        os.rename(f"{name}.new", name, src_dir_fd=folder, dst_dir_fd=folder)


def take(path: Path, name: str, at_most: int) -> tuple[bytes, float]:
    """Remove such a file; return its content, and when it was written, as Unix time; raises what ``create`` does."""
    with private_folder(path) as folder:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with open(opened, "rb") as file:
            os.unlink(name, dir_fd=folder)
            return file.read(at_most), os.fstat(opened).st_mtime


def _map(folder: int, name: str, size: int) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Writable for nobody, so that nobody truncates it by accident.
    opened = os.open(name, flags, 0o400, dir_fd=folder)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        os.posix_fallocate(opened, 0, size)
        return mmap.mmap(opened, size)  # the map has its own descriptor, and with it the lock
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(opened)


def _started(name: str) -> int:
    """Return the start time of a file's process, from its name."""
    parts = name.rpartition(".")[0].rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0  # noqa: PLR2004 - place, time, process


def _is_written(name: str, folder: int) -> bool:
    """Return whether a process is writing this file, or it can't be opened."""
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
