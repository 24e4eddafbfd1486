"""The files are private, of fixed size, allocated at once; those of living processes stay, of ended ones none."""

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvobs.probe import ring_files
from kvobs.probe.ring_files import create

SIZE, SUFFIX = 1 << 16, ".page"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_and_file_are_the_users_own(folder: Path) -> None:
    before = os.umask(0)
    try:
        memory, _ = create(folder, "0-rank1", SIZE, SUFFIX)
    finally:
        os.umask(before)
    (path,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert path.stat().st_size == len(memory) == SIZE
    assert path.stat().st_blocks * 512 >= SIZE, "all of it is allocated"
    memory[:2] = b"hi"
    assert path.read_bytes()[:2] == b"hi"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, None])
def test_a_folder_of_others_is_refused(mode: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(mode or 0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner if mode else owner + 1)
    says = f"has mode {mode:o}; use a folder of user {owner}" if mode else f"belongs to user {owner} "
    with pytest.raises(ValueError, match=says):
        create(folder, "0-rank1", SIZE, SUFFIX)
    assert names(folder) == []


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="timeline"):
        create(folder, "0-rank1", SIZE, SUFFIX)
    assert names(elsewhere) == []


def test_a_link_in_a_files_place_is_not_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    (folder / f"0-rank1-5-{os.getpid()}{SUFFIX}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        create(folder, "0-rank1", SIZE, SUFFIX)
    assert victim.read_text() == "as it was"


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        create(folder, "0-rank1", SIZE, SUFFIX)
    assert names(folder) == []


def test_a_file_is_removed_with_its_process_and_one_that_was_left_by_the_next(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    now = time.time_ns()
    old, young = (f"0-{now - seconds * 10**9}-1" for seconds in (11, 9))
    for name in (f"{old}.page", f"{old}.txt", f"{young}.page"):
        (folder / name).touch()
    memory, remove = create(folder, "0", SIZE, SUFFIX)
    (mine,) = {*names(folder)} - {f"{old}.txt", f"{young}.page"}
    assert (mine[:2], mine[-5:], len(memory), ring_files._started(mine) >= now) == ("0-", ".page", SIZE, True)
    remove()
    assert names(folder) == sorted([f"{old}.txt", f"{young}.page"])


def test_a_killed_process_leaves_its_file_until_the_next_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvobs.probe.ring_files import create\n"
        f"memory, _ = create(Path(sys.argv[1]), '0', {SIZE}, '.page'); memory[:4] = b'last'; print('up', flush=True)\n"
        "time.sleep(600)"
    )
    monkeypatch.setattr(ring_files, "NEW_NS", 0)
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (path,) = folder.iterdir()
        create(folder, "0", SIZE, SUFFIX)
        assert path.exists(), "it is written"
        process.kill()
    assert path.read_bytes()[:4] == b"last"
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # one who looks at it does not make it look written
        create(folder, "0", SIZE, SUFFIX)
    assert not path.exists()
