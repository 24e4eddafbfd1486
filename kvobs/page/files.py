"""Manage the folder of the pages: a private file for each process, which its process removes, or a later start.

The writer of a file holds a lock on it until its process ends. So no file of a running process is removed, even if
several engines share the folder, and a reader in another container knows that it runs. A lock without a page shows that
a process serves an engine's metrics.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvobs import faults
from kvobs.log import line, once

SHARED_MEMORY = Path("/dev/shm")
SUFFIX = ".page"
EXPORTER, COLLECTOR = ".exporter", ".collector"
"""Of the locks of an exporter, and of a collector in vLLM's API server."""
NEW_NS = 10 * 10**9
LOOK_S = 0.001
"""Who looks whether a file is locked has a lock on it for a shorter time."""
_OF_PROCESS = re.compile(r"/proc/\d+/fd/\d+\Z")
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def folder() -> Path:
    """Return the folder of this user's pages.

    Where it is not in shared memory, a page is memory of its process, and its file a link to that: a store into a page
    of a file on a disk may have to wait for the disk.
    """
    at = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return at / f"kvobs-{os.geteuid()}"


@contextmanager
def reported(message: str, *args: object) -> Iterator[None]:
    """Log once why a file can't be used, the first argument of ``message``; contain any other error."""
    try:
        yield
    except (OSError, ValueError) as error:
        once(message, logging.ERROR, message, line(error, 400), *args)
    except Exception:
        faults.contain("record")


@contextmanager
def private_folder(path: Path, *, creates: bool = True) -> Iterator[int]:
    """Open the folder, created if missing; no other user may write to it.

    Raises:
        ValueError: it belongs to another user, or others may write to it.
    """
    if creates:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(opened)
        if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"{path} belongs to user {state.st_uid} and has mode {stat.S_IMODE(state.st_mode):o}; use a folder of "
                f"user {os.geteuid()} that no other user may write to, or a new one"
            )
        yield opened
    finally:
        os.close(opened)


def names() -> list[str]:
    """Return the names of the files in this user's folder; none if another user may have put some there."""
    with suppress(OSError, ValueError), private_folder(folder(), creates=False) as opened:
        return os.listdir(opened)
    return []


def create(path: Path, begin: str, size: int) -> tuple[mmap.mmap, Callable[[], None]]:
    """Create and map the page of this process, whose name begins so: it is locked, and all of it allocated.

    Return the map, and what removes the file.

    Raises:
        OSError: there is neither shared memory nor other memory.
        ValueError: the folder is not private.
    """
    name, owner = f"{begin}-{time.time_ns()}-{os.getpid()}{SUFFIX}", os.getpid()
    own: int | None = None
    with private_folder(path) as opened:
        try:
            if not path.is_relative_to(SHARED_MEMORY):
                raise NotADirectoryError(f"{path} is not in {SHARED_MEMORY}")
            memory = _map(opened, name, size)
        except OSError:  # or it is too small
            memory, own = _link(opened, name, size)

    def remove() -> None:
        nonlocal own
        if os.getpid() == owner:  # else a fork of it
            closed, own = own, None  # only once: the next file that is opened gets its number
            if closed is not None:
                os.close(closed)
            with suppress(OSError, ValueError), private_folder(path, creates=False) as again:
                os.unlink(name, dir_fd=again)

    return memory, remove


def clean(path: Path, *keep: str) -> None:
    """Remove the pages and locks of ended processes, except those whose names begin so.

    A server with a running process keeps all of them: the last numbers of a worker that was replaced, and what its
    exporter has left for the next one.
    """
    with private_folder(path) as opened:
        # A file that has only just begun may not be locked yet.
        before, names = time.time_ns() - NEW_NS, os.listdir(opened)
        running = {_server(name) for name in names if name.endswith(SUFFIX) and _is_written(name, opened)}
        for name in names:
            is_old = _started(name) < before if name.endswith(SUFFIX) else name.endswith((EXPORTER, COLLECTOR))
            if is_old and not name.startswith(keep) and _server(name) not in running:
                with suppress(OSError):
                    _remove_unless_held(name, opened)


def _is_written(name: str, folder: int) -> bool:
    """Return whether the process of a page runs."""
    try:
        file = open_page(name, folder)
    except OSError:
        return False
    try:
        return is_locked(file)
    finally:
        os.close(file)


def _server(name: str) -> str:
    """Return the server of a file, from its name."""
    return re.split(r"[-.]", name, maxsplit=1)[0]


def _remove_unless_held(name: str, folder: int) -> None:
    """Remove the file of an ended process; OSError if its process runs, or it can't be opened."""
    try:
        file = open_page(name, folder)
    except FileNotFoundError:
        os.readlink(name, dir_fd=folder)  # a link to memory that is gone; a lock that is may be back: OSError
        os.unlink(name, dir_fd=folder)
        return
    try:
        # Until it is removed no process can take a lock. Readers of a page, which has no second writer, may look at it.
        fcntl.flock(file, (fcntl.LOCK_SH if name.endswith(SUFFIX) else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(name, dir_fd=folder), os.fstat(file)):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(file)


def open_page(path: Path | str, folder: int | None = None) -> int:
    """Open the file of a page to read it; FileNotFoundError if its process has ended with its memory."""
    target = ""
    with suppress(OSError):  # it is not a link
        target = os.readlink(path, dir_fd=folder)
    if not _OF_PROCESS.match(target):
        return os.open(path, _TO_READ | os.O_NOFOLLOW, dir_fd=folder)
    # Another process may have its number by now: what that has open is not to be touched.
    if os.readlink(target) != f"/memfd:{os.path.basename(path)} (deleted)":
        raise FileNotFoundError(errno.ENOENT, "its process has ended", str(path))
    return os.open(target, _TO_READ)


def is_locked(opened: int) -> bool:
    """Return whether the writer of an open file runs."""
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(opened, fcntl.LOCK_UN)
    return False


class Lock:
    """Holds a file of this name while it lives; ``is_mine`` is False if another process has it.

    Raises:
        OSError: the file can't be created.
        ValueError: the folder is not private.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path / name
        self.is_mine = False
        with private_folder(path) as opened:
            while True:
                self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=opened)
                if not _take(self._file):
                    return
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(name, dir_fd=opened), os.fstat(self._file)):
                        self.is_mine = True
                        return
                os.close(self._file)  # its holder has removed it meanwhile

    def read(self) -> bytes:
        """Return what the last holder has written."""
        return os.pread(self._file, 1 << 20, 0)

    def write(self, data: bytes) -> None:
        """Write this in place of what was written before."""
        os.pwrite(self._file, data.ljust(os.fstat(self._file).st_size), 0)

    def release(self, *, remove: bool = True) -> None:
        """Let another process have it."""
        if self.is_mine and remove:
            with suppress(OSError):
                self._path.unlink()
        self.is_mine = False
        os.close(self._file)


def _take(file: int) -> bool:
    """Lock a file; return False if another process has it, and not just looks whether one has."""
    for _ in range(5):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOOK_S)
    return False


def is_held(path: Path, name: str) -> bool:
    """Return whether a running process holds the lock of this name."""
    try:
        opened = os.open(path / name, _TO_READ | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return is_locked(opened)
    finally:
        os.close(opened)


def _map(folder: int, name: str, size: int) -> mmap.mmap:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Writable for no one, so that no one truncates it by accident.
    opened = os.open(name, flags, 0o400, dir_fd=folder)
    try:
        return _allocated(opened, size)
    except BaseException:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(opened)


def _link(folder: int, name: str, size: int) -> tuple[mmap.mmap, int]:
    """Return memory of this process and its descriptor, and make a link to that, which takes no space."""
    opened = os.memfd_create(name)
    try:
        memory = _allocated(opened, size)
        os.symlink(f"/proc/{os.getpid()}/fd/{opened}", name, dir_fd=folder)
    except BaseException:
        os.close(opened)
        raise
    return memory, opened


def _allocated(opened: int, size: int) -> mmap.mmap:
    """Lock and map a file with all of its memory: a store into a page without any would kill the process."""
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.posix_fallocate(opened, 0, size)
    return mmap.mmap(opened, size)  # the map has its own descriptor, and with it the lock


def _started(name: str) -> int:
    """Return the start time of a file's process, from its name."""
    parts = name.rpartition(".")[0].rsplit("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdecimal() else 0  # noqa: PLR2004 - place, time, process
