"""What makes each alert fire, and what doesn't, as promtool evaluates it; `tests/stack` has fleets.

Beside the connector (or engine, or target) that a scene is about there is always a healthy one, which must stay quiet.
"""

import re
from pathlib import Path

import pytest

from dashboards.alerts import ALERTS
from dashboards.incident_alerts import INCIDENTS
from dashboards.rules import SOON, Severity
from tests.support.promtool import answers
from tests.unit.dashboards.evaluation import (
    BY_NAME,
    beside,
    case,
    engine,
    expected,
    merged,
    passes,
    quiet_from,
    quietly,
    run,
    samples,
)
from tests.unit.dashboards.scenes import SCENES, SUBJECTS, times
from tests.unit.dashboards.scenes.scene import UP, Series
from tests.unit.dashboards.scenes.waiting import CALL, ENDED, OLDEST_LOAD, not_resumed, scheduler_times
from tests.unit.dashboards.scenes.worth import stored

pytestmark = pytest.mark.tools

NAMES = pytest.mark.parametrize("name", SCENES)


def test_every_alert_has_its_scenes() -> None:
    assert SCENES.keys() == BY_NAME.keys()
    assert len(SCENES) == sum(len(subject) for subject in SUBJECTS)
    assert len(ALERTS) == len(BY_NAME)


@NAMES
def test_an_alert_fires_when_it_should_with_its_text(name: str, tmp_path: Path) -> None:
    """The healthy one beside it stays quiet: else there would be two alerts."""
    alert, scenes = BY_NAME[name], SCENES[name]
    tests = []
    for fires in scenes.fires:
        expect = {fires.at: [expected(alert, fires, fires.says)]}
        if fires.until:
            expect[fires.until[0]] = [expected(alert, fires, fires.until[1])]
        tests.append(case(beside(alert, scenes) | engine(fires.series), quietly(name, expect)))
    passes(tests, tmp_path, name)


@NAMES
@pytest.mark.parametrize("scene", ["healthy", "idle", "quiet"])
def test_an_alert_is_quiet_when_it_should_be(name: str, scene: str, tmp_path: Path) -> None:
    alert, scenes = BY_NAME[name], SCENES[name]
    found = getattr(scenes, scene)
    tests = [
        case(beside(alert, scenes) | engine(series), quietly(name, quiet_from(0)))
        for series in (found if isinstance(found, tuple) else (found,))
    ]
    passes(tests, tmp_path, name)


@NAMES
def test_an_alert_ends_in_health(name: str, tmp_path: Path) -> None:
    ended = engine(SCENES[name].ended)
    passes([case(ended, quietly(name, quiet_from(70, 110)), {"45m": {"": 1}}, name)], tmp_path, name)


WAITING = [name for name, alert in BY_NAME.items() if alert.hold != "0m" and {"engine", "connector"} & {*alert.about}]


@pytest.mark.parametrize("name", WAITING)
def test_a_pending_alert_survives_a_missed_scrape(name: str, tmp_path: Path) -> None:
    """Prometheus then ends all series of the target with a marker, until its next scrape."""
    hold, (fires, *_) = int(BY_NAME[name].hold.removesuffix("m")), SCENES[name].fires
    every = engine(fires.series)
    asked = case(every, [], {f"{minute}m": {} for minute in range(int(fires.at.removesuffix("m")) + 1)}, name)
    said = run([asked], tmp_path, name, interval="30s")  # it names the minutes in which the alert fires
    found = [re.findall(r"(\d+)([dhm])", time) for time in re.findall(r"time: (\w+),", said.stdout + said.stderr)]
    first = min(sum(int(n) * {"d": 1440, "h": 60, "m": 1}[unit] for n, unit in time) for time in found) % 1440
    missed = 2 * first - hold  # half of the time that it is pending
    series = {
        key: " ".join([*v[:missed], "0" if key.startswith("up{") else "stale", *v[missed + 1 :]])
        for key, v in ((key, samples(values)) for key, values in every.items())
    }
    passes([case(series, [], {f"{first}m": {"": 1}}, name)], tmp_path, name, interval="30s")


IN_TIME: dict[str, tuple[Series, ...]] = {
    "KvobsEngineEnded": ({ENDED: "_x43 1 stale"},),
    "KvobsCallHangs": ({CALL: "_x41 15+15x20"},),
    "KvobsRequestsNotResumed": (not_resumed("0+0x40 0+15x20", "0+5x40 200+0x20"),),
    "KvobsLoadUnfinished": ({OLDEST_LOAD: "0+0x40 0+15x20"},),
    "KvobsConnectorBlocksEngine": tuple(
        scheduler_times(f"0+0.1x40 {4.1 + share * 15}+{share * 15}x20") for share in (0.6, 0.73, 1)
    ),
}
"""Samples of every 15 s of what stops an engine after ten minutes."""


@pytest.mark.parametrize("name", IN_TIME)
def test_stopped_engine_is_critical_within_two_minutes(name: str, tmp_path: Path) -> None:
    tests = [case(engine(series), [], {"10m": {}, "12m": {"": 1}}, name) for series in IN_TIME[name]]
    passes([{**one, "interval": "15s"} for one in tests], tmp_path, name, SOON)


def test_stuck_transfers_fire_on_in_vmalert(tmp_path: Path) -> None:
    """Its ALERTS have the label ``alertgroup``, which Prometheus's have not."""
    name, of = "KvobsStuckTransfers", 'connector="disk"'
    fires = f'alertname="{name}",alertstate="firing",alertgroup="kvobs.alerts",severity="critical"'
    series = {f'ALERTS{{{fires},{of},rank="1"}}': "1x20", f'kvobs_stuck_transfers_total{{{of},rank="1"}}': "1x20"}
    old = {f'kvobs_oldest_in_flight_seconds{{{of},kind="load"}}': "1000x20"}
    assert answers(tmp_path, series | old, BY_NAME[name].expr) == {"disk": 1}
    assert answers(tmp_path, series, BY_NAME[name].expr) == {}


def test_another_server_on_the_host_that_computes_does_not_wait(tmp_path: Path) -> None:
    """Servers on a host have the same model and engine: vLLM's metrics may be of either."""
    waits = engine(not_resumed("0+30x400", "50+0x400", "2+0x400", "0+0x400"))
    computes = engine(not_resumed("0+0x400", "0+20x400"), {"instance": "gpu-1:8100"})
    passes([case(waits | computes, [], {"10m": {"": 1}}, "KvobsRequestsNotResumed")], tmp_path)


def test_all_that_stops_an_engine_is_in_time() -> None:
    assert [alert.name for alert in INCIDENTS] == list(IN_TIME)
    assert all(BY_NAME[name].severity is Severity.CRITICAL for name in IN_TIME)


@pytest.mark.parametrize(
    ("table", "pairs", "name"), [(times.SCENES, times.PAIRS, ""), (times.A_DAY_LATER, (), times.SLOWED)]
)
def test_alerts_begin_and_end_in_time_and_no_other_fires(
    table: dict[str, times.Scene], pairs: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """Each scene is of a cluster of its own."""
    places = {scene: (scene, [{"cluster": scene}]) for scene in table}
    places |= {f"{p}, a pair": (p, [{"cluster": f"{p}, a pair", "replica": r} for r in "ab"]) for p in pairs}
    series = merged(engine(table[scene][0], of) for scene, several in places.values() for of in several)
    asked = []
    for cluster, (scene, _) in places.items():
        for minute in range(1, times.MINUTES):
            spans = table[scene][1].items()
            may = [a for a, (a0, by, until, over) in spans if a0 < minute < by or until < minute < over]
            must = [a for a, (_, by, until, _) in spans if by <= minute <= until]
            firing = f'ALERTS{{alertstate="firing",cluster="{cluster}",alertname!~"{"|".join(may)}"}}'
            found = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in must]
            asked.append({"expr": f"group by (alertname) ({firing})", "eval_time": f"{minute}m", "exp_samples": found})
    passes([{**case(series, []), "promql_expr_test": asked}], tmp_path, name, interval="30s")


def test_a_scene_that_should_fire_and_does_not_is_found(tmp_path: Path) -> None:
    name = "KvobsConnectorFailing"
    alert, scenes = BY_NAME[name], SCENES[name]
    well = engine(scenes.healthy)
    said = run([case(well, quietly(name, {"20m": [expected(alert, scenes.fires[0], scenes.fires[0].says)]}))], tmp_path)
    assert "FAILED" in said.stderr
    assert "FAILED" in run([case(well, [], {"20m": {"": 1}}, name)], tmp_path).stderr


def test_a_connector_that_is_new_may_not_have_served_yet(tmp_path: Path) -> None:
    """Nor may one that was not asked; it is told three hours later."""
    name, hours = "KvobsNeverServes", "0+30000x900"
    series = engine(stored("5000+0x900", hours, "0+100000x900", asked="0+30x900"))
    passes([case(series, [], {"175m": {}, "220m": {"": 1}}, name)], tmp_path)


def test_a_connector_that_has_loaded_once_serves_for_three_hours(tmp_path: Path) -> None:
    """The series of its loads begins with that one, which no increase shows."""
    name, hours = "KvobsNeverServes", "0+30000x1000"
    once = engine(stored("_x440 5000+0x560", hours, "0+100000x1000", asked="0+30x1000"))
    passes([case(once, [], {"218m": {"": 1}, "270m": {}, "390m": {}, "440m": {"": 1}}, name)], tmp_path, name)


def test_without_any_kvobs_only_that_is_said(tmp_path: Path) -> None:
    other = {'up{job="node"}': UP}
    quiet = [one for name in BY_NAME if name != "KvobsJobMissing" for one in quietly(name, quiet_from(0))]
    passes([case(other, quiet)], tmp_path)
    passes([case(other, [], {"20m": {"": 1}}, "KvobsJobMissing")], tmp_path)


def test_samples_are_written_out_as_promtool_does() -> None:
    assert samples("1+2x2 _x3 stale 5 0-0.5x1") == ["1.0", "3.0", "5.0", "_", "_", "_", "stale", "5", "0.0", "-0.5"]
    assert samples("NaN+0x1") == ["NaN", "NaN"]
