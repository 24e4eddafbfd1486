"""The tables of a recording: what is in progress, the slowest loads, and a line for each request."""

import json
from pathlib import Path

from kvobs.cli.timeline import recordings, tables
from kvobs.cli.timeline.tables import Passage, as_dict, in_progress, of_requests, passages, slowest_loads
from kvobs.cli.timeline.transfers import join
from kvobs.telemetry.timeline.flight import OUTCOMES, OWN, What, pack
from kvobs.testing import Script
from tests.support.recording_rigs import served
from tests.support.recordings import recorded

MS = 10**6
LOAD, LOADED = pack(What.LOAD_BEGUN, 0, n=1024), pack(What.LOAD_ENDED, 0)
FAILED = pack(What.LOAD_ENDED, 1, n=OUTCOMES.index("failed"))
SAVE, ASKED = pack(What.SAVE_BEGUN, 1), pack(What.LOOKUP_BEGUN, OWN)
LAST = (12_000 * MS, 0, pack(What.CALL, OWN, "build_connector_meta"), 0)


def test_what_is_in_progress_has_its_age_and_the_ranks_that_it_waits_for() -> None:
    scheduler = recorded((0, 0, LOAD, 5), (9_000 * MS, 0, SAVE, 6), (10_000 * MS, 0, ASKED, 7), LAST)
    ranks = [recorded((MS, 0, LOAD, 5), (9_001 * MS, 0, SAVE, 6), rank=rank) for rank in (0, 1)]
    assert in_progress(join([scheduler, *ranks])) == [
        "in progress    age  request   tokens  waits for   connector",
        "load          12 s  00000000   1,024  ranks 0, 1  one",
        "save         3.0 s  00000000       -  ranks 0, 1  two",
        "lookup       2.0 s  00000000       -  -           -",
    ]


def test_more_than_there_is_room_for_is_counted() -> None:
    many = [(i * MS, 0, LOAD, i) for i in range(tables.IN_PROGRESS_AT_MOST + 3)]
    lines = in_progress(join([recorded(*many, LAST)]))
    assert (len(lines), lines[-1]) == (1 + tables.IN_PROGRESS_AT_MOST + 1, "and 3 more: see --requests")
    assert (in_progress(join([recorded(LAST)])), slowest_loads(join([recorded(LAST)]))) == ([], [])


def test_the_slowest_loads_come_first_with_their_last_rank() -> None:
    loads = [(0, i * MS, LOADED, i) for i in range(1, tables.SLOWEST_AT_MOST + 3)]
    scheduler = recorded((0, 0, LOAD, 2), *loads, (0, 30 * MS, FAILED, 99), (0, 90 * MS, pack(What.SAVE_ENDED, 0), 5))
    ranks = [recorded((0, (4 + 2 * rank) * MS, LOADED, 7), rank=rank) for rank in (0, 1)]
    lines = slowest_loads(join([scheduler, *ranks]))
    assert [line.split()[1:] for line in lines[1:]] == [
        ["30", "ms", "00000000", "-", "-", "two,", "failed"],
        ["7.0", "ms", "00000000", "-", "1", "+2.0", "ms", "one"],
        *[[f"{i}.0", "ms", "00000000", "-", "-", "one"] for i in (6, 5, 4)],
    ]


def test_processes_and_requests_have_their_engine_where_there_are_several() -> None:
    """And processes the length of their records."""
    found = passages(join([recorded((0, 0, ASKED, 5), engine=engine) for engine in (0, 3)]))
    assert [line.split()[-2:] for line in of_requests(found)[1:]] == [["engine", "0"], ["engine", "3"]]
    processes = [recorded((0, ms * MS, LOADED, 5), engine=engine) for engine, ms in enumerate((40_060, 50))]
    assert [" ".join(line.split()[1:]) for line in slowest_loads(join(processes))[1:]] == [
        "40 s 00000000 - - engine 0, one", "50 ms 00000000 - - engine 1, one"
    ]  # fmt: skip
    assert [" ".join(line.split()[:-1]) for line in tables.of_processes(processes)[1:]] == [
        "engine 0 scheduler 7 ended 0 1 0 40.1 s", "engine 1 scheduler 7 ended 0 1 0 50 ms"
    ]  # fmt: skip


# --- requests

LOOKED_UP, SAVED, RESUMED = pack(What.LOOKUP_ENDED, OWN), pack(What.SAVE_ENDED, 1), pack(What.RESUMED, 0)
REQUEST = 0x1234_5678_9ABC_DEF0
WHOLE = [
    (0, 0, ASKED, REQUEST), (0, 2 * MS, LOOKED_UP, REQUEST),
    (2 * MS, 0, LOAD, REQUEST), (2 * MS, 60 * MS, LOADED, REQUEST),
    (62 * MS, 3 * MS, RESUMED, REQUEST),
    (90 * MS, 0, SAVE, REQUEST), (90 * MS, 30 * MS, SAVED, REQUEST),
]  # fmt: skip
ON_RANKS = [
    [(3 * MS, 0, LOAD, REQUEST), (3 * MS, spent, LOADED, REQUEST), (91 * MS, 20 * MS, SAVED, REQUEST)]
    for spent in (20 * MS, 58 * MS)
]


def of(*records: tuple[int, int, int, int]) -> list[Passage]:
    return passages(join([recorded(*records), *(recorded(*own, rank=rank) for rank, own in enumerate(ON_RANKS))]))


def texts(found: list[Passage]) -> list[str]:
    """Return the lines without header and time of day."""
    return [" ".join(line.split()[1:]) for line in of_requests(found)[1:]]


def test_a_line_says_how_long_a_request_waited_for_what_and_marks_what_goes_on() -> None:
    assert texts(of(*WHOLE)) == ["12345678 2.0 ms 60 ms 1 +38 ms 3.0 ms 1,024 one, save two 30 ms"]
    looked_up = texts(of(*WHOLE[:1], (5 * MS, 0, ASKED, 7)))
    assert looked_up == ["12345678 >111 ms - - - - -", "00000000 >106 ms - - - - -"]
    assert texts(of(*WHOLE[:3])) == ["12345678 2.0 ms >109 ms 1 +38 ms - 1,024 one open"]
    missing = passages(join([recorded(*WHOLE[:3]), recorded(*ON_RANKS[0][:1], rank=0)]))
    assert texts(missing) == ["12345678 2.0 ms >1.0 ms - - 1,024 one open: rank 0"]


def test_how_it_ended_is_said_unless_it_went_well() -> None:
    failed = (2 * MS, 60 * MS, pack(What.LOAD_ENDED, 0, n=OUTCOMES.index("failed")), REQUEST)
    abandoned = (90 * MS, 30 * MS, pack(What.SAVE_ENDED, 1, n=OUTCOMES.index("abandoned")), REQUEST)
    line = "12345678 2.0 ms 60 ms 1 +38 ms - 1,024 one failed, save two abandoned 30 ms"
    assert texts(of(*WHOLE[:3], failed, abandoned)) == [line]
    aborted = (0, 2 * MS, pack(What.LOOKUP_ENDED, OWN, n=OUTCOMES.index("aborted")), REQUEST)
    assert texts(passages(join([recorded(aborted)]))) == ["12345678 2.0 ms - - - - aborted"]


def test_a_request_that_is_looked_up_again_has_another_line() -> None:
    """vLLM preempts it, or its load has failed."""
    later = [(start + 200 * MS, spent, what, request) for start, spent, what, request in WHOLE[:4]]
    first, second = of(*WHOLE, *later)
    assert first.load is not second.load
    assert (len(first.saves), len(second.saves)) == (1, 0)
    first, second = of(*WHOLE[:4], (200 * MS, MS, LOADED, REQUEST))  # its lookup is overwritten
    assert (first.lookup is not None, second.lookup, second.load is not None) == (True, None, True)


def test_a_line_of_json_has_all_of_it() -> None:
    (one,) = of(*WHOLE)
    said = json.loads(json.dumps(as_dict(one)))
    assert said == {
        "at": 1e9, "request": "123456789abcdef0", "run": "r", "engine": 0, "lookup": {"s": 0.002, "outcome": "ok"},
        "load": {
            "connector": "one", "s": 0.06, "outcome": "ok", "tokens": 1024,
            "ranks": [{"rank": 0, "s": 0.02, "outcome": "ok"}, {"rank": 1, "s": 0.058, "outcome": "ok"}],
            "last_rank": 1, "skew_s": 0.038, "waits_for": [],
        },
        "resume": {"s": 0.003, "outcome": "ok"},
        "saves": [{
            "connector": "two", "s": 0.03, "outcome": "ok", "tokens": None,
            "ranks": [{"rank": rank, "s": 0.02, "outcome": "ok"} for rank in (0, 1)],
            "last_rank": 0, "skew_s": 0.0, "waits_for": [],
        }],
    }  # fmt: skip
    (bare,) = of(*WHOLE[:2])
    assert [as_dict(bare)[part] for part in ("load", "resume", "saves")] == [None, None, []]


def test_a_real_recording_has_a_line_for_each_request_and_one_for_its_second_lookup(
    tmp_path: Path, a: Script, b: Script
) -> None:
    served(tmp_path / "t", a, b)
    found = passages(join(recordings.load(tmp_path / "t")))
    shape = [(one.load and one.load.outcome, one.resume is not None, len(one.saves)) for one in found]
    assert shape == [("ok", True, 0), (None, False, 1), ("ok", False, 0), ("failed", False, 0), (None, False, 0)]
    assert found[3].first.request == found[4].first.request, "after the failed load"
    assert all(one.lookup is not None for one in found)
