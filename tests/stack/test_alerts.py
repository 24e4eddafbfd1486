"""What a fleet does to alerts: restarts, gaps, many engines and replicas hide none and raise none."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dashboards.rules import DOUBLED, FLEET, JOB
from tests.unit.dashboards.evaluation import (
    BY_NAME,
    case,
    engine,
    merged,
    passes,
    quiet_from,
    quietly,
    samples,
    since,
    two_lives,
    without,
)
from tests.unit.dashboards.scenes import SCENES
from tests.unit.dashboards.scenes.scene import START, Series

pytestmark = pytest.mark.slow

MANY = 64
GAPS = (range(40, 80), range(40, 110))
"""Samples that are missing, of 20 and of 35 minutes."""
RESTARTS = (1, 5, 10, 15, 20, 30)
"""Minutes."""
CLOCKS = (-600, -120, 120, 600)
"""Seconds by which an engine's clock is ahead."""
NAMES = pytest.mark.parametrize("name", SCENES)
RARE = {name for name, scenes in SCENES.items() if any(START in fires.series for fires in scenes.fires)}


@NAMES
def test_events_before_a_new_prometheus_do_not_fire(name: str, tmp_path: Path) -> None:
    scenes = SCENES[name]
    seen = ((140, scenes.ended), (200, scenes.ended), (60, scenes.idle), (100, scenes.healthy))
    passes([case(since(begin, engine(series)), quietly(name, quiet_from(0))) for begin, series in seen], tmp_path, name)


@NAMES
def test_events_before_a_scrape_gap_do_not_fire(name: str, tmp_path: Path) -> None:
    """Prometheus, or the way to the targets, is away: nothing fires afterwards that had ended before."""
    scenes = SCENES[name]
    tests = [
        case(without(gap, series), quietly(name, quiet_from(gap.stop // 2 + 1, 110)))
        for gap in GAPS
        for series in (engine(scenes.healthy), engine(scenes.idle), since(140, engine(scenes.ended)))
    ]
    passes(tests, tmp_path, name)


@NAMES
def test_alert_fires_for_each_of_64_engines(name: str, tmp_path: Path) -> None:
    alert, scenes = BY_NAME[name], SCENES[name]
    fires = scenes.fires[0]
    instances = [f"gpu-{number}:8000" for number in range(1, MANY + 1)]
    one = engine(fires.series) | merged(engine(scenes.healthy, {"instance": other}) for other in instances[1:])
    every = merged(engine(fires.series, {"instance": instance}) for instance in instances)
    is_of_one = "instance" in alert.about  # a job with one target is not missing, a fleet with one bad engine works
    tests = [
        case(one, [], {fires.at: {"": 1} if is_of_one else {}}, name),
        case(every, [], {fires.at: {"": MANY if is_of_one else 1}}, name),
    ]
    passes(tests, tmp_path, name)


@NAMES
def test_clusters_with_the_same_addresses_do_not_hide_each_other(name: str, tmp_path: Path) -> None:
    scenes = SCENES[name]
    fires = scenes.fires[0]
    a, b = (engine(fires.series, {"cluster": cluster}) for cluster in "ab")
    well = engine(scenes.healthy, {"cluster": "b"})
    tests = [case(a | well, [], {fires.at: {"a": 1}}, name), case(a | b, [], {fires.at: {"a": 1, "b": 1}}, name)]
    passes(tests, tmp_path, name)


@NAMES
def test_after_a_restart_the_same_fires_again_and_nothing_else(name: str, tmp_path: Path) -> None:
    """In each cluster an engine that is gone for so many minutes after half an hour."""
    scenes = SCENES[name]
    fires = scenes.fires[0]

    def restarted(first: Series, second: Series, gaps: Sequence[int] = RESTARTS) -> dict[str, str]:
        labels = {gap: {"cluster": str(gap)} for gap in gaps}
        return merged(two_lives(engine(first, of), engine(second, of), gap) for gap, of in labels.items())

    def again(after: int) -> dict[str, dict[str, int]]:
        return {f"{31 + gap + after}m": {str(gap): 1} for gap in RESTARTS}

    short = RESTARTS[:4] if name == "KvobsTelemetryMissing" else RESTARTS  # it is about long gaps
    tests = [
        case(restarted(fires.series, scenes.healthy), quietly(name, quiet_from(86, 110))),
        case(restarted(scenes.healthy, scenes.healthy, short), quietly(name, quiet_from(20, 110))),
    ]
    if name not in ("KvobsJobMissing", "KvobsTelemetryMissing"):
        at = int(fires.at.removesuffix("m"))
        tests.append(case(restarted(fires.series, fires.series), [], again(at), name, only=True))
    if name in RARE:  # four minutes after its start, and at once
        for begin in (32, 40):
            soon = {key: " ".join(samples(values)[begin:]) for key, values in fires.series.items()}
            tests.append(case(restarted(soon, soon), [], again(5), name, only=True))
    passes(tests, tmp_path, name)


@pytest.mark.parametrize("name", sorted(RARE))
def test_a_clock_that_differs_hides_nothing(name: str, tmp_path: Path) -> None:
    """The start is the only time of the engine's clock that rules read; in each cluster it differs by other seconds."""

    def shifted(series: Series, place: str) -> dict[str, str]:
        made = engine(series, {"cluster": place})
        (start,) = (key for key in made if key.startswith(START))
        ahead_s = int(place.partition("_")[0])
        return made | {start: " ".join(s if s == "_" else f"{float(s) + ahead_s}" for s in samples(made[start]))}

    scenes = SCENES[name]
    fires = {f"{ahead_s}_{n}": each for ahead_s in CLOCKS for n, each in enumerate(scenes.fires)}
    quiet = {f"{ahead_s}_{n}": each for ahead_s in CLOCKS for n, each in enumerate(scenes.quiet)}
    at = {each.at: {place: 1 for place, other in fires.items() if other.at == each.at} for each in scenes.fires}
    tests = [
        case(merged(shifted(each.series, place) for place, each in fires.items()), [], at, name, only=True),
        case(merged(shifted(each, place) for place, each in quiet.items()), quietly(name, quiet_from(0))),
    ]
    passes(tests, tmp_path, name)


@NAMES
def test_two_replicas_of_a_prometheus_count_once(name: str, tmp_path: Path) -> None:
    alert, scenes = BY_NAME[name], SCENES[name]

    def pair(series: Series, place: str = "a") -> dict[str, str]:
        return merged(engine(series, {"replica": replica, "cluster": place}) for replica in "ab")

    fires = scenes.fires[0]
    each = 1 if alert.about in (FLEET, JOB, DOUBLED) else 2  # the label is on the alerts of single engines
    quiet = merged(pair(series, f"q{n}") for n, series in enumerate((scenes.healthy, *scenes.quiet)))
    tests = [case(pair(fires.series), [], {fires.at: {"a": each}}, name), case(quiet, quietly(name, quiet_from(0)))]
    passes(tests, tmp_path, name)


@NAMES
def test_pods_that_come_and_go_hide_nothing_and_raise_nothing(name: str, tmp_path: Path) -> None:
    """Each lives for twelve minutes."""
    alert, scenes = BY_NAME[name], SCENES[name]
    pods: dict[str, str] = {}
    for number in range(10):
        begin = 12 * number
        lives = {**scenes.healthy, START: f"{30 * begin - 20}+0x400"}
        for key, values in engine(lives, {"instance": f"pod-{number}:8000"}).items():
            pods[key] = " ".join([*["_"] * begin, *samples(values)[:24], "stale"])
    fires = scenes.fires[0]
    fired = {} if alert.about == JOB else {fires.at: {"": 1}}
    passes(
        [case(pods, quietly(name, quiet_from(0))), case(pods | engine(fires.series), [], fired, name)], tmp_path, name
    )
