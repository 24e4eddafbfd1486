"""Recording rules and alerts: their form, and what makes each fire, by promtool's own evaluation."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import promql_parser
import pytest
import yaml

from dashboards import rules
from dashboards.alerts import ALERTS, rule_groups, rules_yaml
from dashboards.rules import CONNECTOR, ENGINE, JOB, TARGET, Severity
from dashboards.site import RUNBOOK, Site, thresholds, token
from kvobs.schema import signals
from kvobs.schema.signals import OPEN, SIGNALS, labelnames
from tests.support.boards import selectors
from tests.support.promtool import answers, passed

SITE = Site()
BY_NAME = {alert.name: alert for alert in ALERTS}
RULES = [rule for group in rule_groups(SITE)["groups"] for rule in group["rules"]]
RULE_OF = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
FOLDER = Path(__file__).parents[3] / "dashboards"
NAMES = pytest.mark.parametrize("name", BY_NAME)
COUNTED = ("ConnectorBlocksScheduler", "ConnectorFailing", "LoadsSlow", "LoadsSlowed", "RequestsFailing")
"""Alerts whose queries count for how long: a missed scrape begins nothing anew."""


@pytest.mark.tools
def test_the_file_is_the_groups_and_promtool_takes_it() -> None:
    assert yaml.safe_load(rules_yaml(SITE)) == rule_groups(SITE)
    passed("check", "rules", FOLDER / "generated/rules/kvobs.rules.yml")


def test_a_long_expression_stays_readable() -> None:
    for line in ("a\nb", "x" * 400):
        text = rules.to_yaml({"expr": line})
        assert yaml.safe_load(text) == {"expr": line}
        assert len(text.splitlines()) == 2 + line.count("\n") + ("\n" in line)


@NAMES
def test_an_alert_says_all_that_it_must(name: str) -> None:
    alert = RULE_OF[name]
    assert name.startswith("Kvobs")
    # Wrong answers and an engine's end can't wait for a second evaluation; an age is a duration already.
    at_once = ("CorruptLoads", "FailedSyncLoads", "EngineEnded", "CallHangs", "RequestsNotResumed", "LoadUnfinished",
               "ConnectorBlocksEngine", "LookupUnanswered", *COUNTED)  # fmt: skip
    assert re.fullmatch("0m" if name.removeprefix("Kvobs") in at_once else r"[1-9]\d*[mh]", alert["for"])
    assert re.fullmatch(r"[1-9]\d*m", alert.get("keep_firing_for", "1m"))
    assert alert["labels"] == {"severity": str(BY_NAME[name].severity)}
    annotations = alert["annotations"]
    assert "{{" not in annotations["summary"]
    assert annotations["summary"].endswith(".")
    assert "$value" in annotations["description"] or name in (
        "KvobsJobMissing", "KvobsEngineEnded",
    )  # fmt: skip
    assert f"$labels.{'instance' if 'instance' in BY_NAME[name].about else 'job'}" in annotations["description"]
    assert annotations["runbook_url"] == f"{RUNBOOK}#{name.lower()}"


@NAMES
def test_an_alert_links_an_existing_board_with_known_variables(name: str) -> None:
    alert = BY_NAME[name]
    url = urlsplit(RULE_OF[name]["annotations"]["dashboard_url"])
    board = json.loads((FOLDER / f"generated/boards/{url.path.removeprefix('/d/')}.json").read_text())
    assert f"/d/{board['uid']}" == url.path
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {key for key, _ in parse_qsl(url.query)} == {f"var-{label}" for label in (*alert.about, "cluster")}
    assert set(alert.about) <= variables


@NAMES
def test_a_description_uses_labels_that_its_alert_has(name: str) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", RULE_OF[name]["annotations"]["description"])) - {SITE.cluster}
    assert used <= labels_after(promql_parser.parse(RULE_OF[name]["expr"]))


def test_every_alert_has_a_runbook_section_in_the_same_order() -> None:
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
    known = {re.sub(r"_total$", "", signal.name) for signal in SIGNALS}
    for record in RECORDED:
        level, metric, operation = record.split(":")
        assert metric in known | {"kvobs_load_seconds_per_token", "kvobs_scheduler_seconds", *(
            f"kvobs_{which}_loads" for which in ("failed", "failing", "slow", "slowed"))}  # fmt: skip
        assert re.fullmatch(
            r"((ratio|p50|p99|median|mean|late|record|scheduler|(?:(?:fail|recompute)_)?engines)_)?rate\d+m"
            r"|(async_)?increase\d+[mh]|(same|lasting|fail_last)\d+m|(changed|idle)\d+s|count",
            operation,
        )
        assert level.split("_")[0] in {"connector", "engine", "job"}


LONG = 75
ALLOWED_TWICE = {
    "kvobs_start_time_seconds > time() - 900 or kvobs_start_time_seconds > min_over_time(kvobs_start_time_seconds[15m])"
}
"""Asked for at times of the past: see ``rules.RECORDINGS``."""


def vectors(node: promql_parser.Expr) -> Iterator[str]:
    """Yield a query and each vector within it, in one form."""
    if not isinstance(node, promql_parser.ParenExpr):
        yield " ".join(node.prettify().split())
    inside = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for each in (*inside, *getattr(node, "args", ())):
        if isinstance(each, promql_parser.Expr):
            yield from vectors(each)


def repeated(queries: Iterable[str]) -> set[str]:
    """Return the long vectors that these queries ask for more than once."""
    asked = Counter(vector for query in queries for vector in vectors(promql_parser.parse(query)))
    return {vector for vector, times in asked.items() if times > 1 and len(vector) >= LONG}


def test_what_alerts_ask_more_than_once_is_a_recording_rule() -> None:
    assert repeated(rule["expr"] for rule in RULE_OF.values()) == ALLOWED_TWICE


def test_a_vector_that_is_repeated_is_found() -> None:
    long = 'sum without (mode, outcome) (increase(kvobs_loads_total{mode="async",outcome="ok"}[15m]))'
    assert repeated([f"{long} > 1 and {long.replace('(mode, outcome)', '( mode,  outcome )')} < 2"]) == {long}
    assert repeated([f"{long} > 1", f"{long} > 2"]) == {long}
    assert repeated([f"{long} > 1", f"{long.replace('15m', '5m')} > 1"]) == set()


def test_expressions_ask_for_what_exists() -> None:
    for rule in RULES:
        check_query(rule["expr"])


def test_a_query_for_what_does_not_exist_is_found() -> None:
    with pytest.raises(AssertionError, match="kvobs_laods_total"):
        check_query("rate(kvobs_laods_total[5m])")
    with pytest.raises(AssertionError, match="conector"):
        check_query('rate(kvobs_loads_total{conector="a"}[5m])')
    with pytest.raises(AssertionError, match="fialed"):
        check_query('rate(kvobs_loads_total{outcome=~"ok|fialed"}[5m])')
    with pytest.raises(AssertionError, match="moed"):
        labels_after(promql_parser.parse("sum without (moed) (rate(kvobs_loads_total[5m]))"))


FURTHER = {
    "KvobsStuckTransfers": {"rank"}, "KvobsSlowestRank": {"rank"}, "KvobsLoadsSlow": {"mode"},
    "KvobsCorruptLoads": {"rank"}, "KvobsLoadsHideFailures": {"host"},
    "KvobsInternalErrors": {"where"}, "KvobsCallHangs": {"hook", "rank"},
    "KvobsEngineEnded": {"connector", "hook", "reason"}, "KvobsRequestsNotResumed": {"connector", "kind", "host"},
    "KvobsLoadUnfinished": {"kind"}, "KvobsLookupUnanswered": {"kind"}, "KvobsSaveBacklog": {"kind"},
}  # fmt: skip
"""Labels of an alert's series beyond those that it is about."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_sums_up_the_labels_that_it_is_not_about(rule: dict[str, Any]) -> None:
    """A label that a signal gets is in the rules, too: else series do not match, or an alert fires for each value."""
    name = rule.get("alert")
    about = {*BY_NAME[name].about, *FURTHER.get(name, ())} if name else labels_of(rule["record"])
    assert labels_after(promql_parser.parse(rule["expr"])) == about


def test_a_label_that_is_forgotten_is_found() -> None:
    kept = labels_after(promql_parser.parse("sum without (mode) (rate(kvobs_loads_total[5m]))"))
    assert kept == {*CONNECTOR, "outcome"}
    with pytest.raises(AssertionError, match="mode"):
        labels_after(promql_parser.parse("kvobs_loads_total and ignoring (outcome) kvobs_load_bytes_total"))


def labels_of(metric: str | None) -> set[str]:
    """Return the labels of a metric; one of vLLM's is selected by a pattern, without a name."""
    if metric in RECORDED:
        level = str(metric).partition(":")[0].split("_")
        return {*(JOB if level[0] == "job" else ENGINE), *level}
    others = {
        None: {*ENGINE, "operation", "stage", "status"},
        "up": {*TARGET},
        "ALERTS": {*CONNECTOR, "rank", *OF_ALERTS},
    }
    if metric in others:
        return others[metric]
    parts = {s.name + part: s for s in SIGNALS for part in ("", "_bucket", "_sum", "_count")}
    return {*TARGET, *labelnames(parts[str(metric)]), *({"le"} if str(metric).endswith("_bucket") else ())}


def labels_after(node: Any) -> set[str]:
    """Return the labels of a query's result, none for a number; AssertionError where two sides do not match."""
    kind, found = type(node).__name__, set[str]()
    if kind in ("VectorSelector", "MatrixSelector"):
        found = labels_of(getattr(node, "vector_selector", node).name)
    elif kind in ("ParenExpr", "UnaryExpr", "SubqueryExpr"):
        found = labels_after(node.expr)
    elif kind == "AggregateExpr":
        inner, listed = labels_after(node.expr), set(node.modifier.labels) - {"cluster"}
        assert listed <= inner, node.prettify()
        found = listed if str(node.modifier.type).endswith("By") else inner - listed
    elif kind == "Call":
        inner = set().union(*map(labels_after, node.args))
        others = {"label_replace": inner | {"host"}, "histogram_quantile": inner - {"le"}, "absent_over_time": {*JOB}}
        found = others.get(node.func.name, inner)
    elif kind == "BinaryExpr":
        found = labels_after_operator(node, labels_after(node.lhs), labels_after(node.rhs))
    return found


def labels_after_operator(node: Any, left: set[str], right: set[str]) -> set[str]:
    if str(node.op) == "or" or not left or not right:
        return left | right
    matching = node.modifier and node.modifier.matching
    listed = set(matching.labels) - {"cluster"} if matching else set()
    if matching and str(matching.type).endswith("Include"):
        assert listed <= left & right, node.prettify()
        return left
    assert left - listed == right - listed, f"{node.prettify()}: {left ^ right}"
    return left - listed if matching and str(node.modifier.card).endswith("OneToOne") else left


OF_ALL = ("le", "connector", "job", "instance", "engine", "model_name")
OF_ALERTS = ("alertname", "alertstate", "severity")
VLLMS = (
    "mooncake_store_operation_failed_keys_total",
    "nixl_num_failed_transfers_total",
    "nixl_num_notifications_after_expiry_total",
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "num_requests_kv_fetch_by_stage",
    "num_requests_running",
)


def check_query(query: str) -> None:
    """Assert that it parses, and asks for metrics and labels that there are."""
    parts = {s.name + part: s for s in SIGNALS for part in ("", "_bucket", "_sum", "_count")}
    for selector, _ in selectors(query):
        if selector.name is None:  # vLLM's own, under both of its names
            (name,) = (matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__")
            assert name.removeprefix("vllm[:_]") in VLLMS, query
        elif selector.name not in RECORDED.keys() | {"up", "ALERTS"}:
            assert selector.name in parts, selector.name
            signal = parts[selector.name]
            for matcher in selector.matchers.matchers:
                assert matcher.name in {*labelnames(signal), *OF_ALL}, matcher.name
                values = signal.labels.get(matcher.name, OPEN)
                assert values is OPEN or set(matcher.value.split("|")) <= set(values), matcher.value


def test_alerts_are_in_the_order_of_their_severity() -> None:
    order = list(Severity)
    found = [order.index(alert.severity) for alert in BY_NAME.values()]
    assert found == sorted(found)
    assert {alert.name for alert in BY_NAME.values() if alert.severity is Severity.CRITICAL} == {
        "KvobsEnginesFailingRequests", "KvobsRequestsFailing", "KvobsFailedSyncLoads", "KvobsCorruptLoads",
        "KvobsStuckTransfers",
        "KvobsLoadUnfinished", "KvobsConnectorBlocksEngine", "KvobsCallHangs", "KvobsEngineEnded",
        "KvobsRequestsNotResumed",
    }  # fmt: skip


def test_thresholds_are_in_rules_and_are_bounds_of_histograms() -> None:
    assert SITE.slow_load_s in signals.LOAD_DURATION.buckets
    text = rules_yaml()
    for name in (*thresholds(), "job", "cluster", "grafana", "runbook"):
        assert token(name) in text
    assert set(re.findall(r"__\w+?__", rules_yaml(SITE))) == {"__name__"}
    assert not re.search(r"\b(on|by) \((?!__cluster__)[^)]*instance", text), "clusters hide each other"


RARE = sorted(
    (name, signal.name)
    for name, expr in ((name, rule["expr"]) for name, rule in RULE_OF.items())
    for signal in SIGNALS
    if BY_NAME[name].severity is not Severity.INFO  # advice is about what does not happen
    and re.search(
        rf"or increase\({signal.name}\[", expr + str([of for record, of in RECORDED.items() if record in expr])
    )
)


@pytest.mark.tools
@pytest.mark.parametrize(("name", "metric"), RARE)
def test_a_query_of_the_runbook_finds_a_first_event(name: str, metric: str, tmp_path: Path) -> None:
    """The series began 20 minutes before: `increase` alone says 0."""
    asked = [query for query in section_queries(name) if metric in query and "[" in query]
    assert asked
    for query in asked:
        assert answers(tmp_path, {f'{metric}{{x="1"}}': "_x80 1+0x40"}, f"sum({query})", "100m") == {"": 1}


def test_the_rare_are_those_that_must_not_happen() -> None:
    assert [name for name, _ in RARE] == [
        "KvobsConnectorErrors", "KvobsCorruptLoads", "KvobsFailedSyncLoads", "KvobsInternalErrors",
        "KvobsStuckTransfers",
    ]  # fmt: skip
