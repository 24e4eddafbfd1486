"""What promtool finds of alerts: the series of a scene, the cases of a test, and its run."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dashboards.alerts import ALERTS, rule_groups
from dashboards.rules import CONNECTOR, DOUBLED, ENGINE, FLEET, JOB, TARGET, Alert
from dashboards.site import RUNBOOK, Site
from kvobs.schema.signals import SIGNALS, Scope
from tests.support.promtool import promtool
from tests.unit.dashboards.scenes import SCENES
from tests.unit.dashboards.scenes.scene import BUILD, OLD, START, UP, Fires, Scenes, Series

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
        of_connector = scope in (Scope.CONNECTOR, Scope.OUTSIDE) and metric != START
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


def passes(tests: list[dict[str, Any]], folder: Path, name: str = "", interval: str = "") -> None:
    said = run(tests, folder, name, interval)
    assert said.returncode == 0, said.stdout + said.stderr


def run(tests: list[dict[str, Any]], folder: Path, name: str = "", interval: str = "") -> Any:
    """Run promtool with the alert of this name only, if there is one, and the rules that it reads: it is quicker."""
    groups = rule_groups(Site())["groups"]
    if name:
        rules = [rule for group in groups for rule in group["rules"]]
        (alert,) = [rule for rule in rules if rule.get("alert") == name]
        wanted = [alert, *read_by(alert["expr"], [rule for rule in rules if "record" in rule])]
        for group in groups:
            group["rules"] = [rule for rule in group["rules"] if rule in wanted]
        if before := SCENES[name].day_before:
            tests, interval = [a_day_later(before, one) for one in tests], interval or "5m"  # a day has many minutes
    # JSON is YAML, and written in a tenth of the time.
    (folder / "rules.json").write_text(json.dumps({"groups": groups}))
    content = {
        "rule_files": ["rules.json"],
        "evaluation_interval": interval or "1m",
        # Else any: alerts would see this step, or the last.
        "group_eval_order": [group["name"] for group in groups],
        "tests": tests,
    }
    (folder / "tests.json").write_text(json.dumps(content))
    return promtool("test", "rules", folder / "tests.json")


def read_by(expr: str, recording: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the recording rules that a query reads, and the ones that these read."""
    read: list[dict[str, str]] = []
    queries = [expr]
    for query in queries:
        new = [rule for rule in recording if rule["record"] in query and rule not in read]
        read += new
        queries += [rule["expr"] for rule in new]
    return read
