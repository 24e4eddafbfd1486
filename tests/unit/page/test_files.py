"""The files of pages are private, of fixed size, allocated at once; those of living processes stay, of ended ones none.

Where shared memory has no room a page is in memory of its process, and is found by a link.
"""

import errno
import fcntl
import gc
import json
import logging
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.page.files import EXPORTER, Lock, clean, create, is_held, open_page
from kvobs.page.files import folder as users_folder
from kvobs.page.layout import STEPS
from kvobs.page.reader import names_of
from kvobs.page.reader import pages as readable_pages
from kvobs.page.writer import PageWriter
from kvobs.probe.recorder import Recorder
from tests.support.watched import REMOTE, begin, config

SIZE = 1 << 16


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_and_file_are_the_users_own(folder: Path) -> None:
    before = os.umask(0)
    try:
        memory, _ = create(folder, "0-rank1", SIZE)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.lstat().st_mode) == 0o400
    assert path.stat().st_size == len(memory) == SIZE
    assert path.stat().st_blocks * 512 >= SIZE, "all of it is allocated"
    memory[:2] = b"hi"
    assert path.read_bytes()[:2] == b"hi"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, None])
def test_a_folder_of_others_is_refused(mode: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(mode or 0o700)
    (folder / "0-rank1-5-1.page").touch()
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner if mode else owner + 1)
    says = f"has mode {mode:o}; use a folder of user {owner}" if mode else f"belongs to user {owner} "
    with pytest.raises(ValueError, match=says):
        create(folder, "0-rank1", SIZE)
    with pytest.raises(ValueError, match=says):
        clean(folder)
    assert names(folder) == ["0-rank1-5-1.page"]
    assert names_of() == [], "nor is it read"


def test_a_link_is_not_followed(folder: Path) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="pages"):
        create(folder, "0-rank1", SIZE)
    assert names(elsewhere) == []


def test_a_link_in_a_files_place_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    victim = folder.parent / "victim"
    victim.write_text("as it was")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    (folder / f"0-rank1-5-{os.getpid()}.page").symlink_to(victim)
    with pytest.raises(FileExistsError):
        create(folder, "0-rank1", SIZE)
    assert victim.read_text() == "as it was"


def test_without_any_memory_nothing_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    gc.collect()  # what other tests have left open is closed by a collection
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left"):
        create(folder, "0-rank1", SIZE)
    assert names(folder) == []
    assert set(os.listdir("/proc/self/fd")) <= set(before)


# --- what is removed, and when


def test_a_start_removes_dead_processes_files_except_its_servers(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    now = time.time_ns()
    old, young = (f"0-{now - seconds * 10**9}-1" for seconds in (11, 9))
    left = [f"{old}.page", f"{old}.txt", f"{young}.page", f"mine-{old}.page", "0.exporter", "mine.exporter", "0.txt"]
    for name in left:
        (folder / name).touch()
    (folder / "gone-1-2.page").symlink_to("/proc/999999999/fd/3")
    _, remove = create(folder, "runs", SIZE)
    (page,) = {*names(folder)} - {*left, "gone-1-2.page"}
    clean(folder, "mine")
    kept = sorted({*left} - {f"{old}.page", "0.exporter"})
    assert names(folder) == sorted([*kept, page])
    remove()
    assert names(folder) == kept


def test_a_start_removes_nothing_of_another_server_that_runs(folder: Path) -> None:
    """A later reader needs the numbers of a worker that was replaced, and a later exporter what the one before left."""
    folder.mkdir(mode=0o700)
    left = [f"{server}-0-rank0-5-1.page" for server in ("runs", "ended")] + ["runs.exporter", "ended.exporter"]
    for name in left:
        (folder / name).touch()
    _, remove = create(folder, "runs-0-scheduler", SIZE)
    clean(folder)
    assert {*left} & {*names(folder)} == {"runs-0-rank0-5-1.page", "runs.exporter"}
    remove()


def test_a_killed_process_leaves_its_file_until_the_next_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvobs.page.files import create\n"
        f"memory, _ = create(Path(sys.argv[1]), '0', {SIZE}); memory[:4] = b'last'; print('up', flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(files, "NEW_NS", 0)
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (path,) = folder.iterdir()
        clean(folder)
        assert path.exists(), "it is written"
        process.kill()
    assert path.read_bytes()[:4] == b"last"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # one who looks at it does not make it look written
        clean(folder)
    assert not path.exists()


@pytest.mark.parametrize("rank", [None, 0])
def test_each_process_removes_what_is_left_except_its_servers(
    rank: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host without EngineCore there are ranks only."""
    monkeypatch.setattr(files, "NEW_NS", 0)
    folder.mkdir(mode=0o700)
    mine, other = f"{Identity.of(config('e')).server}-0-rank7-5-1.page", "another-0-rank7-5-1.page"
    for name in (mine, other):
        (folder / name).touch()
    page = begin("e", rank)
    assert mine in names(folder)
    assert other not in names(folder)
    page.close()
    assert names(folder) == [mine]


# --- pages in memory of their process


def is_there(fd: int) -> bool:
    with suppress(OSError):
        return bool(os.fstat(fd))
    return False


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what fills shared memory for all that is no memory of a process."""
    allocate = os.posix_fallocate

    def fill() -> None:
        def fallocate(fd: int, *more: int) -> None:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
                raise OSError(errno.ENOSPC, "No space left on device")
            allocate(fd, *more)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    return fill


def test_what_removes_a_page_in_memory_closes_its_file_once(folder: Path, full: Callable[[], None]) -> None:
    """It is called at the end of the engine, by the thread that looks after the page, and at the exit."""
    full()
    _, remove = create(folder, "0", SIZE)
    opened = int(os.readlink(next(folder.iterdir())).rpartition("/")[2])
    remove()
    assert not is_there(opened)
    with open(os.devnull) as other:
        copy = os.dup2(other.fileno(), opened)
        remove()
        assert is_there(copy), "it has the number now"
        os.close(copy)
    assert names(folder) == []


def test_a_link_to_what_another_process_has_open_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """The number of an ended process is another one's by now: a lock on its file would be in its way."""
    folder.mkdir(mode=0o700)
    with (tmp_path / "other").open("w+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        memory = os.memfd_create("0-rank1-5-2.page")  # of another page
        for fd in (file.fileno(), memory):
            name = folder / "0-rank1-5-1.page"
            name.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            with pytest.raises(FileNotFoundError, match="its process has ended"):
                open_page(name)
            clean(folder)
            assert names(folder) == [], "though the file is locked"
        os.close(memory)


@contextmanager
def shared_memory(size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let shared memory be a new one of this size; where none can be mounted, let only so much be allocated."""
    with tempfile.TemporaryDirectory() as at:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at]
        is_mounted = not subprocess.run(command, capture_output=True, check=False).returncode
        if not is_mounted:
            allocate, left = os.posix_fallocate, [size]

            def fallocate(fd: int, begin: int, n: int) -> None:
                if os.readlink(f"/proc/self/fd/{fd}").startswith(at):
                    left[0] -= n
                    if left[0] < 0:
                        raise OSError(errno.ENOSPC, "No space left on device")
                allocate(fd, begin, n)

            monkeypatch.setattr(os, "posix_fallocate", fallocate)
        monkeypatch.setattr(files, "SHARED_MEMORY", Path(at))
        monkeypatch.setattr(files, "folder", lambda: Path(at) / "kvobs")
        yield Path(at)
        if is_mounted:
            subprocess.run(["umount", "--lazy", at], check=True)


READS = """
import json, sys
from pathlib import Path
from kvobs.page import files, reader
files.folder = lambda: Path(sys.argv[1])
print(json.dumps([[page.pid, page.is_alive, [call[1] for call in page.calls()], page.words[reader.layout.STEPS]]
                  for _, page in reader.pages()]))
"""


def read_elsewhere(folder: Path) -> list[Any]:
    """Return what another process reads in the pages: number, whether it runs, calls, steps."""
    ran = subprocess.run([sys.executable, "-c", READS, folder], capture_output=True, text=True, check=True, cwd=ROOT)
    found: list[Any] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("size", [1 << 16, 64 << 20])
def test_full_shared_memory_moves_pages_and_they_are_readable(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvobs.page.layout.CALLS", 1 << 16)  # as many as in an engine
    with shared_memory(size, monkeypatch) as at:
        pages = []
        for rank in range(64):
            pages.append(begin("e", rank))
            if is_full := any(path.is_symlink() for path in (at / "kvobs").iterdir()):
                break
        assert is_full
        assert len(pages) - 1 == size // len(pages[0].words.obj), "as many as there is room for"  # type: ignore[arg-type]
        assert_is_read_elsewhere(at / "kvobs", pages)
    assert caplog.text == ""


def assert_is_read_elsewhere(at: Path, pages: list[PageWriter]) -> None:
    """Another process must see the last page as its process writes it; then they are closed."""
    last = pages[-1]
    last.words[last.marks(REMOTE, "start_load_kv")] = time.perf_counter_ns()
    last.words[STEPS] = 7
    found = read_elsewhere(at)
    assert len(found) == len(pages)
    assert found[-1] == [os.getpid(), True, ["start_load_kv"], 7]
    for page in pages:
        page.close()
    assert names(at) == []


def test_where_shared_memory_is_read_only_pages_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_memory(SIZE, monkeypatch) as at:
        at.chmod(0o500)
        subprocess.run(["mount", "-o", "remount,ro", at], capture_output=True, check=False)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(files, "folder", users_folder)
        pages = [begin("e", 0)]
        (link,) = (tmp_path / f"kvobs-{os.geteuid()}").iterdir()
        assert link.is_symlink()
        assert_is_read_elsewhere(link.parent, pages)
    assert caplog.text == ""


@pytest.mark.parametrize("fault", ["another user's folder", "a folder for all", "no folder", "no memory"])
def test_without_any_page_one_error_is_logged_and_calls_are_made(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "no folder":
        folder.symlink_to("/nowhere")
    elif fault == "no memory":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    else:
        folder.mkdir()
        folder.chmod(0o777 if fault == "a folder for all" else 0o700)
        if fault == "another user's folder":
            owner = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    try:
        pages = [begin("e", rank) for rank in (None, 0)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert Recorder(2, page=pages[0]).timed(REMOTE, "wait_for_save", lambda: "done")() == "done"
    assert list(readable_pages()) == []
    (record,) = caplog.records
    says = "kvobs's metrics can't be exported: "
    assert (record.levelno, record.getMessage()[: len(says)]) == (logging.ERROR, says)
    for page in pages:
        page.close()


# --- locks


def test_a_lock_is_held_by_one_and_goes_with_it(folder: Path) -> None:
    name = f"s{EXPORTER}"
    assert not is_held(folder, name)
    first = Lock(folder, name)
    assert (first.is_mine, is_held(folder, name)) == (True, True)
    first.write(b"a long line")
    first.write(b"short")
    second = Lock(folder, name)
    assert (second.is_mine, second.read()) == (False, b"short".ljust(11))
    second.release()
    clean(folder)
    assert is_held(folder, name)
    first.release(remove=False)
    third = Lock(folder, name)
    assert (third.is_mine, third.read().strip()) == (True, b"short")
    third.release()
    assert names(folder) == []


def test_who_looks_at_a_lock_does_not_take_it(folder: Path) -> None:
    name = f"s{EXPORTER}"
    Lock(folder, name).release(remove=False)
    with (folder / name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(files.LOOK_S, fcntl.flock, (file.fileno(), fcntl.LOCK_UN)).start()
        lock = Lock(folder, name)
    assert lock.is_mine
    lock.release()


def test_no_one_gets_a_lock_whose_file_a_start_is_removing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, unlink, got = f"s{EXPORTER}", os.unlink, list[bool]()
    Lock(folder, name).release(remove=False)

    def unlink_late(*args: Any, **more: Any) -> None:
        got.append(Lock(folder, name).is_mine)
        unlink(*args, **more)

    monkeypatch.setattr(os, "unlink", unlink_late)
    clean(folder)
    assert (got, names(folder)) == ([False], [])


@pytest.mark.usefixtures("hasty_threads")
def test_only_one_of_many_has_a_lock_whoever_looks_and_cleans(folder: Path) -> None:
    name, held, had = f"s{EXPORTER}", list[int](), list[int]()

    def take(me: int) -> None:
        while len(had) < 1000:
            lock = Lock(folder, name)
            if lock.is_mine:
                held.append(me)
                time.sleep(1e-4)
                had.append(len(held))
                held.remove(me)
            lock.release(remove=me % 2 == 0)

    def look() -> None:
        while len(had) < 1000:
            is_held(folder, name)
            with suppress(FileNotFoundError):  # before the first lock
                clean(folder)

    threads = [threading.Thread(target=take, args=(i,)) for i in range(3)] + [threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(had) == {1}
