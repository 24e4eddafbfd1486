"""The example for Alertmanager: which alert goes to whom, and what is not sent beside another one."""

import re
from pathlib import Path

import yaml

from dashboards.alerts import ALERTS


def picks(matchers: list[str], labels: dict[str, str]) -> bool:
    for matcher in matchers:
        name, op, value = re.fullmatch(r'(\w+)(=~|!=|=)"(.*)"', matcher).groups()  # type: ignore[union-attr]
        has = re.fullmatch(value, labels.get(name, "")) if op == "=~" else labels.get(name, "") == value
        if bool(has) == (op == "!="):
            return False
    return True


BY_NAME = {alert.name: alert for alert in ALERTS}
ALERTMANAGER = yaml.safe_load((Path(__file__).parents[3] / "dashboards/stack/alertmanager.yml").read_text())


def labels_of(name: str) -> dict[str, str]:
    return {"alertname": name, "severity": str(BY_NAME[name].severity), **dict.fromkeys(BY_NAME[name].about, "x")}


def receiver(name: str) -> str:
    route = ALERTMANAGER["route"]
    return next((r["receiver"] for r in route["routes"] if picks(r["matchers"], labels_of(name))), route["receiver"])


def silenced_by(source: str, target: str) -> bool:
    return any(
        picks(rule["source_matchers"], labels_of(source))
        and picks(rule["target_matchers"], labels_of(target))
        and all(labels_of(source).get(label, "") == labels_of(target).get(label, "") for label in rule["equal"])
        for rule in ALERTMANAGER["inhibit_rules"]
    )


def test_an_alert_goes_where_its_severity_says() -> None:
    by_severity = {"critical": "pager", "warning": "chat", "info": "nobody"}
    assert {name: receiver(name) for name in BY_NAME} == {
        name: by_severity[str(alert.severity)] for name, alert in BY_NAME.items()
    }
    assert {each["name"] for each in ALERTMANAGER["receivers"]} == set(by_severity.values())
    assert not set(ALERTMANAGER["route"]["group_by"]) & {"instance", "engine", "pod", "job"}, "one message for many"


def test_alerts_that_follow_from_another_are_silenced() -> None:
    found = {source: {target for target in BY_NAME if silenced_by(source, target)} for source in BY_NAME}
    everything = {name for name, alert in BY_NAME.items() if {"job", "instance"} <= set(alert.about)}
    slow = {"KvobsLoadsSlow", "KvobsLoadsSlowed"}
    slow_or_below = slow | {"KvobsLoadsBelowLink"}
    late = slow_or_below | {"KvobsLoadUnfinished", "KvobsLookupUnanswered", "KvobsSaveBacklog", "KvobsLoadsDontPay"}
    assert {source: targets for source, targets in found.items() if targets} == {
        "KvobsEnginesFailingRequests": {"KvobsRequestsFailing"},
        "KvobsEnginesFailing": {"KvobsConnectorFailing"},
        "KvobsJobMissing": {"KvobsTelemetryMissing"},
        "KvobsTelemetryMissing": everything - {"KvobsTelemetryMissing"},
        "KvobsConnectorQuarantined": {"KvobsConnectorErrors", "KvobsConnectorFailing", *slow_or_below},
        "KvobsRequestsFailing": {"KvobsConnectorErrors"},
        "KvobsStuckTransfers": {"KvobsLoadUnfinished", "KvobsSaveBacklog"},
        "KvobsSlowestRank": slow_or_below,
        "KvobsLoadsBelowLink": slow,
        "KvobsLoadsSlow": {"KvobsLoadsSlowed"},
        "KvobsEngineEnded": {"KvobsConnectorErrors"},
        "KvobsCallHangs": {*late, "KvobsConnectorBlocksScheduler"},
        "KvobsConnectorBlocksEngine": {*late, "KvobsConnectorBlocksScheduler"},
        "KvobsRequestsNotResumed": late,
    }
    for rule in ALERTMANAGER["inhibit_rules"]:
        for name in re.findall(r"Kvobs\w+", str(rule)):
            assert name in BY_NAME
        assert "cluster" in rule["equal"]
