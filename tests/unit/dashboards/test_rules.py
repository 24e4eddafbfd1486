"""Recording rules and alerts: their form, and what makes each fire, by promtool's own evaluation."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml

from dashboards import rules
from dashboards.alerts import alerts, rule_groups, rules_yaml
from dashboards.rules import Asks, Severity
from dashboards.site import RUNBOOK, Site, placeholders, thresholds, token
from dashboards.telemetry_alerts import PREFIX
from kvobs.schema import signals
from kvobs.schema.signals import SIGNALS
from tests.support.boards import selectors
from tests.support.promtool import answers, passed

SITE = Site()
BY_NAME = {alert.name: alert for alert in alerts(SITE)}
RECORDINGS = rules.recordings(Asks())
FOLDER = Path(__file__).parents[3] / "dashboards"
NAMES = pytest.mark.parametrize("name", BY_NAME)


def test_the_file_is_the_groups_and_promtool_takes_it() -> None:
    assert yaml.safe_load(rules_yaml()) == rule_groups()
    passed("check", "rules", FOLDER / "generated/rules/kvobs.rules.yml")


def test_a_long_expression_stays_readable() -> None:
    for line in ("a\nb", "x" * 400):
        text = rules.to_yaml({"expr": line})
        assert yaml.safe_load(text) == {"expr": line}
        assert len(text.splitlines()) == 2 + line.count("\n") + ("\n" in line)


@NAMES
def test_an_alert_says_all_that_it_must(name: str) -> None:
    alert = BY_NAME[name].as_dict()
    assert name.startswith(PREFIX)
    # Wrong answers and an engine's end can't wait for a second evaluation; an age is a duration already.
    at_once = ("FailedSyncLoads", "EngineEnded", "CallHangs", "RequestsNotResumed", "LoadUnfinished",
               "ConnectorBlocksEngine", "LookupUnanswered")  # fmt: skip
    assert re.fullmatch("0m" if name.removeprefix(PREFIX) in at_once else r"[1-9]\d*[mh]", alert["for"])
    assert re.fullmatch(r"[1-9]\d*m", alert.get("keep_firing_for", "1m"))
    assert alert["labels"] == {"severity": str(BY_NAME[name].severity)}
    annotations = alert["annotations"]
    assert "{{" not in annotations["summary"]
    assert annotations["summary"].endswith(".")
    assert "$value" in annotations["description"] or name in (
        "KvobsJobMissing", "KvobsEngineEnded", "KvobsTelemetryStale",
    )  # fmt: skip
    assert f"$labels.{'instance' if 'instance' in BY_NAME[name].about else 'job'}" in annotations["description"]
    assert annotations["runbook_url"] == f"{RUNBOOK}#{name.lower()}"


@NAMES
def test_an_alert_leads_to_a_board_that_exists_with_variables_that_it_has(name: str) -> None:
    alert = BY_NAME[name]
    url = urlsplit(alert.dashboard_url)
    board = json.loads((FOLDER / f"generated/boards/{url.path.removeprefix('/d/')}.json").read_text())
    assert f"/d/{board['uid']}" == url.path
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {key for key, _ in parse_qsl(url.query)} == {f"var-{label}" for label in (*alert.about, "cluster")}
    assert set(alert.about) <= variables


@NAMES
def test_a_description_uses_labels_that_its_alert_has(name: str) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", BY_NAME[name].description)) - {SITE.cluster}
    extra = {
        "KvobsStuckTransfers": {"rank"}, "KvobsSlowestRank": {"rank"}, "KvobsLoadsSlow": {"mode"},
        "KvobsCallHangs": {"hook", "rank"}, "KvobsEngineEnded": {"connector", "hook", "reason"},
        "KvobsRequestsNotResumed": {"connector"},
    }  # fmt: skip
    assert used <= {*BY_NAME[name].about, *extra.get(name, set()), *({"where"} if "Internal" in name else set())}


def test_every_alert_has_its_section_in_the_runbook_in_the_same_order() -> None:
    assert re.findall(r"^## (\w+)$", (FOLDER / "runbook.md").read_text(), re.MULTILINE) == list(BY_NAME)


@NAMES
def test_a_section_of_the_runbook_says_what_how_and_what_to_do(name: str) -> None:
    for part in ("**What it means.**", "**How to confirm.**", "**What to do.**"):
        assert part in section_of(name), part
    assert section_queries(name)
    for query in section_queries(name):
        check_query(query)


def section_of(name: str) -> str:
    return (FOLDER / "runbook.md").read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def section_queries(name: str) -> list[str]:
    return re.findall(r"^    (\S.*)$", section_of(name), re.MULTILINE)


def test_recorded_names_say_level_metric_and_operation() -> None:
    known = {re.sub(r"_total$|_timestamp_seconds$", "", signal.name) for signal in SIGNALS}
    for rule in RECORDINGS:
        level, metric, operation = rule.record.split(":")
        assert metric in known | {"kvobs_failed_loads", "kvobs_load_seconds_per_token", "kvobs_scheduler_seconds"}
        assert re.fullmatch(r"(ratio_|p99_|mean_)?rate\d+m|increase\d+m", operation)
        assert level.split("_")[0] in {"connector", "engine"}


def test_expressions_ask_for_what_exists() -> None:
    for expr in [*(rule.expr for rule in RECORDINGS), *(alert.expr for alert in BY_NAME.values())]:
        check_query(expr)


def test_a_query_for_what_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="kvobs_laods_total"):
        check_query("rate(kvobs_laods_total[5m])")
    with pytest.raises(AssertionError, match="conector"):
        check_query('rate(kvobs_loads_total{conector="a"}[5m])')
    with pytest.raises(ValueError, match="has no label"):
        Asks().rate(signals.LOADS, "rank")


VLLMS = ("generation_tokens_total", "kv_cache_usage_perc", "num_requests_kv_fetch_by_stage", "num_requests_running")


def check_query(query: str) -> None:
    """Assert that it parses, and asks for metrics and labels that there are."""
    recorded = {rule.record for rule in RECORDINGS}
    parts = {s.name + part: s for s in SIGNALS for part in ("", "_bucket", "_sum", "_count")}
    for selector, _ in selectors(query):
        if selector.name is None:  # vLLM's own, under both of its names
            (name,) = (matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__")
            assert name.removeprefix("vllm[:_]") in VLLMS, query
        elif selector.name not in recorded | {"up", "ALERTS"}:
            assert selector.name in parts, selector.name
            allowed = {*parts[selector.name].labels, "le", "connector", "job", "instance", "engine", "model_name"}
            for matcher in selector.matchers.matchers:
                assert matcher.name in allowed, matcher.name


def test_a_scope_is_on_every_series() -> None:
    content = rule_groups(Site(scope='cluster="a"', job="other"))
    for group in content["groups"]:
        for rule in group["rules"]:
            for name in re.findall(r"\b(kvobs_\w+|up)\b(?=[\[{ )]|$)", re.sub(r"\w+:\w+:\w+", "", rule["expr"])):
                assert f'{name}{{cluster="a"' in rule["expr"]
    by_name = {rule["alert"]: rule["expr"] for rule in content["groups"][2]["rules"]}
    for name in ("KvobsJobMissing", "KvobsTelemetryMissing"):
        assert 'up{cluster="a",job="other"}' in by_name[name]


def test_alerts_are_in_the_order_of_their_severity() -> None:
    order = list(Severity)
    found = [order.index(alert.severity) for alert in BY_NAME.values()]
    assert found == sorted(found)
    assert {alert.name for alert in BY_NAME.values() if alert.severity is Severity.CRITICAL} == {
        "KvobsEnginesFailingRequests", "KvobsRequestsFailing", "KvobsFailedSyncLoads", "KvobsStuckTransfers",
        "KvobsLoadUnfinished", "KvobsConnectorBlocksEngine", "KvobsCallHangs", "KvobsEngineEnded",
        "KvobsRequestsNotResumed",
    }  # fmt: skip


def test_every_threshold_is_in_a_rule_and_that_of_a_histogram_is_one_of_its_bounds() -> None:
    assert SITE.slow_load_s in signals.LOAD_DURATION.buckets
    text = rules_yaml(placeholders())
    for name in (*thresholds(), "job", "cluster", "grafana", "runbook"):
        assert token(name) in text
    assert not re.search(r"\b(on|by) \((?!__cluster__)[^)]*instance", text), "clusters hide each other"


RARE = sorted(
    (name, signal.name)
    for name, alert in BY_NAME.items()
    for signal in SIGNALS
    if re.search(
        rf"or increase\({signal.name}\[", alert.expr + str([r.expr for r in RECORDINGS if r.record in alert.expr])
    )
)


@pytest.mark.parametrize(("name", "metric"), RARE)
def test_a_query_of_the_runbook_finds_a_first_event(name: str, metric: str, tmp_path: Path) -> None:
    """The series began 20 minutes before: `increase` alone says 0."""
    asked = [query for query in section_queries(name) if metric in query and "[" in query]
    assert asked
    for query in asked:
        assert answers(tmp_path, {f'{metric}{{x="1"}}': "_x80 1+0x40"}, f"sum({query})", "100m") == {"": 1}


def test_the_rare_are_those_that_must_not_happen() -> None:
    assert [name for name, _ in RARE] == [
        "KvobsConnectorErrors", "KvobsFailedSyncLoads", "KvobsInternalErrors", "KvobsStuckTransfers",
    ]  # fmt: skip
