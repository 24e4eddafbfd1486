"""A recording of vLLM's scheduler is read as the lookups, loads and first tokens that were."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvobs.cli.timeline import recordings
from kvobs.cli.whatif.comparison import compare
from kvobs.cli.whatif.history import History, histories
from kvobs.cli.whatif.replay import Settings
from kvobs.options import Options
from kvobs.state.lookup import NOBODY
from kvobs.telemetry.flight import OWN, What, pack
from kvobs.testing import BLOCK, Script
from tests.support.recording_rigs import Known, recording_rig
from tests.support.recordings import recorded

PROMPT = 4 * BLOCK + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


def history(folder: Path) -> History:
    (found,) = histories(recordings.load(folder))
    return found


def test_each_lookup_has_its_answers_its_load_and_its_first_token(folder: Path, a: Script, b: Script) -> None:
    rig = recording_rig(folder, a, b, ranks=2, options={"load_policy": "longest"})
    rig.connector._side._gains._cost = Known()
    a.offers |= {"async": (BLOCK, True), "sync": (0, False)}
    b.offers |= {"async": (2 * BLOCK, True), "sync": (3 * BLOCK, False)}
    for name in ("async", "sync", "none"):
        rig.add(name)
    rig.run(2)
    b.say(0, received="async")
    b.say(1, received="async")
    rig.run(4)
    found = history(folder)
    assert found.children == ["one", "two"]
    assert found.settings["load_policy"] == "longest"
    assert len(found.resumes_s) == 1
    by_async, by_sync, by_none = found.lookups
    assert {child: one.tokens for child, one in by_async.answers.items()} == {0: BLOCK, 1: 2 * BLOCK}
    assert (by_async.chosen, by_async.missing, by_async.local) == (1, PROMPT, 0)
    assert by_async.load is not None
    assert (by_async.load.child, by_async.load.tokens, by_async.load.outcome) == (1, 2 * BLOCK, "ok")
    assert by_async.load.seconds is not None
    assert by_async.load.waited_s is not None
    assert 0 < by_async.load.seconds <= by_async.load.waited_s
    assert by_async.computing == pytest.approx({OWN: 0.065, 0: 0.049 + 16e-6, 1: 0.033 + 32e-6})
    assert by_sync.load is not None
    assert by_sync.load.tokens == 3 * BLOCK
    assert by_sync.load.seconds == by_sync.load.waited_s, "what its step waited"
    assert (by_none.load, by_none.chosen) == (None, NOBODY)
    for one in found.lookups:
        assert one.arrived_ns is not None
        assert one.first_token_ns is not None
        assert one.arrived_ns <= one.began_ns <= one.ended_ns < one.first_token_ns
        assert one.is_only


def test_a_request_that_is_looked_up_again_has_a_lookup_for_each_time(folder: Path, a: Script, b: Script) -> None:
    rig = recording_rig(folder, a, b)
    a.offers["r"] = (BLOCK, True)
    b.offers["r"] = (2 * BLOCK, True)
    rig.add("r")
    rig.run(2)
    a.say(0, failed="r")
    rig.run(2)
    b.say(0, received="r")
    rig.run(4)
    assert rig.status("r") == "gone"
    first, second = history(folder).lookups
    assert first.load is not None
    assert second.load is not None
    assert (first.load.child, first.load.outcome) == (0, "failed")
    assert (second.load.child, second.load.outcome) == (1, "ok")
    assert set(second.answers) == {1}
    assert (first.is_only, second.is_only) == (False, False)


def test_a_lookup_that_did_not_wait_for_one_of_two_is_repeated_as_it_was(folder: Path, a: Script, b: Script) -> None:
    """From its file: whoever answered at once was asked with the other."""
    rig = recording_rig(folder, a, b, options={"lookup_timeout_ms": 2.0})
    a.offers["r"] = (None, False)
    b.offers["r"] = (BLOCK, True)
    rig.add("r")
    rig.step()
    time.sleep(0.004)
    rig.step()
    found = history(folder)
    (lookup,) = found.lookups
    assert {child: one.tokens for child, one in lookup.answers.items()} == {0: None, 1: BLOCK}
    assert lookup.answers[0].waited_ns > 2 * 10**6
    same = compare([found], [Settings.of(found.children, found.settings)])
    assert (same.lookups, same.known, same.repeated) == (0, 0, 0), "its load goes on"
    b.say(0, received="r")
    rig.run(4)
    found = history(folder)
    same = compare([found], [Settings.of(found.children, found.settings)])
    longer = compare([found], [Settings(("one", "two"), Options(lookup_timeout_ms=1000.0))])
    assert (same.lookups, same.known, same.repeated) == (1, 1, 1)
    assert (longer.lookups, longer.known, longer.unknown) == (1, 0, {"one": 1})


def test_a_lookup_in_progress_is_none_yet(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a)
    a.offers["r"] = (None, False)
    rig.add("r")
    rig.run(2)
    assert history(folder).lookups == []


def test_a_lookup_whose_first_records_are_overwritten_is_left_out() -> None:
    hook: dict[str, Any] = {"settings": {"load_policy": "first"}}
    own, other, ended = pack(What.ANSWER, OWN, n=32), pack(What.ANSWER, 0, n=64), pack(What.LOOKUP_ENDED, OWN)
    whole = recorded((10, 0, own, 5), (10, 0, other, 5), (2, 20, ended, 5), **hook)
    torn = recorded((10, 0, other, 5), (2, 20, ended, 5), **hook)
    (found,), (left,) = histories([whole]), histories([torn])
    assert [(one.local, one.answers[0].tokens) for one in found.lookups] == [(32, 64)]
    assert left.lookups == []


@pytest.mark.parametrize(
    ("processes", "says"),
    [
        ([recorded(rank=0, settings={"load_policy": "first"})], "no recording of a scheduler is here"),
        ([recorded()], "r is of an older kvobs, which did not record what lookups found"),
    ],
    ids=["ranks only", "old"],
)
def test_recordings_that_do_not_have_it_say_so(processes: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        histories(processes)
