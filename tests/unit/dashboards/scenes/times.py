"""Scenes of an hour, each with the alerts that fire in it, and when: none other does, at any time."""

from collections.abc import Callable, Mapping

from tests.unit.dashboards.scenes.failures import loads
from tests.unit.dashboards.scenes.scene import BUILD, START, Series
from tests.unit.dashboards.scenes.waiting import CALL, OLDEST, OLDEST_LOAD, OLDEST_LOOKUP
from tests.unit.dashboards.scenes.worth import load_times, paces

MINUTES = 60
Phases = tuple[tuple[float, float | str], ...]
"""So many minutes, in which a counter rises by so much a minute, or a gauge stays at it, or there is nothing."""
Times = tuple[int, int, int, int]
"""Minutes: it fires after the first, from the second to the third, and no more from the fourth on."""
Scene = tuple[Series, Mapping[str, Times]]


def counted(*phases: tuple[float, float | str]) -> str:
    """Return a counter's samples; "new" begins at 0 again."""
    values, total = [], 0.0
    for minutes, rate in phases:
        total = 0.0 if rate == "new" else total
        for _ in range(int(2 * minutes)):
            total += rate / 2 if isinstance(rate, int | float) else 0
            values.append(rate if isinstance(rate, str) else f"{total:g}")
    return " ".join("stale" if value == "new" else value for value in values)


def held(*phases: tuple[float, float | str]) -> str:
    """Return a gauge's samples."""
    return " ".join(str(value) for minutes, value in phases for _ in range(int(2 * minutes)))


def loaded(*phases: tuple[float, float, float]) -> dict[str, str]:
    """Return loads in phases: minutes, loads a minute, and the share of them that take 1 to 4 s."""
    total, quick = ([(m, rate * part(slow)) for m, rate, slow in phases] for part in (lambda _: 1, lambda s: 1 - s))
    return load_times(counted(*quick), counted(*total), counted(*((m, rate * 100) for m, rate in total)))


def slowed(*phases: tuple[float, float], loads: int = 300) -> dict[str, str]:
    """Return loads in phases: minutes, and how many times the 0.2 s of a day ago they take."""
    seconds = counted(*((m, times * loads / 5) for m, times in phases))
    return paces(seconds, counted((MINUTES, loads * 20_000 / 3)), counted((MINUTES, loads)))


def failed(*phases: tuple[float, float | str, float | str], policy: str = "recompute") -> dict[str, str]:
    """Return loads in phases: minutes, and how many fail and end well in a minute."""
    return dict(loads(counted(*((m, f) for m, f, _ in phases)), counted(*((m, ok) for m, _, ok in phases)), policy))


def blocked(*phases: tuple[float, float | str], calls: float = 600, connector: str = "disk") -> dict[str, str]:
    """Return a connector's lookups by the share of the scheduler's time in them, and how many there are in a minute."""
    of = f'{{connector="{connector}",hook="get_num_new_matched_tokens"}}'
    seconds = [(m, share * 60 if isinstance(share, int | float) else share) for m, share in phases]
    often = [(m, calls if isinstance(share, int | float) else share) for m, share in phases]
    return {
        f"kvobs_call_duration_seconds_sum{of}": counted(*seconds),
        f"kvobs_call_duration_seconds_count{of}": counted(*often),
    }


def rare(metric: str, *phases: tuple[float, float | str]) -> dict[str, str]:
    return {metric: held(*phases)}


def replaced(at: float, gap: float = 0) -> dict[str, str]:
    """Return the start of an engine whose next life begins at this minute, after some without it."""
    return {START: held((at - gap, -86400), (gap, "stale"), (MINUTES - at, at * 60))}


def gone(at: float) -> dict[str, str]:
    """Return what a target has that is removed with its engine."""
    return {name: held((at, value), (1, "stale")) for name, value in (("up", 1), (BUILD, 1), (START, -86400))}


def restarted(series: Series, missed: int = 1) -> dict[str, str]:
    """Return what is scraped of an exporter that starts again each five minutes."""
    whole = {**series, START: held((MINUTES, -86400)), BUILD: held((MINUTES, 1)), "up": held((MINUTES, 1))}
    lost = {begin + sample for begin in range(10, 2 * MINUTES, 10) for sample in range(missed)}

    def missing(name: str, samples: list[str]) -> str:
        return " ".join(("0" if name == "up" else "stale") if i in lost else s for i, s in enumerate(samples))

    return {name: missing(name, values.split()) for name, values in whole.items()}


def each_minute(series: Series) -> dict[str, str]:
    """Return what is seen by scrapes that are 60 s apart."""
    whole = {**series, START: held((MINUTES, -86400)), BUILD: held((MINUTES, 1)), "up": held((MINUTES, 1))}
    return {name: " ".join("_" if i % 2 else s for i, s in enumerate(v.split())) for name, v in whole.items()}


ERRORS = 'kvobs_call_errors_total{hook="get_num_new_matched_tokens",error_type="TimeoutError"}'
INTERNAL = 'kvobs_internal_errors_total{where="merge"}'
STUCK = 'kvobs_stuck_transfers_total{rank="1"}'
BUSY = {'kvobs_overhead_seconds_total{stage="record"}': counted((MINUTES, 0.1))}
WELL, END = (MINUTES, 200, 0.0), MINUTES + 1
SLOW, FAILING, BLOCKS = "KvobsLoadsSlow", "KvobsConnectorFailing", "KvobsConnectorBlocksScheduler"
SLOWED = "KvobsLoadsSlowed"

SLOW_TO_END = loaded((10, 200, 0), (50, 200, 1))
SLOW_FOR_TEN = loaded((10, 200, 0), (10, 200, 1), (40, 200, 0))
FOUR_OF_ELEVEN = loaded((10, 200, 0), *((4, 200, 1), (7, 200, 0)) * 4, (6, 200, 0))
FAILS_FOR_TEN = failed((10, 0, 100), (10, 20, 80), (40, 0, 100))
BLOCKS_FOR_TWELVE = blocked((10, 0.01), (12, 0.3), (38, 0.01))
FIVE_TIMES = slowed((10, 1), (50, 5))
HANGS: Callable[..., str] = lambda begin, minutes: " ".join(  # noqa: E731
    ["_"] * (2 * begin) + [str(30 * i) for i in range(2 * minutes)] + ["stale"]
)

SCENES: dict[str, Scene] = {
    "slow to the end": (SLOW_TO_END, {SLOW: (10, 13, 60, END)}),
    "slow, scraped each minute": (each_minute(SLOW_TO_END), {SLOW: (10, 13, 60, END)}),
    "slow, its exporter restarts": (restarted(SLOW_TO_END), {SLOW: (10, 13, 60, END)}),
    "slow, its exporter restarts for a minute": (restarted(SLOW_TO_END, 2), {SLOW: (10, 13, 60, END)}),
    "slow for ten minutes": (SLOW_FOR_TEN, {SLOW: (10, 13, 28, 33)}),
    "slow for four of eleven minutes": (FOUR_OF_ELEVEN, {SLOW: (10, 13, 19, END)}),
    "slow for half a minute": (loaded((10, 200, 0), (0.5, 200, 1), (49.5, 200, 0)), {}),
    "half a minute of it, scraped each minute": (each_minute(loaded((10, 200, 0), (0.5, 200, 1), (49, 200, 0))), {}),
    "slow, of few loads": (loaded((MINUTES, 2, 1)), {}),
    "one in fifty is slow": (loaded((10, 200, 0), (50, 200, 0.02)), {SLOW: (18, 23, 60, END)}),
    "one in fifty, for four minutes": (loaded((10, 200, 0), (4, 200, 0.02), (46, 200, 0)), {}),
    "one in fifty, its exporter restarts": (
        restarted(loaded((10, 200, 0), (50, 200, 0.02))), {SLOW: (18, 23, 60, END)},
    ),
    "one in 200": (loaded((MINUTES, 200, 0.005)), {}),
    "fewer loads as they get slow": (loaded((10, 600, 0), (50, 20, 1)), {SLOW: (10, 13, 60, END)}),
    "slow while another takes 40 %, by lookups of 2 s": (
        SLOW_TO_END | blocked((10, 0.01), (50, 0.4), calls=12, connector="remote"), {BLOCKS: (14, 17, 60, END)},
    ),
    "slow while another takes 12 %, by quick lookups": (
        SLOW_TO_END | blocked((10, 0.01), (50, 0.12), connector="remote"),
        {SLOW: (10, 13, 60, END), BLOCKS: (15, 18, 60, END)},
    ),
    "slow, and replaced": (SLOW_FOR_TEN | replaced(22), {SLOW: (10, 13, 21, 23)}),
    "slow, replaced after two minutes": (SLOW_FOR_TEN | replaced(22, 2), {SLOW: (10, 13, 20, 23)}),
    "slow, and so is the next": (SLOW_TO_END | replaced(30), {SLOW: (10, 13, 29, END)}),
    "slow, and gone": (
        {n: " ".join(v.split()[:40]) + " stale" for n, v in SLOW_TO_END.items() if "x" not in v.split()[0]}
        | gone(20), {SLOW: (10, 13, 20, 23), "KvobsJobMissing": (34, 36, 60, END)}),
    "fails for ten minutes": (FAILS_FOR_TEN, {FAILING: (14, 16, 27, 31)}),
    "fails, scraped each minute": (each_minute(FAILS_FOR_TEN), {FAILING: (14, 17, 27, 32)}),
    "fails, its exporter restarts": (restarted(FAILS_FOR_TEN), {FAILING: (14, 17, 27, 32)}),
    "requests fail": (
        failed((10, 0, 100), (50, 20, 80), policy="fail"), {"KvobsRequestsFailing": (14, 16, 60, END)},
    ),
    "fails for half a minute": (failed((10, 0, 100), (0.5, 50, 50), (49.5, 0, 100)), {}),
    "fails, and replaced": (
        failed((10, 0, 100), (12, 20, 80), (0.5, "new", "new"), (37.5, 0, 100)) | replaced(22),
        {FAILING: (14, 16, 21, 23)},
    ),
    "fails in its next life only": (
        failed((30, 0, 100), (0.5, "new", "new"), (29.5, 20, 80)) | replaced(30), {FAILING: (34, 38, 60, END)},
    ),
    "30 % for three minutes": (blocked((10, 0.01), (3, 0.3), (47, 0.01)), {}),
    "30 % for three minutes, scraped each minute": (each_minute(blocked((10, 0.01), (3, 0.3), (47, 0.01))), {}),
    "30 % for twelve minutes": (BLOCKS_FOR_TWELVE, {BLOCKS: (14, 17, 27, 31)}),
    "30 %, its exporter restarts": (restarted(BLOCKS_FOR_TWELVE), {BLOCKS: (14, 18, 26, 31)}),
    "30 %, scraped each minute": (each_minute(BLOCKS_FOR_TWELVE), {BLOCKS: (14, 18, 26, 31)}),
    "30 %, and replaced": (blocked((10, 0.01), (12, 0.3), (38, 0.01)) | replaced(22), {BLOCKS: (14, 17, 21, 23)}),
    "60 %, and replaced": (
        blocked((10, 0.01), (8, 0.6), (42, 0.01)) | replaced(18),
        {"KvobsConnectorBlocksEngine": (10, 12, 17, 20), BLOCKS: (14, 17, 17, 19)},
    ),
    "an error": (rare(ERRORS, (10, "_"), (50, 1)), {"KvobsConnectorErrors": (10, 12, 24, 28)}),
    "an error, its exporter restarts": (
        restarted(rare(ERRORS, (12, "_"), (48, 1))), {"KvobsConnectorErrors": (12, 14, 26, 30)},
    ),
    "an error inside, its exporter restarts for a minute": (
        restarted(rare(INTERNAL, (12, "_"), (48, 1)), 2), {"KvobsInternalErrors": (12, 14, 26, 30)},
    ),
    "stuck, its exporter restarts": (
        restarted(rare(STUCK, (12, "_"), (48, 1))), {"KvobsStuckTransfers": (12, 14, 26, 30)},
    ),
    "an error, and replaced": (
        rare(ERRORS, (10, "_"), (5, 1), (1, "stale")) | replaced(15), {"KvobsConnectorErrors": (10, 12, 14, 18)},
    ),
    "errors that increase, and replaced": (
        rare(ERRORS, (10, 1), (5, 2), (1, "stale")) | replaced(15), {"KvobsConnectorErrors": (10, 12, 14, 18)},
    ),
    "a call hangs, and replaced": ({CALL: HANGS(10, 5)} | replaced(15), {"KvobsCallHangs": (11, 12, 14, 17)}),
    "a call hangs, and returns": ({CALL: HANGS(10, 5)}, {"KvobsCallHangs": (11, 12, 15, 18)}),
    "a load hangs, and replaced": (
        {OLDEST_LOAD: HANGS(10, 5) + " 0" * 80} | replaced(15), {"KvobsLoadUnfinished": (11, 12, 14, 17)},
    ),
    "loads that time out one after the other": (
        {OLDEST_LOAD: held((10, 0)) + " 0 30 60 90" * 15 + " 0" * 40}, {"KvobsLoadUnfinished": (11, 12, 40, 43)},
    ),
    "a lookup hangs, and replaced": (
        {OLDEST_LOOKUP: HANGS(10, 5) + " 0" * 80} | replaced(15), {"KvobsLookupUnanswered": (11, 12, 14, 17)},
    ),
    "saves are late, and replaced": (
        {OLDEST: HANGS(10, 12) + " 0" * 60} | replaced(22), {"KvobsSaveBacklog": (15, 18, 21, 23)},
    ),
    "in quarantine, and replaced": (
        {"kvobs_quarantined": held((10, 0), (10, 1), (40, 0)), **BUSY} | replaced(20),
        {"KvobsConnectorQuarantined": (12, 16, 19, 21)},
    ),
    "scaled to zero": (gone(10), {"KvobsJobMissing": (24, 26, 60, END)}),
    "scaled to zero for ten minutes": (
        {name: held((10, value), (10, "stale"), (40, value)) for name, value in (("up", 1), (BUILD, 1))}
        | replaced(20, 10), {},
    ),
    "healthy, and replaced": (loaded(WELL) | blocked((MINUTES, 0.05)) | replaced(30), {}),
    "healthy, scraped each minute": (each_minute(loaded(WELL) | failed((MINUTES, 1, 99))), {}),
    "healthy, its exporter restarts": (restarted(loaded(WELL) | failed((MINUTES, 1, 99))), {}),
}  # fmt: skip
PAIRS = ("slow for ten minutes", "fails for ten minutes", "an error", "30 % for three minutes")
"""Seen by two replicas of a Prometheus, too."""
A_DAY_LATER: dict[str, Scene] = {
    "five times": (FIVE_TIMES, {SLOWED: (12, 14, 60, END)}),
    "five times, scraped each minute": (each_minute(FIVE_TIMES), {SLOWED: (12, 14, 60, END)}),
    "five times, its exporter restarts": (restarted(FIVE_TIMES), {SLOWED: (12, 14, 60, END)}),
    "five times, of few loads": (slowed((10, 1), (50, 5), loads=6), {SLOWED: (12, 14, 60, END)}),
    "five times, of too few": (slowed((10, 1), (50, 5), loads=2), {}),
    "five times for a minute": (slowed((10, 1), (1, 5), (49, 1)), {}),
    "five times for a minute, scraped each minute": (each_minute(slowed((10, 1), (1, 5), (49, 1))), {}),
    "five times for ten minutes": (slowed((10, 1), (10, 5), (40, 1)), {SLOWED: (12, 14, 23, 26)}),
    "five times for four of eleven minutes": (
        slowed((10, 1), *((4, 5), (7, 1)) * 4, (6, 1)), {SLOWED: (12, 14, 17, 60)},
    ),
    "five times, and replaced": (slowed((10, 1), (5, 5), (45, 1)) | replaced(15), {SLOWED: (12, 14, 14, 16)}),
    "three times": (slowed((10, 1), (50, 3)), {}),
    "one load of 30 s among few": (slowed((10, 1), (0.5, 50), (49.5, 1), loads=6), {}),
}  # fmt: skip
"""A day before, loads took 0.2 s."""
