"""What makes each alert fire, and what doesn't, as promtool evaluates it: every alert goes through every scene.

Beside the connector (or engine, or target) that a scene is about there is always a healthy one, which must stay quiet.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from dashboards.alerts import ALERTS, rule_groups
from dashboards.incident_alerts import INCIDENTS
from dashboards.rules import CONNECTOR, DOUBLED, ENGINE, FLEET, JOB, SOON, TARGET, Alert, Severity
from dashboards.site import RUNBOOK, Site
from kvobs.schema.signals import SIGNALS, Scope
from tests.support.promtool import promtool
from tests.unit.dashboards.scenes import SCENES, SUBJECTS, times
from tests.unit.dashboards.scenes.scene import BUILD, OLD, START, UP, Fires, Scenes, Series
from tests.unit.dashboards.scenes.waiting import CALL, ENDED, OLDEST_LOAD, not_resumed, scheduler_times
from tests.unit.dashboards.scenes.worth import stored

BY_NAME = {alert.name: alert for alert in ALERTS}
SCOPES = {signal.name: signal.scope for signal in SIGNALS}

LABELS = dict(zip(CONNECTOR, ("kvobs", "gpu-1:8000", "org/model a&b", "0", "disk"), strict=True))
BESIDE: dict[tuple[str, ...], dict[str, str]] = {
    CONNECTOR: {"connector": "cpu"},
    ENGINE: {"engine": "1"},
    DOUBLED: {"engine": "1"},
    TARGET: {"instance": "gpu-2:8000"},
    JOB: {"instance": "gpu-2:8000"},
    FLEET: {"connector": "cpu"},
}
"""By what an alert is about: labels of another one of these, which is healthy."""
MANY = 64
GAPS = (range(40, 80), range(40, 110))
"""Samples that are missing, of 20 and of 35 minutes."""
RESTARTS = (1, 5, 10, 15, 20, 30)
"""Minutes."""
CLOCKS = (-600, -120, 120, 600)
"""Seconds by which an engine's clock is ahead."""
NAMES = pytest.mark.parametrize("name", SCENES)
RARE = {name for name, scenes in SCENES.items() if any(START in fires.series for fires in scenes.fires)}


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
def test_two_clusters_with_the_same_addresses_do_not_hide_each_other(name: str, tmp_path: Path) -> None:
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


def test_all_that_stops_an_engine_is_in_time() -> None:
    assert [alert.name for alert in INCIDENTS] == list(IN_TIME)
    assert all(BY_NAME[name].severity is Severity.CRITICAL for name in IN_TIME)


def test_alerts_begin_and_end_in_time_and_no_other_fires(tmp_path: Path) -> None:
    """Each scene is of a cluster of its own."""
    places = {name: [{"cluster": name}] for name in times.SCENES}
    places |= {f"{name}, a pair": [{"cluster": f"{name}, a pair", "replica": r} for r in "ab"] for name in times.PAIRS}
    series = merged(
        engine(times.SCENES[name.removesuffix(", a pair")][0], of) for name, several in places.items() for of in several
    )
    asked = []
    for name in places:
        expected_at = times.SCENES[name.removesuffix(", a pair")][1]
        for minute in range(1, times.MINUTES):
            may = [a for a, (a0, by, until, over) in expected_at.items() if a0 < minute < by or until < minute < over]
            must = [a for a, (_, by, until, _) in expected_at.items() if by <= minute <= until]
            firing = f'ALERTS{{alertstate="firing",cluster="{name}",alertname!~"{"|".join(may)}"}}'
            found = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in must]
            asked.append({"expr": f"group by (alertname) ({firing})", "eval_time": f"{minute}m", "exp_samples": found})
    passes([{**case(series, []), "promql_expr_test": asked}], tmp_path, interval="30s")


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


def test_without_any_kvobs_only_that_is_said(tmp_path: Path) -> None:
    other = {'up{job="node"}': UP}
    quiet = [one for name in BY_NAME if name != "KvobsJobMissing" for one in quietly(name, quiet_from(0))]
    passes([case(other, quiet)], tmp_path)
    passes([case(other, [], {"20m": {"": 1}}, "KvobsJobMissing")], tmp_path)


def test_samples_are_written_out_as_promtool_does() -> None:
    assert samples("1+2x2 _x3 stale 5 0-0.5x1") == ["1.0", "3.0", "5.0", "_", "_", "_", "stale", "5", "0.0", "-0.5"]
    assert samples("NaN+0x1") == ["NaN", "NaN"]


# --- series


def engine(series: Series, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a scene's series with their labels; what every scraped engine has is among them."""
    usual = {"up": UP, BUILD: UP, START: f"{OLD}x400"}
    whole = {name: v for name, v in usual.items() if not any(name.split("{")[0] == s.split("{")[0] for s in series)}
    return with_labels({**whole, **series}, {**LABELS, **(more or {})})


def beside(alert: Alert, scenes: Scenes) -> dict[str, str]:
    """Return a healthy one beside it; what both have in common is as the scene says."""
    return engine(scenes.healthy, BESIDE[alert.about]) if alert.about != JOB else {}


def merged(several: Iterable[Series]) -> dict[str, str]:
    """Return the series of several scenes, whose labels differ."""
    return {name: values for series in several for name, values in series.items()}


def with_labels(series: Series, labels: Mapping[str, str]) -> dict[str, str]:
    made = {}
    for name, values in series.items():
        metric, _, own = name.partition("{")
        scope = SCOPES.get(re.sub("_(bucket|sum|count)$", "", metric))
        of_connector = scope in (Scope.CHILD, Scope.OUTSIDE) and metric != START
        is_vllms = metric.startswith("vllm")  # another target on the same host
        has = CONNECTOR if of_connector else ENGINE if scope or is_vllms else TARGET
        of = {**labels, "job": "vllm", "instance": labels["instance"].replace(":8", ":9")} if is_vllms else labels
        shown = [
            f'{label}="{of[label]}"'
            for label in (*has, "cluster", "replica")
            if label in labels and f'{label}="' not in own
        ]
        made[f"{metric}{{{','.join([*shown, *filter(None, [own.strip(',}')])])}}}"] = values
    return made


def since(begin: int, series: Series) -> dict[str, str]:
    """Return what a Prometheus sees that begins with this sample."""
    return {name: " ".join(samples(values)[begin:]) for name, values in series.items()}


def two_lives(first: dict[str, str], second: dict[str, str], minutes: int) -> dict[str, str]:
    """Return an engine's series of half an hour, none for some minutes, and those of its next life."""
    made, gap = {}, 2 * minutes
    for name in first | second:
        before, after = (samples(life[name]) if name in life else ["_"] * 400 for life in (first, second))
        if name.startswith(START):
            after = [f"{(60 + gap) * 30}"] * 130
        between = ["0" if name.startswith("up{") else "_"] * gap
        made[name] = " ".join([*before[:60], *["_"] * (60 - len(before)), *between, *after[:130]])
    return made


def without(gap: range, series: Series) -> dict[str, str]:
    """Return series whose samples are missing in a gap."""
    whole = {name: samples(values) for name, values in series.items()}
    return {name: " ".join([*v[: gap.start], *["_"] * len(gap), *v[gap.stop :]]) for name, v in whole.items()}


def samples(values: str) -> list[str]:
    """Write out promtool's notation, sample by sample."""
    out: list[str] = []
    for part in values.split():
        if match := re.fullmatch(r"_x(\d+)", part):
            out += ["_"] * int(match[1])
        elif match := re.fullmatch(r"(-?[\d.]+|NaN)([+-][\d.]+)x(\d+)", part):
            begin, step = float(match[1]), float(match[2])
            out += [f"{begin + step * i}".replace("nan", "NaN") for i in range(int(match[3]) + 1)]
        elif match := re.fullmatch(r"([\d.]+)x(\d+)", part):
            out += [match[1]] * (int(match[2]) + 1)
        else:
            out.append(part)
    return out


def a_day_later(before: Series, test: dict[str, Any]) -> dict[str, Any]:
    """Return a test with a day of samples before it."""
    for series in test["input_series"]:
        series["values"] = f"{before.get(series['series'].partition('{')[0], '_x2880')} {series['values']}"
    for asked in (*test["alert_rule_test"], *test["promql_expr_test"]):
        asked["eval_time"] = f"{24 * 60 + int(asked['eval_time'].removesuffix('m'))}m"
    return test


# --- promtool


def quiet_from(begin: int, end: int = 60) -> dict[str, list[Any]]:
    """Expect nothing from this minute on."""
    return {f"{minute}m": [] for minute in range(begin, end + 1, 2)}


def case(
    series: Series,
    alert_tests: list[dict[str, Any]],
    counts: Mapping[str, Mapping[str, int]] | None = None,
    name: str = "",
    *,
    only: bool = False,
) -> dict[str, Any]:
    """Return a test of promtool's; ``counts`` are alerts of this name that fire at a time, by cluster.

    Clusters that are not named have none, or with ``only`` any number.
    """
    asked = f'count by (cluster) (ALERTS{{alertname="{name}",alertstate="firing"%s}})'
    counted = [
        {
            "expr": asked % (f',cluster=~"{"|".join(firing)}"' if only else ""),
            "eval_time": at,
            "exp_samples": [
                {"labels": f'{{cluster="{cluster}"}}' if cluster else "{}", "value": n} for cluster, n in firing.items()
            ],
        }
        for at, firing in (counts or {}).items()
    ]
    written = [{"series": key, "values": values} for key, values in series.items()]
    return {"interval": "30s", "input_series": written, "alert_rule_test": alert_tests, "promql_expr_test": counted}


def quietly(name: str, expect: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [{"eval_time": at, "alertname": name, "exp_alerts": alerts} for at, alerts in expect.items()]


def expected(alert: Alert, fires: Fires, says: str) -> dict[str, Any]:
    labels = {label: LABELS[label] for label in alert.about}
    chosen = urlencode({f"var-{label}": value for label, value in labels.items()})
    return {
        "exp_labels": {**labels, **fires.more, "severity": str(alert.severity)},
        "exp_annotations": {
            "summary": alert.summary,
            "description": says,
            "runbook_url": f"{RUNBOOK}#{alert.name.lower()}",
            "dashboard_url": f"http://localhost:3000/d/{alert.board}?{chosen}",
        },
    }


def passes(tests: list[dict[str, Any]], folder: Path, name: str = "", interval: str = "1m") -> None:
    said = run(tests, folder, name, interval)
    assert said.returncode == 0, said.stdout + said.stderr


def run(tests: list[dict[str, Any]], folder: Path, name: str = "", interval: str = "1m") -> Any:
    """Run promtool with the alert of this name only, if there is one, and the rules that it reads: it is quicker."""
    recording, *alerting = rule_groups(Site())["groups"]
    if name:
        for group in alerting:
            group["rules"] = [rule for rule in group["rules"] if rule["alert"] == name]
        (alert,) = [rule for group in alerting for rule in group["rules"]]
        recording["rules"] = read_by(alert["expr"], recording["rules"])
        if before := SCENES[name].day_before:
            tests, interval = [a_day_later(before, one) for one in tests], "5m"  # a day has many minutes
    # JSON is YAML, and written in a tenth of the time.
    (folder / "rules.json").write_text(json.dumps({"groups": [recording, *alerting]}))
    content = {
        "rule_files": ["rules.json"],
        "evaluation_interval": interval,
        # Else any: alerts would see this step, or the last.
        "group_eval_order": ["kvobs.recording", "kvobs.incidents", "kvobs.alerts"],
        "tests": tests,
    }
    (folder / "tests.json").write_text(json.dumps(content))
    return promtool("test", "rules", folder / "tests.json")


def read_by(expr: str, recording: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the recording rules that a query reads, and those that they read: each comes after what it reads."""
    read = []
    for rule in reversed(recording):
        if rule["record"] in expr:
            read.append(rule)
            expr += rule["expr"]
    return read[::-1]
