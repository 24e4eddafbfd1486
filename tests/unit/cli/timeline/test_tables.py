"""The tables of a recording: what is in progress, and the slowest loads."""

from kvobs.telemetry.timeline.flight import OUTCOMES, OWN, What, pack

from kvobs.cli.timeline import tables
from kvobs.cli.timeline.tables import in_progress, slowest_loads
from kvobs.cli.timeline.transfers import join
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
    lines = in_progress(join([recorded(*[(i * MS, 0, LOAD, i) for i in range(tables.IN_PROGRESS_AT_MOST + 3)], LAST)]))
    assert (len(lines), lines[-1]) == (1 + tables.IN_PROGRESS_AT_MOST + 1, "and 3 more")
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


def test_processes_and_loads_have_their_engine_where_there_are_several() -> None:
    """And processes the length of their records."""
    processes = [recorded((0, ms * MS, LOADED, 5), engine=engine) for engine, ms in enumerate((40_060, 50))]
    assert [" ".join(line.split()[1:]) for line in slowest_loads(join(processes))[1:]] == [
        "40 s 00000000 - - engine 0, one", "50 ms 00000000 - - engine 1, one"
    ]  # fmt: skip
    assert [" ".join(line.split()[:-1]) for line in tables.of_processes(processes)[1:]] == [
        "engine 0 scheduler 7 ended 0 1 0 40.1 s", "engine 1 scheduler 7 ended 0 1 0 50 ms"
    ]  # fmt: skip
