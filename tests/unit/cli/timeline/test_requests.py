"""Each request has a line: what it waited for, on which rank, and what became of it."""

from __future__ import annotations

import json
from pathlib import Path

from kvobs.cli.timeline import recordings, requests
from kvobs.cli.timeline.requests import Passage, as_dict, lines, passages
from kvobs.cli.timeline.transfers import join
from kvobs.telemetry.timeline.flight import OUTCOMES, OWN, What, pack
from kvobs.testing import Script
from tests.support.recording_rigs import served
from tests.support.recordings import recorded

US = 1000
MS = 1000 * US
ASKED, LOOKED_UP = pack(What.LOOKUP_BEGUN, OWN), pack(What.LOOKUP_ENDED, OWN)
LOAD, LOADED = pack(What.LOAD_BEGUN, 0, n=64), pack(What.LOAD_ENDED, 0)
SAVE, SAVED, RESUMED = pack(What.SAVE_BEGUN, 1), pack(What.SAVE_ENDED, 1), pack(What.RESUMED, 0)
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
    return [" ".join(line.split()[1:]) for line in lines(found)[1:]]


def test_a_line_says_how_long_a_request_waited_for_what() -> None:
    assert texts(of(*WHOLE)) == ["12345678 2.0 ms 60 ms 1 +38 ms 3.0 ms 64 one, save two 30 ms"]


def test_what_goes_on_is_marked() -> None:
    assert texts(of(*WHOLE[:1], (5 * MS, 0, ASKED, 7))) == [
        "12345678 >111 ms - - - - -", "00000000 >106 ms - - - - -"
    ]  # fmt: skip
    assert texts(of(*WHOLE[:3])) == ["12345678 2.0 ms >109 ms 1 +38 ms - 64 one open"]
    missing = passages(join([recorded(*WHOLE[:3]), recorded(*ON_RANKS[0][:1], rank=0)]))
    assert texts(missing) == ["12345678 2.0 ms >1.0 ms - - 64 one open: rank 0"]


def test_how_it_ended_is_said_unless_it_went_well() -> None:
    failed = (2 * MS, 60 * MS, pack(What.LOAD_ENDED, 0, n=OUTCOMES.index("failed")), REQUEST)
    abandoned = (90 * MS, 30 * MS, pack(What.SAVE_ENDED, 1, n=OUTCOMES.index("abandoned")), REQUEST)
    assert texts(of(*WHOLE[:3], failed, abandoned)) == [
        "12345678 2.0 ms 60 ms 1 +38 ms - 64 one failed, save two abandoned 30 ms"
    ]
    aborted = (0, 2 * MS, pack(What.LOOKUP_ENDED, OWN, n=OUTCOMES.index("aborted")), REQUEST)
    assert texts(passages(join([recorded(aborted)]))) == ["12345678 2.0 ms - - - - aborted"]


def test_a_request_that_is_looked_up_again_has_another_line() -> None:
    """vLLM preempts it, or its load has failed."""
    later = [(start + 200 * MS, spent, what, request) for start, spent, what, request in WHOLE[:4]]
    first, second = of(*WHOLE, *later)
    assert first.load is not second.load
    assert (len(first.saves), len(second.saves)) == (1, 0)


def test_a_second_load_whose_lookup_is_overwritten_has_another_line() -> None:
    first, second = of(*WHOLE[:4], (200 * MS, MS, LOADED, REQUEST))
    assert (second.lookup, second.load is not None) == (None, True)
    assert first.lookup is not None


def test_engines_are_named_where_there_are_several() -> None:
    found = passages(join([recorded(*WHOLE[:2], engine=engine) for engine in (0, 3)]))
    assert [text.partition("- engine")[2] for text in texts(found)] == [" 0", " 3"]


def test_a_line_of_json_has_all_of_it() -> None:
    (one,) = of(*WHOLE)
    said = json.loads(json.dumps(as_dict(one)))
    assert said == {
        "at": 1e9,
        "request": "123456789abcdef0",
        "run": "r",
        "engine": 0,
        "lookup": {"s": 0.002, "outcome": "ok"},
        "load": {
            "connector": "one", "s": 0.06, "outcome": "ok", "tokens": 64,
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
    found = requests.passages(join(recordings.load(tmp_path / "t")))
    shape = [(one.load and one.load.outcome, one.resume is not None, len(one.saves)) for one in found]
    assert shape == [
        ("ok", True, 0), (None, False, 1), ("ok", False, 0), ("failed", False, 0), (None, False, 0)
    ]  # fmt: skip
    assert found[3].first.request == found[4].first.request, "after the failed load"
    assert all(one.lookup is not None for one in found)
