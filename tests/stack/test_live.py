"""Every query of the boards and rules, on a real Prometheus and a real VictoriaMetrics that have watched a real server
get into trouble.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import yaml

from dashboards.site import Site
from kvobs.schema.signals import CALL_IN_PROGRESS, ENGINE_ENDED, SIGNALS, Scope
from kvobs.schema.spans import LOAD
from kvobs.testing.model import make_model
from tests.engine.prometheus import Prometheus
from tests.engine.serving import ROOT
from tests.stack.queries import NOBODY, OPTIONAL, Target, boards, faults, filled, labels_of, targets
from tests.stack.run import RULES, Live, live
from tests.stack.stories import EVERYTHING, NAMES

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BOARDS = boards(ROOT / "dashboards" / "generated" / "boards")
TARGETS = [target for board in BOARDS.values() for target in targets(board)]
GROUPS = [group for file in sorted(RULES.glob("*.y*ml")) for group in yaml.safe_load(file.read_text())["groups"]]
RULE_LIST = [rule for group in GROUPS for rule in group["rules"]]
RECORDED = {rule["record"]: rule["expr"] for rule in RULE_LIST if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in RULE_LIST if "alert" in rule}

SECONDS = 75
HOST_LABELS = {"job", "instance", "model_name", "engine"}

BY_THE_API_SERVER = "this run's numbers go through vLLM's API server; the exporter alone has this metric"
NO_HANG = "no call of this run hangs, and its engine does not end"
NO_PEER = "no connector of this run reads from another engine; tests/engine/test_pair.py has one"
WITHOUT_DATA: dict[str, str] = {
    **dict.fromkeys(("kvobs_peer_loads_total", "kvobs_peer_load_seconds_total"), NO_PEER),
    **dict.fromkeys((CALL_IN_PROGRESS.name, ENGINE_ENDED.name), NO_HANG),
    **{signal.name: BY_THE_API_SERVER for signal in SIGNALS if signal.scope is Scope.EXPORTER},
    **{
        f"kvobs_{name}": "no connector of this run has KV events"
        for name in (
            *("kv_events_total", "save_tokens_total", "stored_tokens"),
            *("evicted_tokens_total", "evicted_followed_tokens_total", "evicted_reused_tokens_total"),
        )
    },
    "kvobs_request_log_dropped_total": "this run has no request log",
    "kvobs_corrupt_blocks_total": "no load of this run has wrong bytes",
}
"""Metrics that such a run can't have, and why."""

NO_STORE = "this run has no SimpleCPUOffloadConnector, LMCache or Mooncake"
SAVED = "Tokens saved and evicted (tokens/s)"
DROPPED = "Dropped spans and lines, malformed contexts; queued spans (dashed)"
EMPTY: dict[str, str] = {
    "kvobs-itself: Engines (A)": BY_THE_API_SERVER,
    "kvobs-itself: Engines (B)": NO_HANG,
    "kvobs-connector: Call in progress: age (A)": NO_HANG,
    "kvobs-overview: Hangs (A)": NO_HANG,
    **{f"kvobs-prefill-decode: Pairs of engines, most failures first ({ref})": NO_PEER for ref in "ABC"},
    **{
        f"kvobs-itself: Spans lost in the collector (spans/s) ({ref})": "this run has no OpenTelemetry collector"
        for ref in "AB"
    },
    **{
        f"kvobs-connector: {panel}": WITHOUT_DATA["kvobs_save_tokens_total"]
        for panel in ("Tokens in each store; its size (dashed) (A)", *(f"{SAVED} ({ref})" for ref in "ABC"))
    },
    **{f"kvobs-connector: Tokens in each store; its size (dashed) ({ref})": NO_STORE for ref in "DEFGHIJK"},
    **{f"kvobs-connector: {SAVED} ({ref})": NO_STORE for ref in "DEFGHI"},
    f"kvobs-itself: {DROPPED} (B)": BY_THE_API_SERVER,
    f"kvobs-itself: {DROPPED} (C)": WITHOUT_DATA["kvobs_request_log_dropped_total"],
}
"""Queries that must find nothing in such a run, by their board, panel and letter, and why."""

FIRING = {
    "KvobsConnectorFailing": {"disk", "remote"},
    "KvobsConnectorErrors": {"remote"},
    "KvobsStuckTransfers": {"disk", "remote"},
    "KvobsInternalErrors": {None},
}
"""Alerts that such a run must raise, and about whom."""

STORES = pytest.mark.parametrize("store", ["prometheus", "victoria"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")  # with it, kvobs raises its own faults on
            run = stack.enter_context(live(make_model(folder / "model"), folder, EVERYTHING, SECONDS))
        yield run


def test_every_metric_has_data(run: Live) -> None:
    assert run.without_data() == sorted(WITHOUT_DATA)


def test_there_are_boards_and_rules() -> None:
    names = "overview", "connector", "slow-loads", "prefill-decode", "itself"
    assert {f"kvobs-{name}" for name in names} == BOARDS.keys()
    assert all(any(target.board == uid for target in TARGETS) for uid in BOARDS)
    assert RECORDED
    assert len(ALERTS) >= 9


@pytest.mark.parametrize("target", TARGETS, ids=str)
@STORES
def test_a_panels_query_finds_finite_series_with_its_labels(target: Target, store: str, run: Live) -> None:
    # At a single moment nothing may be open, or nobody left out.
    of: Prometheus = getattr(run, store)
    found = (run.at_the_end(target.query, of) if target.is_instant else []) or run.series(target.query, of=of)
    if str(target) in EMPTY:
        assert found == [], "it has data: no gap any more"
    else:
        assert faults(found, labels_of(target.query), target.legend) == [], target.query
    assert {series["metric"]["connector"] for series in found if "connector" in series["metric"]} <= {*NAMES, NOBODY}


@pytest.mark.parametrize("uid", BOARDS)
def test_a_boards_variables_have_values_and_annotations_answer(uid: str, run: Live) -> None:
    variables = [v for v in BOARDS[uid]["templating"]["list"] if v["type"] == "query"]
    assert variables
    for variable in variables:
        ((series, label),) = re.findall(r"^label_values\((.*), (\w+)\)$", variable["query"]["query"])
        found = run.prometheus.api(f"label/{label}/values", **{"match[]": filled(series)})
        assert found or variable["name"] in OPTIONAL, variable["name"]
        if variable["name"] == "connector":
            assert sorted(found) == sorted(NAMES)
    for annotation in BOARDS[uid]["annotations"]["list"]:
        if "expr" in annotation:
            run.series(filled(annotation["expr"]))  # raises for what Prometheus refuses


OF_TROUBLE = {
    "engine:kvobs_scheduler_seconds:late_rate2m": "no connector blocks the scheduler",
    "connector_mode:kvobs_slow_loads:median_rate2m": "most loads are quick",
    "connector:kvobs_slowed_loads:ratio_rate2m": "Prometheus has no samples of the day before",
    "engine:kvobs_step_seconds:changed90s": "the run is shorter",
    "engine:kvobs_in_flight:idle90s": "the engine computes",
    "connector_kind:kvobs_oldest_in_flight_seconds:idle90s": "the engine computes",
    **dict.fromkeys(
        ("connector:kvobs_connector_info:fail_last2m", "job_connector:kvobs_failed_loads:fail_engines_rate5m"),
        "the engine recomputes",
    ),
}
"""Recording rules that may find nothing in such a run, and why."""


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_rule_gives_finite_series_with_its_labels(name: str, run: Live) -> None:
    found = run.series(name)
    assert (not found and name in OF_TROUBLE) or faults(found, None) == []
    level = set(name.partition(":")[0].split("_"))
    labels = level if "job" in level else HOST_LABELS | level
    for series in found:
        assert series["metric"].keys() - {"__name__"} == labels


@pytest.mark.parametrize("name", FIRING)
@STORES
def test_an_alert_fires_for_real_and_names_the_guilty(name: str, store: str, run: Live) -> None:
    found = run.series(f'ALERTS{{alertname="{name}",alertstate="firing"}}', of=getattr(run, store))
    assert {series["metric"].get("connector") for series in found} == FIRING[name]


def test_the_healthy_connector_is_not_accused(run: Live) -> None:
    """But where the machine itself was so busy that its loads were slow, as their spans then say too.

    Advice is no accusation: this model is so small that computing may be quicker than loading, and then that is said.
    """
    longest_s = max(s.end_ns - s.start_ns for s in run.collector.spans if s.name == f"{LOAD.name} cpu") / 1e9
    true = {"KvobsLoadsSlow"} if longest_s > Site().slow_load_s else set()
    assert {series["metric"]["alertname"] for series in run.series('ALERTS{connector="cpu", severity!="info"}')} <= true


def test_alerts_text_is_filled_in(run: Live) -> None:
    """As Prometheus has it while the alert is active; a template that fails has its error in its place."""
    groups = run.prometheus.api("rules", type="alert")["groups"]
    active = [alert for group in groups for rule in group["rules"] for alert in rule["alerts"]]
    assert active
    for alert in active:
        noted = " ".join(alert["annotations"].values())
        assert not re.search(r"{{|<error|<no value>|%!", noted), noted
        if connector := alert["labels"].get("connector"):
            assert connector in alert["annotations"]["description"]
            assert f"var-connector={connector}" in alert["annotations"]["dashboard_url"]


@pytest.mark.parametrize("target", [target for target in TARGETS if target.has_exemplars], ids=str)
def test_a_panels_exemplars_lead_to_traces_that_were_exported(target: Target, run: Live) -> None:
    found = run.prometheus.api("query_exemplars", query=target.query, start=run.began, end=run.ended)
    traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert traces & {span.trace_id for span in run.collector.spans if span.scope == "kvobs"}
