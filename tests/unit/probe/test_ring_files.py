"""The files are private, of fixed size, allocated at once; those of living processes stay, of ended ones the newest."""

import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvobs.probe import ring_files
from kvobs.probe.ring_files import EARLIER, SUFFIX, create, create_temporary, is_written

SIZE = 1 << 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_folder_and_file_are_the_users_own(folder: Path) -> None:
    before = os.umask(0)
    try:
        memory = create(folder, "0-rank1", SIZE)
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
def test_a_folder_that_others_may_write_to_or_own_is_refused(
    mode: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(mode or 0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner if mode else owner + 1)
    says = f"has mode {mode:o}; use a folder of user {owner}" if mode else f"belongs to user {owner} "
    with pytest.raises(ValueError, match=says):
        create(folder, "0-rank1", SIZE)
    assert names(folder) == []


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(OSError, match="timeline"):
        create(folder, "0-rank1", SIZE)
    assert names(elsewhere) == []


def test_a_link_in_a_files_place_is_not_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    (folder / f"0-rank1-5-{os.getpid()}{SUFFIX}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        create(folder, "0-rank1", SIZE)
    assert victim.read_text() == "as it was"


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        create(folder, "0-rank1", SIZE)
    assert names(folder) == []


def test_of_ended_processes_the_newest_stay_and_of_living_ones_all(folder: Path) -> None:
    living = [create(folder, "0-rank1", SIZE) for _ in range(EARLIER + 2)]
    alive = names(folder)
    assert len(alive) == len(living)
    for i in range(EARLIER + 2):
        (folder / f"0-rank1-{i}-1{SUFFIX}").touch()
        (folder / f"0-rank10-{i}-1{SUFFIX}").touch()
    (folder / f"0-rank1-mine{SUFFIX}").touch()
    (folder / "0-rank1-notes.txt").touch()
    living.append(create(folder, "0-rank1", SIZE))
    kept = [name for name in names(folder) if name not in alive]
    newest = [f"0-rank1-{i}-1{SUFFIX}" for i in range(2, EARLIER + 2)]
    others = [f"0-rank10-{i}-1{SUFFIX}" for i in range(EARLIER + 2)]
    (own,) = set(kept) - {*newest, *others, "0-rank1-notes.txt"}
    assert own.endswith(f"-{os.getpid()}{SUFFIX}")
    assert len(kept) == EARLIER + len(others) + 2
    assert set(alive) <= set(names(folder))


def test_a_temporary_file_goes_with_its_process_and_those_that_were_left_go_with_the_next(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    now = time.time_ns()
    old, young = (f"0-{now - seconds * 10**9}-1" for seconds in (11, 9))
    for name in (f"{old}.page", f"{old}.txt", f"{young}.page"):
        (folder / name).touch()
    memory, remove = create_temporary(folder, "0", SIZE, ".page")
    (own,) = {*names(folder)} - {f"{old}.txt", f"{young}.page"}
    assert (own[:2], own[-5:], len(memory), ring_files._started(own) >= now) == ("0-", ".page", SIZE, True)
    remove()
    assert names(folder) == sorted([f"{old}.txt", f"{young}.page"])


def test_a_killed_processs_file_is_no_longer_written_and_holds_what_it_wrote(folder: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from kvobs.probe.ring_files import create\n"
        f"memory = create(Path(sys.argv[1]), '0-rank1', {SIZE}); memory[:4] = b'last'; print('up', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (path,) = folder.iterdir()
        assert is_written(path)
        process.kill()
    assert not is_written(path)
    assert path.read_bytes()[:4] == b"last"


def test_who_looks_at_a_file_does_not_make_it_look_written(folder: Path) -> None:
    create(folder, "0-rank1", SIZE).close()
    (path,) = folder.iterdir()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_written(path)
    assert ring_files._started(path.name) > 0
