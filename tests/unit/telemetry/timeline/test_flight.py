"""Each process writes down its calls, steps, loads and saves as they begin and end; without the option, nothing."""

import re
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.cli.timeline import chrome_trace, recordings
from kvobs.cli.timeline.recordings import Process, Slice, Transfer
from kvobs.cli.timeline.snapshot import unpack
from kvobs.schema.options import TimelineOptions
from kvobs.telemetry.timeline import flight, ring_files
from kvobs.telemetry.timeline.flight import LAYER_HOOKS, N_AT_MOST, NAMES, OWN, Flight, What, pack
from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector, engine_config, transfer_config
from tests.support.recording_rigs import by_name, recording_rig, served
from tests.support.rig import assert_gone_after, child_config

SECRET = "s3cr3t-" + "0123456789" * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


@pytest.mark.parametrize("what", What)
def test_the_kind_of_a_record_is_one_word(what: What) -> None:
    for child in (0, 3, OWN):
        for hook in (NAMES[0], NAMES[-1]):
            for n in (0, 1, N_AT_MOST):
                word = pack(what, child, hook, n)
                assert unpack(word) == (what, child, NAMES.index(hook), n)
                assert 0 < word < 2**63
    assert unpack(pack(what, 0, n=N_AT_MOST + 1))[3] == N_AT_MOST


@pytest.fixture
def _without_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every empty step."""
    monkeypatch.setattr(Flight, "_begin_run", lambda *_, **__: None)


@pytest.mark.usefixtures("_without_runs")
def test_steps_are_on_a_track_of_their_own(folder: Path, a: Script, b: Script) -> None:
    served(folder, a, b)
    processes = by_name(folder)
    own = [one for one in processes["scheduler"].slices if one.track == 0]
    assert [one.name for one in own[:4]] == ["build_connector_meta", "update_connector_output"] * 2
    assert len(own) == 16
    for rank in range(2):
        steps = [one for one in processes[f"rank {rank}"].slices if one.track == 0]
        assert {one.name for one in steps} == {"step", "step without a forward"}
        assert len(steps) == 8
        inside = [one for one in processes[f"rank {rank}"].slices if one.track and one.name == "start_load_kv"]
        for one in inside:
            assert any(step.start <= one.start and ends(one) <= ends(step) for step in steps)


def test_a_run_of_empty_steps_is_one_record_and_its_last_calls(folder: Path, a: Script) -> None:
    """What led to it is still there, and whatever ends it is a record."""
    rig = recording_rig(folder, a)
    a.offers["load"] = (2 * BLOCK, True)
    rig.add("load")
    rig.run(100)
    for process in by_name(folder).values():
        assert len(process.slices) < 40
        (run,) = [one for one in process.slices if "steps" in one.name]
        assert re.fullmatch(r"(98|99) steps without a forward", run.name)
        inside = [one for one in process.slices if run.start <= one.start and one is not run and one.name != "step"]
        assert "build_connector_meta" in {one.name for one in inside} or "start_load_kv" in {one.name for one in inside}
        assert len([one for one in transfers(process) if one.end is None]) == 1
    a.say(0, received="load")
    rig.run(30)
    for process in by_name(folder).values():
        assert len([one for one in process.slices if "steps" in one.name]) == 2
        assert [one.outcome for one in transfers(process)] == ["ok"]
    arrows = [event["cat"] for event in chrome_trace.events(recordings.load(folder)) if event["ph"] == "f"]
    assert arrows == ["load"], "from the step that ordered it to the one that received the order"


def transfers(process: Process) -> list[Transfer]:
    return [one for one in process.transfers if one.kind in ("load", "save")]


def ends(one: Slice) -> int:
    assert one.end is not None
    return one.end


def test_loads_and_saves_are_in_the_files_of_both_sides(folder: Path, a: Script, b: Script) -> None:
    assert_nothing_goes_on(served(folder, a, b))
    processes = by_name(folder)
    ended = {
        name: sorted((one.kind, one.connector, one.outcome) for one in transfers(process) if one.end)
        for name, process in processes.items()
    }
    good = [("load", 0, "ok"), ("load", 0, "ok"), ("save", 1, "ok")]
    assert ended["scheduler"] == sorted([*good, ("load", 0, "failed")])
    assert ended["rank 0"] == sorted([*good, ("load", 0, "failed")])
    assert ended["rank 1"] == sorted([*good, ("load", 0, "ok")])
    begun = {
        name: {(one.kind, one.connector, one.request) for one in transfers(process) if one.begun is not None}
        for name, process in processes.items()
    }
    assert len(begun["scheduler"]) == 4
    assert begun["scheduler"] == begun["rank 0"] == begun["rank 1"]
    assert sorted(one.tokens for one in transfers(processes["scheduler"])) == [0, BLOCK, BLOCK, 2 * BLOCK]
    for process in processes.values():
        for one in process.transfers:
            assert process.first_ns <= one.start <= (one.end or one.start) <= process.last_ns


def waits(process: Process) -> list[tuple[str, str]]:
    return [(one.kind, one.outcome) for one in process.transfers if one.kind in ("lookup", "resume")]


def test_a_lookup_lasts_until_vllm_allocates_and_a_loaded_request_is_resumed(folder: Path, a: Script) -> None:
    """However often vLLM repeats it."""
    rig = recording_rig(folder, a, ranks=2)
    a.offers["r"] = (None, False)
    rig.add("r")
    rig.run(3)
    assert waits(by_name(folder)["scheduler"]) == [("lookup", "open")]
    a.offers["r"] = (BLOCK, True)
    rig.run(2)
    assert waits(by_name(folder)["scheduler"]) == [("lookup", "ok")]
    for rank in range(2):
        a.say(rank, received="r")
    rig.run(4)
    assert rig.status("r") == "gone"
    scheduler = by_name(folder)["scheduler"]
    assert waits(scheduler) == [("lookup", "ok"), ("resume", "ok")]
    lookup, load, resume = scheduler.transfers
    assert (lookup.connector, load.connector, resume.connector) == (OWN, 0, 0)
    assert lookup.request == load.request == resume.request
    for one, next_one in ((lookup, load), (load, resume)):
        assert one.end is not None
        assert one.start <= one.end <= next_one.start + 10**6, "the same moment, noted twice"
    assert waits(by_name(folder)["rank 0"]) == []


@pytest.mark.parametrize("state", ["asked", "loaded"])
def test_a_request_that_ends_waits_no_longer(folder: Path, a: Script, state: str) -> None:
    rig = recording_rig(folder, a)
    a.offers["r"] = (None, False) if state == "asked" else (BLOCK, True)
    rig.add("r")
    rig.run(2)
    if state == "loaded":
        a.say(0, received="r")
        rig.step()
    rig.abort("r")
    rig.run(2)
    assert waits(by_name(folder)["scheduler"]) == [("lookup", "aborted" if state == "asked" else "ok")]
    assert_nothing_goes_on(rig)


def assert_nothing_goes_on(rig: Rig) -> None:
    scheduler = next(one for one in rig.connector._side.listener._listeners if isinstance(one, flight.Flight))
    assert (scheduler._asked, scheduler._loaded) == ({}, {})
    for own in (scheduler, *(worker._side.flight for worker in rig.workers)):
        assert own._in_progress._rows == {}


def test_a_rank_that_need_not_report_has_nothing_in_progress(folder: Path, a: Script) -> None:
    """A connector may count on fewer ranks than there are."""
    a.finished_count = 1
    rig = recording_rig(folder, a, ranks=2)
    a.offers["r"] = (BLOCK, True)
    a.promises.add("r")
    rig.add("r")
    rig.run(2)
    a.say(0, received="r")
    rig.run(4)
    assert_gone_after(rig, a, 4, saved="r")
    assert_nothing_goes_on(rig)


def test_a_load_in_progress_outlasts_the_records(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a, ranks=2)
    a.offers["r"] = (BLOCK, True)
    rig.add("r")
    rig.run(2)
    a.say(0, received="r")
    rig.run(2)
    for own in (rig.connector._side.listener._listeners[1], *(worker._side.flight for worker in rig.workers)):
        for _ in range(own._ring.room):
            own._ring.add(own._now_ns - own._wall_offset, 0, pack(What.CALL, OWN, "build_connector_meta"))
    processes = by_name(folder)
    found = {name: [(one.kind, one.begun, one.end) for one in own.transfers] for name, own in processes.items()}
    assert found == {"scheduler": [("load", None, None)], "rank 0": [], "rank 1": [("load", None, None)]}
    (scheduler, rank) = (processes[name].transfers[0] for name in ("scheduler", "rank 1"))
    assert scheduler.request == rank.request
    assert scheduler.tokens == BLOCK
    assert scheduler.start < processes["scheduler"].first_ns


def test_a_steps_layers_are_one_record_for_each_child(folder: Path, a: Script, b: Script) -> None:
    rig = recording_rig(folder, a, b)
    worker = rig.workers[0]
    worker.bind_connector_metadata(rig.scheduler.schedule().kv_connector_metadata)
    for i in range(5):
        worker.wait_for_layer_load(f"layer.{i}")
        worker.save_kv_layer(f"layer.{i}", None, None)
    worker.get_kv_connector_stats()
    worker.clear_connector_metadata()
    process = by_name(folder)["rank 0"]
    layers = [one for one in process.slices if one.track >= recordings.LAYERS]
    assert sorted((one.name, process.track_name(one.track)) for one in layers) == [
        (f"{hook} x5", f"{child}: {hook}") for hook in sorted(LAYER_HOOKS) for child in ("one", "two")
    ]
    (step,) = [one for one in process.slices if one.track == 0]
    for one in layers:
        assert step.start <= one.start < ends(one) <= ends(step)
        assert 0 < one.args["total, ms"] * 1e6 <= ends(one) - one.start


@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer", "wait_for_save", "start_load_kv"])
def test_files_name_open_calls(hook: str, folder: Path, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    original = getattr(ScriptedConnector, hook)

    def looking(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        process = by_name(folder)["rank 0"]
        seen.append([f"{process.track_name(one.track)}, {one.name}" for one in process.open])

    monkeypatch.setattr(ScriptedConnector, hook, looking)
    rig = recording_rig(folder, a, b)
    rig.add("r")
    rig.step()
    shown = f": {hook}, {hook}" if hook in LAYER_HOOKS else f", {hook}"
    assert seen == [["one" + shown], ["two" + shown]]
    assert by_name(folder)["rank 0"].open == []


@pytest.mark.parametrize("hook", ["wait_for_layer_load", "start_load_kv"])
def test_a_call_that_raised_has_ended(hook: str, folder: Path, a: Script, b: Script) -> None:
    rig = recording_rig(folder, a, b)
    rig.add("r")
    b.raises[hook] = RuntimeError(SECRET)
    with pytest.raises(RuntimeError, match="s3cr3t"):
        rig.step()
    process = by_name(folder)["rank 0"]
    assert [one.name for one in process.open] == ["step"]
    if hook == "start_load_kv":
        (raised,) = [one for one in process.slices if one.args.get("raised")]
        assert (raised.track, raised.name) == (2, hook)


def test_the_files_hold_no_content_and_no_ids(folder: Path, a: Script, b: Script) -> None:
    """Not even hashes of ids that whoever knows an id could check, without the engine's own."""
    rig = recording_rig(folder, a, b)
    a.offers[SECRET] = (BLOCK, True)
    b.promises.add(SECRET)
    b.params[SECRET] = {"key": SECRET}
    rig.add(SECRET, trace_headers={"x": SECRET}, secret=SECRET)
    rig.run(2)
    a.say(0, received=SECRET)
    rig.run(2)
    a.raises["wait_for_save"] = RuntimeError(SECRET)
    with pytest.raises(RuntimeError):
        rig.run(4)
    held = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"wait_for_save" in held
    assert b"s3cr3t" not in held
    assert blake2b(SECRET.encode(), digest_size=8).digest() not in held
    assert rig.connector._vllm_config.kv_transfer_config.engine_id.encode() not in held
    request = next(one.request for one in by_name(folder)["scheduler"].transfers)
    assert request.to_bytes(8, "little", signed=True) in held
    assert len({one.request for process in by_name(folder).values() for one in process.transfers}) == 1


def test_any_text_may_be_an_id() -> None:
    flight: Any = SimpleNamespace(_key=b"key")
    assert Flight._hashed(flight, "\ud800") != Flight._hashed(flight, "\ud801")


def test_without_the_option_it_is_off(tmp_path: Path, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_files, "create", None)
    rig = Rig("kvobs", a, b)
    rig.run(2)
    for side in (rig.connector._side, rig.workers[0]._side):
        assert side.children[0].wait_for_save.__qualname__ == "Recorder.timed.<locals>.recorded"
    assert rig.workers[0]._side.flight is None
    assert "times" not in rig.workers[0].wait_for_layer_load.__code__.co_varnames


@pytest.mark.parametrize("problem", ["no parent", "others' folder"])
def test_who_cannot_write_serves(problem: str, tmp_path: Path, a: Script, caplog: pytest.LogCaptureFixture) -> None:
    folder, says = tmp_path / "timeline", "has mode 777; use a folder of user"
    if problem == "no parent":
        folder, says = tmp_path / "not" / "there", "No such file or directory"
    else:
        folder.mkdir()
        folder.chmod(0o777)
    rig = recording_rig(folder, a, ranks=2)
    rig.add("r")
    rig.run(4)
    assert rig.status("r") == "gone"
    lines = [line.getMessage() for line in caplog.records if "timeline" in line.getMessage()]
    assert len(lines) == 1, "said once"
    assert says in lines[0]
    assert f"kvobs.timeline.dir is {folder}" in lines[0]


def test_the_engines_of_data_parallelism_are_separate_and_are_one_run(folder: Path, a: Script) -> None:
    for suffix in ("_dp0", "_dp1"):
        config = engine_config(transfer_config("kvobs", [child_config(a)], engine_id=f"e{suffix}"))
        assert flight.begin(TimelineOptions(dir=str(folder)), config, 0, ["one"], 0) is not None
    processes = recordings.load(folder)
    assert [process.engine for process in processes] == [0, 1]
    assert recordings.process_names(processes) == ["engine 0 rank 0", "engine 1 rank 0"]
