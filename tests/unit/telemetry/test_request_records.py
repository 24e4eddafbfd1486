"""The scheduler's file has what `kvobs whatif` needs of each request."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.cli.timeline.recordings import Found
from kvobs.state.compute_cost import ComputeCost
from kvobs.telemetry.flight import OWN, What
from kvobs.telemetry.request_records import ASYNC, CHOSEN, CROWDED, UNANSWERED, RequestRecords
from kvobs.testing import BLOCK, Rig, Script
from tests.support.recording_rigs import Known, by_name, recording_rig

PROMPT = 4 * BLOCK + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timeline"


def found(folder: Path, what: What) -> list[Found]:
    return [one for one in by_name(folder)["scheduler"].found if one.what is what]


def answers(folder: Path) -> list[tuple[int, int, int]]:
    return [(one.child, one.n, one.flags) for one in found(folder, What.ANSWER)]


def records(rig: Rig) -> RequestRecords:
    listeners = rig.connector._side._listener._listeners
    return next(one for one in listeners if isinstance(one, RequestRecords))


def test_the_answers_of_a_lookup_are_recorded_once_when_it_ends(folder: Path, a: Script, b: Script) -> None:
    """However often vLLM repeats it, and not again when the request is resumed."""
    rig = recording_rig(folder, a, b)
    a.offers["r"] = [(None, False), (None, False), (BLOCK, True)]
    b.offers["r"] = (2 * BLOCK, False)
    rig.add("r")
    rig.run(2)
    assert answers(folder) == []
    rig.run(1)
    a.say(0, received="r")
    rig.run(4)
    assert rig.status("r") == "gone"
    assert answers(folder) == [(OWN, 0, 0), (0, BLOCK, ASYNC | CHOSEN), (1, 2 * BLOCK, 0)]
    spent = [one.spent for one in found(folder, What.ANSWER)]
    assert spent[0] == spent[2] == 0
    assert 0 < spent[1] < 10**10
    assert len({one.request for one in by_name(folder)["scheduler"].found}) == 1
    computing = [(one.child, one.n, one.spent) for one in found(folder, What.COMPUTING)]
    assert computing == [(OWN, PROMPT, -1), (0, PROMPT - BLOCK, -1), (1, PROMPT - 2 * BLOCK, -1)], "no estimate yet"


def test_one_that_was_not_waited_for_has_no_answer(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a)
    a.offers["r"] = (None, False)
    rig.connector._side._offers._timeout_ns = 0
    rig.add("r")
    rig.step()
    assert answers(folder) == [(OWN, 0, 0), (0, 0, UNANSWERED)]


def test_the_settings_that_decide_are_in_the_file(folder: Path, a: Script) -> None:
    recording_rig(folder, a, options={"load_policy": "longest"})
    settings = by_name(folder)["scheduler"].settings
    assert settings["load_policy"] == "longest"
    assert settings["wait_for"] == "all"
    assert settings["lookup_timeout_ms"] is None


def test_the_first_token_is_recorded_from_the_requests_arrival(folder: Path, a: Script, b: Script) -> None:
    """After an asynchronous load, a synchronous one, and none; also of a request that ends with it."""
    rig = recording_rig(folder, a, b)
    a.offers |= {"async": (BLOCK, True), "sync": (BLOCK, False)}
    before = time.time()
    for name in ("async", "sync", "none"):
        rig.add(name, max_tokens=3)
    rig.add("one", max_tokens=1)
    rig.step()
    assert len(found(folder, What.FIRST_TOKEN)) == 3
    rig.run(2)
    a.say(0, received="async")
    rig.run(2)
    first = found(folder, What.FIRST_TOKEN)
    assert len(first) == len({one.request for one in first}) == 4
    assert all(one.n == PROMPT and one.spent > 0 for one in first)
    assert all(before * 1e9 - 10**6 <= one.start <= one.start + one.spent <= time.time_ns() + 10**6 for one in first)
    rig.run(4)
    assert len(found(folder, What.FIRST_TOKEN)) == 4
    assert len(records(rig)) == 0


def test_a_request_that_ends_before_its_first_token_has_none(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a)
    a.offers |= {"asked": (None, False), "loading": (BLOCK, True)}
    rig.add("asked")
    rig.add("loading")
    rig.run(2)
    assert len(records(rig)) == 2
    for name in ("asked", "loading"):
        rig.abort(name)
    a.say(0, received="loading")
    rig.run(2)
    assert found(folder, What.FIRST_TOKEN) == []
    assert len(records(rig)) == 0


def test_a_failed_load_is_followed_by_another_lookup_and_one_first_token(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a)
    a.offers["r"] = (BLOCK, True)
    rig.add("r")
    rig.run(2)
    a.say(0, failed="r")
    rig.run(4)
    assert rig.status("r") == "gone"
    assert answers(folder) == [(OWN, 0, 0), (0, BLOCK, ASYNC | CHOSEN), (OWN, 0, 0)], "the second does not count"
    assert len(found(folder, What.FIRST_TOKEN)) == 1
    assert len(records(rig)) == 0


def test_what_a_request_waited_is_recorded_for_both_kinds_of_loads(folder: Path, a: Script) -> None:
    rig = recording_rig(folder, a)
    a.offers |= {"async": (BLOCK, True), "sync": (2 * BLOCK, False)}
    for name in ("async", "sync"):
        rig.add(name)
    rig.run(2)
    a.say(0, received="async")
    rig.run(4)
    assert sorted((one.child, one.n) for one in found(folder, What.WAITED)) == [(0, BLOCK), (0, 2 * BLOCK)]
    assert all(one.spent > 0 for one in found(folder, What.WAITED) if one.n == BLOCK)


def test_what_computing_takes_is_that_of_the_tokens_which_are_left(folder: Path, a: Script, b: Script) -> None:
    """One at least is computed."""
    rig = recording_rig(folder, a, b)
    rig.connector._side._gains._cost = cost = Known()
    cost.crowding = 2.346
    a.offers["r"] = (4 * BLOCK, True)
    b.offers["r"] = (0, False)
    rig.add("r", tokens=4 * BLOCK)
    rig.step()
    computing = [(one.child, one.n, one.spent) for one in found(folder, What.COMPUTING)]
    n = 4 * BLOCK
    assert computing == [(OWN, n, n * 10**6), (0, 1, 10**6 + (n - 1) * 1000)]
    assert [one.flags / CROWDED for one in found(folder, What.COMPUTING)] == [2.35, 2.35]


def test_a_clock_that_is_ahead_gives_no_time_below_zero(folder: Path, a: Script) -> None:
    """That of the API server's machine."""
    rig = recording_rig(folder, a)
    request: Any = rig.add("r", max_tokens=1)
    request.arrival_time = time.time() + 3600
    rig.run(3)
    (first,) = found(folder, What.FIRST_TOKEN)
    assert 0 < first.spent < 60 * 10**9
    assert first.start <= time.time_ns()


def test_an_allocation_that_no_lookup_precedes_is_not_recorded() -> None:
    written: list[Any] = []
    flight: Any = SimpleNamespace(of_request=lambda *record: written.append(record), hashed=hash, wall_offset=0)
    request: Any = SimpleNamespace(request_id="r", num_tokens=5, num_output_tokens=0)
    RequestRecords(flight).settled(request, None, SimpleNamespace(cost=ComputeCost(8)))  # type: ignore[arg-type]
    assert written == []
