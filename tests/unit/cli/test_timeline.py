"""`kvobs timeline` finds the pages of real processes, and shows their calls, their ends and their last minute."""

import gzip
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.page import files, writer
from kvobs.page.description import ConnectorInfo, EngineInfo
from kvobs.page.layout import ENDED, HEAD, MAGIC, URGENT, VERSION
from kvobs.page.writer import PageWriter
from tests.support.page_files import page_folder
from tests.support.slow_loads import SLOW
from tests.support.watched import NAMES, REMOTE, config, note, process

S = 10**9


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    with page_folder() as made:
        yield made


def run(*arguments: object) -> tuple[int, str]:
    """Run the command; return its exit code, and all that it printed."""
    result = CliRunner().invoke(app, ["timeline", *map(str, arguments)], env={"COLUMNS": "100"})
    return result.exit_code, result.output


def described(*arguments: object) -> list[dict[str, Any]]:
    code, output = run(*arguments, "--json")
    assert code == 0, output
    found: list[dict[str, Any]] = json.loads(output)
    return found


def begin(
    rank: int | None = 1, names: tuple[str, ...] = NAMES, engine: str = "e", model: str = "tiny", **more: Any
) -> PageWriter:
    info = EngineInfo(tuple(map(ConnectorInfo, names)), model=model, **more)
    return writer.begin(config(engine), writer.describe(info, rank))


def events_of(path: Path) -> list[dict[str, Any]]:
    text = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)["traceEvents"]
    return events


def test_a_call_that_hangs_is_shown_with_a_process_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    info = EngineInfo(tuple(map(ConnectorInfo, NAMES)), model="tiny")
    monkeypatch.setattr(writer, "plain", lambda _: info)
    with process("e", 1, "hangs") as hanging, process("e", None, "stays after it") as well:
        code, output = run()
        (name,) = re.findall(r"\((\w+-0)\)", output)
        by_id = run(name)
        rank, scheduler = described()[::-1]
    assert code == 0
    lines = output.splitlines()
    assert re.fullmatch(r"engine tiny \([0-9a-f]{8}-0\)", lines[0]), "its port is not known"
    assert by_id[1].splitlines()[0] == lines[0]
    assert [(one["model"], one["port"]) for one in (rank, scheduler)] == [("tiny", None)] * 2
    assert lines[2:4] == [f"scheduler, pid {well.pid}: alive", "  is in no call"]
    assert f"rank 1, pid {hanging.pid}: alive" in lines
    assert re.search(r"^  is in start_load_kv of connector 'remote' for \d+ \wm?s, since \d\d:", output, re.MULTILINE)
    assert [(call["connector"], call["hook"]) for call in rank["in_progress"]] == [("remote", "start_load_kv")]
    assert rank["in_progress"][0]["seconds"] > 0
    assert abs(rank["until"] - time.time()) < 60
    assert (scheduler["rank"], scheduler["in_progress"], scheduler["raised"]) == (None, [], None)
    assert [(sums["connector"], sums["calls"]) for sums in rank["calls"]] == [("cpu", 1)]


@pytest.mark.parametrize("fault", ["is killed late", "raises"])
def test_an_engine_that_died_is_shown_until_the_next_start(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with process("e", 1, fault) as forked:
        os.waitpid(forked.pid, 0)
    code, output = run()
    assert code == 0
    assert re.search(rf"^rank 1, pid {forked.pid}: died, last seen at \d\d:\d\d:\d\d", output, re.MULTILINE)
    (found,) = described()
    assert found["state"] == "died"
    if fault == "raises":
        assert "  was in no call\n  raised RuntimeError in start_load_kv of connector 'remote' at " in output
        assert [sums["failed"] for sums in found["calls"] if sums["connector"] == "remote"] == [1]
    else:
        assert "  was in start_load_kv of connector 'remote' for at least " in output
        assert found["in_progress"][0]["seconds"] < 60
    monkeypatch.setattr(files, "NEW_NS", 0)
    box = begin(None, engine="next", model="")
    assert [process["rank"] for process in described()] == [None]
    box.close()


def test_the_last_minute_is_summed_by_connector_and_hook() -> None:
    box, now = begin(), time.perf_counter_ns()
    note(box, 0, "wait_for_save", now - 96 * S, 29 * S)  # before it
    note(box, 0, "wait_for_save", now - 70 * S, 20 * S)  # it ended within it
    note(box, 0, "wait_for_save", now - 8 * S, 1 * S, raised=True)
    note(box, REMOTE, "save_kv_layer", now - 7 * S, 2 * S, calls=32)
    (found,) = described()
    assert found["window_seconds"] == 60
    assert found["calls"] == [
        {"connector": "cpu", "hook": "wait_for_save", "calls": 2, "failed": 1, "seconds": 21, "slowest_seconds": 20},
        {"connector": "remote", "hook": "save_kv_layer", "calls": 32, "failed": 0, "seconds": 2, "slowest_seconds": 2},
    ]
    _, output = run()
    table = [line.split() for line in output.splitlines()[-3:-1]]
    assert table == [
        ["cpu", "wait_for_save", "2", "21", "s", "20", "s", "1"],
        ["remote", "save_kv_layer", "32", "2.0", "s", "2.0", "s", "0"],
    ]


def test_an_idle_process_has_a_whole_minute_and_a_busy_one_less() -> None:
    busy, now = begin(0), time.perf_counter_ns()
    room = busy.process.calls
    for i in range(2 * room):
        note(busy, 0, "wait_for_save", now - 39 * S + 19 * S * i // room, 1)
    waiting = begin(1)
    note(waiting, 0, "wait_for_save", now - 300 * S, S)
    (busy_, waiting_), (_, output) = described(), run()
    assert (round(busy_["window_seconds"]), waiting_["window_seconds"]) == (19, 60)
    assert [process["calls"][0]["calls"] for process in (busy_, waiting_)] == [room, 1]
    assert abs(time.time() - waiting_["last"] - 299) < 60
    assert re.search(r"^  calls of the 19 s until \d\d:.*\n.*\n +cpu +wait_for_save +1,024 ", output, re.MULTILINE)


def test_an_engine_has_its_port_and_one_without_a_model_its_id() -> None:
    boxes = begin(None, port=8001), begin(1, port=8001), begin(2, engine="f", model="")
    titles = [line for line in run()[1].splitlines() if line.startswith("engine ")]
    assert len(titles) == 2
    assert any(re.fullmatch(r"engine tiny, port 8001 \([0-9a-f]{8}-0\)", title) for title in titles)
    assert any(re.fullmatch(r"engine [0-9a-f]{8}-0", title) for title in titles)
    assert len(boxes) == 3


def test_a_hook_has_one_line_in_eighty_columns() -> None:
    box, now = begin(), time.perf_counter_ns()
    for hook in ("get_num_new_matched_tokens", "request_finished"):
        note(box, 0, hook, now - S, 10**8)
    lines = CliRunner().invoke(app, ["timeline"], env={"COLUMNS": "80"}).output.splitlines()
    assert any(
        re.fullmatch(r" *cpu +get_num_new_matched_tokens +1 +100 ms +100 ms +0", line.rstrip()) for line in lines
    )


def test_a_process_by_pid_has_all_rows_and_others_their_first() -> None:
    box = begin(1, names=tuple(f"\x1b[3{i}m{i}" for i in range(9)))
    for i in range(9):
        note(box, i, "wait_for_save", time.perf_counter_ns(), i)
    _, output = run()
    assert output.endswith(f"  and 1 row more: kvobs timeline {os.getpid()}\n\n")
    assert "\x1b" not in output
    assert r"\x1b[38m8" in output
    code, output = run(os.getpid())
    assert (code, r"\x1b[30m0" in output, "more" in output) == (0, True, False)
    engine = described()[0]["engine"]
    assert [one["engine"] for one in described(engine[:4])] == [engine]
    code, output = run("none-such")
    assert code == 1
    assert f"no engine and no pid 'none-such'; known: rank 1, pid {os.getpid()} of engine {engine}" in output


def test_missing_pages_have_reasons_and_a_bad_one_is_left_out(folder: Path) -> None:
    code, output = run()
    assert code == 1
    assert f"found no page of an engine's process in {folder}: run this as the engine's user" in output
    box = begin()
    (path,) = folder.iterdir()
    (folder / "x-0-rank1-1-1.page").write_bytes(bytes(4096))
    (folder / "y-0-rank1-1-1.page").write_bytes(path.read_bytes()[:-8])
    (folder / "z.page").touch()
    (folder / "v-0-rank1-1-1.page").write_bytes(HEAD.pack(MAGIC, VERSION ^ 1, 0))
    (folder / "gone-0-rank1-1-1.page").symlink_to("/proc/999999999/fd/3")
    code, output = run()
    why = re.findall(rf"^warning: {folder}/(\w).* is skipped: (.*)$", output, re.MULTILINE)
    size = path.stat().st_size
    assert (code, sorted(why)) == (0, [
        ("v", "it was written by another version of kvobs"), ("x", "its process has not written it yet"),
        ("y", f"it has {size - 8} bytes instead of {size}"), ("z", "its process has not written it yet"),
    ])  # fmt: skip
    box.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_page_is_shown_as_far_as_it_can_be(seed: int, folder: Path, tmp_path: Path) -> None:
    box = begin()
    for i in range(9):
        note(box, i % 2, "wait_for_save", time.perf_counter_ns(), i)
    draw = np.random.default_rng(seed)
    words = np.frombuffer(box.words, np.int64)
    wild = draw.integers(-(2**63), 2**63 - 1, len(words), np.int64)
    words[...] = np.where(draw.random(len(words)) < (0.01, 0.5, 1)[seed % 3], wild, words)
    for arguments in ([], ["--json"], ["--chrome", tmp_path / "trace"]):
        code, output = run(*arguments)
        assert (code, "rank" in output) == (0, True), output
    assert events_of(tmp_path / "trace")
    assert len(list(folder.iterdir())) == 1


def test_a_process_that_ended_well_shows_it_while_its_page_stays() -> None:
    box = begin()
    box.words[ENDED] = 1
    assert described()[0]["state"] == "ended well"
    box.words[ENDED] = 0


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_each_process_has_a_track_and_each_connector_a_row(name: str, tmp_path: Path) -> None:
    begin_ns = time.perf_counter_ns() - 9 * S
    boxes = [begin(None), begin(1)]
    note(boxes[0], 0, "build_connector_meta", begin_ns, 3000)
    note(boxes[1], REMOTE, "save_kv_layer", begin_ns + 1500, 2500, calls=32)
    note(boxes[1], REMOTE, "wait_for_save", begin_ns + 4000, 5, raised=True)
    boxes[1].words[boxes[1].marks(0, "get_finished")] = begin_ns + S
    code, output = run("--chrome", tmp_path / name)
    events = events_of(tmp_path / name)
    assert (code, f"{tmp_path / name}: {len(events)} events; open it at" in output.replace("\n", "")) == (0, True)
    assert [e["args"]["name"].split(",")[0] for e in events if e["name"] == "process_name"] == ["scheduler", "rank 1"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    calls = [(e["ph"], rows[e["tid"]], e["ts"], e.get("dur"), e.get("args")) for e in events[-6:] if e["ph"] in "XB"]
    assert calls == [
        ("X", "remote: save_kv_layer", 1.5, 2.5, {"calls": 32, "failed": False}),
        ("X", "remote", 4.0, 0.005, {"calls": 1, "failed": True}),
        ("B", "cpu", 1e6, None, None),
    ]
    code, output = run("--chrome", tmp_path / name)
    assert (code, "already exists: name another file" in output.replace("\n", " ")) == (1, True)
    code, output = run("--chrome", tmp_path / "no" / name)
    assert (code, "can't be written: No such file or directory" in output.replace("\n", " ")) == (1, True)


def test_the_trace_has_slow_loads_and_their_requests(tmp_path: Path) -> None:
    boxes = [begin(None), begin(1)]
    assert boxes[0].spans[URGENT].write(SLOW)
    note(boxes[0], 0, "build_connector_meta", time.perf_counter_ns(), 3000)
    assert run("--chrome", tmp_path / "t.json")[0] == 0
    events = events_of(tmp_path / "t.json")
    slices = [event for event in events if event.get("cat") == "load"]
    assert [event["name"].split()[0] for event in slices] == ["request", "queue", "load", "resume", "rank", "rank"]
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows[slices[0]["tid"]] == "requests and loads 1"
