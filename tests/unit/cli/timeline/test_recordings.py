"""Recordings are read as they were written, whatever is in the folder beside them."""

import struct
from pathlib import Path

import pytest
from kvobs.telemetry.timeline.flight import LAYER_HOOKS, OWN, What, pack
from kvobs.telemetry.timeline.ring import Ring

from kvobs.cli.timeline import recordings
from kvobs.cli.timeline.recordings import OPEN, UNREPORTED, engine_names, process_names, request_name
from tests.support.recordings import recorded


def test_another_recording_is_named_and_a_link_is_not_followed(tmp_path: Path) -> None:
    memory = bytearray(4096)
    Ring(memory, {"run": 5})
    path = tmp_path / "x.ring"
    path.write_bytes(memory)
    with pytest.raises(ValueError, match="x.ring can't be read: its content is invalid"):
        recordings.load(tmp_path)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"x\.ring can't be read: Too many levels of symbolic links"):
        recordings.load(tmp_path)


def test_the_layer_hook_that_had_not_ended_is_there() -> None:
    """Its child's last call began after the last end."""
    process = recorded(layer_times=struct.pack("<3d", 1.5e-6, 2.5e-6, 2e-6))
    (one,) = process.open
    assert (process.track_name(one.track), one.start, one.end) == (f"two: {LAYER_HOOKS[0]}", EPOCH + 2500, None)


LOAD, LOADED = pack(What.LOAD_BEGUN, 1, n=64), pack(What.LOAD_ENDED, 1)
KEY = (What.LOAD_BEGUN, 1, 5)
EPOCH = 10**18


def test_a_begin_and_its_end_or_the_next_begin_are_one_transfer() -> None:
    (one,) = recorded((100, 0, LOAD, 5), (90, 50, LOADED, 5)).transfers
    assert (one.begun, one.start, one.end) == (EPOCH + 100, EPOCH + 90, EPOCH + 140)
    assert (one.tokens, one.outcome) == (64, "ok")
    # An order that comes again ends the one before: the scheduler has closed it, and a rank need not report.
    first, second = recorded((100, 0, LOAD, 5), (200, 0, LOAD, 5)).transfers
    assert (first.end, first.outcome) == (EPOCH + 200, UNREPORTED)
    assert (second.end, second.outcome) == (None, OPEN)


def test_what_is_in_progress_and_has_no_record_any_more_is_there() -> None:
    process = recorded((9000, 10, pack(What.CALL, 0, "take_events"), 0), in_progress={KEY: (LOAD, 1000)})
    (one,) = process.transfers
    assert (one.kind, one.connector, one.request, one.tokens) == ("load", 1, 5, 64)
    assert (one.begun, one.start, one.end) == (None, EPOCH + 1000, None)
    assert process.first_ns == EPOCH + 9000, "the records go back as far as before"
    assert process.begin_ns == EPOCH + 1000
    (recorded_too,) = recorded((1000, 0, LOAD, 5), in_progress={KEY: (LOAD, 1000)}).transfers
    assert recorded_too.begun == EPOCH + 1000, "it is there once"


def test_the_last_part_has_what_goes_on_in_it() -> None:
    """Whole; an earlier call that never ended only if none followed it on its track."""
    step, call = pack(What.CALL, OWN, "step", 1), pack(What.CALL, 0, "wait_for_save")
    process = recorded(
        (100, 50, step, 0), (110, -1, call, 0), (200, -1, step, 0), (300, 700, step, 0), (1200, 100, step, 0),
        (120, 0, LOAD, 5), (130, 0, LOAD, 6), (130, 100, LOADED, 6), (140, 0, LOAD, 7), (140, 900, LOADED, 7),
    )  # fmt: skip
    process.keep_from(EPOCH + 1000)
    assert [(one.name, one.start - EPOCH) for one in process.slices] == [
        ("wait_for_save", 110), ("step", 300), ("step", 1200)
    ]  # fmt: skip
    assert [(one.request, one.outcome) for one in process.transfers] == [(5, OPEN), (7, "ok")]
    assert (process.first_ns, process.last_ns) == (EPOCH + 1000, EPOCH + 1300)


def test_runs_and_engines_are_named_where_there_are_several_and_a_request_is_its_hash() -> None:
    assert (request_name(-1), request_name(5)) == ("f" * 16, "0" * 15 + "5")
    scheduler, rank = recorded(), recorded(rank=3)
    second, earlier = recorded(engine=1), recorded(run="q")
    assert process_names([scheduler, rank]) == ["scheduler", "rank 3"]
    assert process_names([rank, second]) == ["engine 0 rank 3", "engine 1 scheduler"]
    assert process_names([earlier, rank]) == ["run 1, scheduler", "run 2, rank 3"]
    assert process_names([earlier, second]) == ["run 1, engine 0 scheduler", "run 2, engine 1 scheduler"]
    assert engine_names([("r", 0), ("r", 0)]) == ["", ""]
    assert engine_names([("q", 0), ("r", 1)]) == ["run 1, engine 0", "run 2, engine 1"]
