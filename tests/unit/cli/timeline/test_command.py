"""`kvobs timeline` as people run it, on files that kvobs's own code wrote."""

import gzip
import json
import re
import time
from pathlib import Path
from unittest import mock

import pytest
from kvobs.telemetry.timeline import ring

from kvobs.cli.timeline import chrome_trace, recordings
from kvobs.cli.timeline.command import nanoseconds
from kvobs.clock import wall_ns
from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector
from tests.support.recording_rigs import recording_rig
from tests.support.recordings import run


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_command_writes_the_run_that_began_last(name: str, tmp_path: Path, a: Script, b: Script) -> None:
    out = tmp_path / name
    rigs = [recording_rig(tmp_path / "t", a, b, ranks=ranks) for ranks in (1, 2)]  # held: they are running
    for rig in rigs:
        rig.run(2)
    code, printed = run(tmp_path / "t", "-o", out)
    assert code == 0, printed
    assert re.findall(r"^(scheduler|rank \d) +\d+ +(\w+)", printed, re.MULTILINE) == [
        ("scheduler", "running"), ("rank 0", "running"), ("rank 1", "running")
    ]  # fmt: skip
    trace = json.loads(gzip.decompress(out.read_bytes()) if name.endswith(".gz") else out.read_bytes())
    assert f"{out}: {len(trace['traceEvents']):,} events" in printed
    assert trace["traceEvents"] == list(chrome_trace.events(recordings.load(tmp_path / "t")))
    assert run(tmp_path / "t", "-o", out, "--all", "--force")[1].count("run 2, rank") == 2


def test_the_command_says_what_a_process_is_in(tmp_path: Path, a: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    command = (tmp_path / "t", "-o", tmp_path / "t.json", "--force")
    monkeypatch.setattr(ScriptedConnector, "wait_for_save", lambda _: printed.append(run(*command)[1]))
    recording_rig(tmp_path / "t", a).step()
    assert re.search(
        r"^rank 0 was in wait_for_save of one since \d\d:\d\d:\d\d\.\d{3} \(\S+ \w+\)$", printed[0], re.MULTILINE
    )


NEWER = (ring.VERSION + 1).to_bytes(4, "little")
UNREADABLE = {
    "stray": (b"GIF89a" * 9, "it is not a kvobs recording"),
    "newer": (ring.MAGIC + NEWER + bytes(99), "use the version of kvobs that wrote it"),
    "cut off": (ring.MAGIC, "it is too short for a kvobs recording"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_cannot_be_read_is_named(kind: str, tmp_path: Path, a: Script) -> None:
    """It is an error if it is the only one, and a warning beside others."""
    content, says = UNREADABLE[kind]
    path = tmp_path / "0-rank0-1-1.ring"
    path.write_bytes(content)
    code, printed = run(tmp_path, "-o", tmp_path / "t.json", columns=400)
    assert code == 1
    assert re.match(f"{path} can't be read: .*{says}", printed)
    assert not (tmp_path / "t.json").exists()
    recording_rig(tmp_path, a)
    code, printed = run(tmp_path, "-o", tmp_path / "t.json", columns=400)
    assert code == 0
    assert printed.startswith(f"warning: {path} can't be read: ")
    assert re.search(r"^scheduler .*\n^rank 0 ", printed, re.MULTILINE)
    assert (tmp_path / "t.json").exists()


@pytest.mark.parametrize("files", [(), ("notes.txt",), ("x.ring",)])
def test_a_folder_without_recordings_is_named(files: tuple[str, ...], tmp_path: Path) -> None:
    """A process that has only just made its file has not recorded anything."""
    for name in files:
        (tmp_path / name).touch()
    code, printed = run(tmp_path)
    assert code == 1
    assert "has no recordings (*.ring); give the folder that was set as kvobs.timeline.dir" in printed
    assert run(tmp_path / "no") == (1, f"{tmp_path / 'no'} can't be read: No such file or directory\n")


def test_a_file_that_exists_stays_unless_it_may_be_overwritten(tmp_path: Path, a: Script) -> None:
    recording_rig(tmp_path / "t", a)
    out = tmp_path / "t.json"
    out.write_text("somebody's")
    code, printed = run(tmp_path / "t", "-o", out)
    assert (code, out.read_text()) == (1, "somebody's")
    assert f"{out} exists; --force overwrites it" in printed
    assert run(tmp_path / "t", "-o", out, "--force")[0] == 0
    assert json.loads(out.read_text())["traceEvents"]
    out = tmp_path / "no" / "t.json"
    assert run(tmp_path / "t", "-o", out) == (1, f"{out} can't be written: No such file or directory\n")


# --- what is in progress, and the slowest


def stuck(folder: Path, a: Script) -> Rig:
    """Let one load be done, on rank 1 a second later, and one wait for rank 1."""
    rig = recording_rig(folder, a, ranks=2)
    a.offers |= {"good": (2 * BLOCK, True), "stuck": (BLOCK, True)}
    rig.add("good")
    rig.add("stuck")
    with mock.patch("kvobs.routing.worker.wall_ns", return_value=wall_ns() - 10**9):
        rig.run(2)
        a.say(0, received="good stuck")
        rig.step()
    a.say(1, received="good")
    rig.run(3)
    return rig


def test_it_names_the_slowest_loads_and_what_is_in_progress_whose_age_grows_in_a_living_engine(
    tmp_path: Path, a: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck(tmp_path / "t", a)
    printed = run(tmp_path / "t", "-o", tmp_path / "s.json")[1]
    assert re.search(r"^in progress +age +request +tokens +waits for +connector$", printed, re.MULTILINE)
    assert re.search(r"^load +[\d.]+ \w+ +[0-9a-f]{8} +16 +rank 1 +one$", printed, re.MULTILINE)
    slowest = r"^[\d:.]+ +[\d.]+ \w+ +[0-9a-f]{8} +32 +1 \+[\d.]+ \w+ +one$"
    assert len(re.findall(slowest, printed, re.MULTILINE)) == 1
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3600 * 10**9)
    monkeypatch.setattr(recordings, "is_written", lambda _path: True)
    assert re.search(r"^load +60 min ", run(tmp_path / "t", "-o", tmp_path / "t.json")[1], re.MULTILINE)
    monkeypatch.setattr(recordings, "is_written", lambda _path: False)
    assert not re.search(r"^load +60 min ", run(tmp_path / "t", "-o", tmp_path / "u.json")[1], re.MULTILINE)


def test_only_the_last_part_is_shown_if_asked(tmp_path: Path, a: Script) -> None:
    """What is in progress is, whenever it began."""
    rig = stuck(tmp_path / "t", a)
    time.sleep(0.3)
    rig.add("late")
    rig.run(3)
    out = tmp_path / "t.json"
    counts = []
    for last in ("2m", "0.2s", "200ms"):
        code, printed = run(tmp_path / "t", "-o", out, "--last", last, "--force")
        assert code == 0
        assert "rank 1     one" in printed
        counts.append((len(json.loads(out.read_text())["traceEvents"]), "slowest loads" in printed))
    (whole, has_slowest), *last_parts = counts
    assert has_slowest
    assert last_parts == [(last_parts[0][0], False)] * 2
    assert last_parts[0][0] < whole


@pytest.mark.parametrize("last", ["", "10", "0s", "-1s", "10 s", "1h", "s", "1e3s", "nan", "10sec"])
def test_other_texts_than_durations_are_refused(last: str, tmp_path: Path) -> None:
    code, printed = run(tmp_path, "--last", last)
    assert code == 2
    assert f"{last!r} is not a duration; use e.g. 500ms, 10s or 2m" in " ".join(printed.split())
    durations = {"500ms": 5 * 10**8, "10s": 10**10, "2m": 12 * 10**10, "1.5s": 15 * 10**8}
    assert {text: nanoseconds(text) for text in durations} == durations
