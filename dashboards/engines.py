"""Tables about single engines: which one fails or is slow, and which alerts fire."""

from __future__ import annotations

from dashboards import looks, questions
from dashboards.panels import About, Panel
from dashboards.questions import SELECTION, by_engine
from dashboards.tables import Column, rows
from kvobs.schema import signals

ROWS = 50
PLACE = {"instance": "Instance", "engine": "Engine", "pod": "Pod", "namespace": "Namespace", "cluster": "Cluster"}


def engines() -> Panel:
    """Return the table of engines and connectors."""
    return rows(
        "Engines and connectors, worst first",
        About(
            f"One row per connector of each engine, the worst {ROWS}. State: as in the table of connectors.",
            "Only one instance: that machine. All instances: the connector, or its store or network.",
            "Take a single failing instance out of the load balancing, and check its log.",
            "An instance without traffic shows no failures. An engine on several hosts has a row for each host: "
            "share and loads are in the row of EngineCore's host. Pod, namespace and cluster appear if targets have "
            "these labels.",
        ),
        {"connector": "Connector", **PLACE},
        [
            Column("State", questions.verdict(*by_engine), words=looks.VERDICTS),
            Column(
                "Failure share", questions.failing_share(*by_engine), "percentunit", looks.FAILING_SHARE, decimals=1
            ),
            Column("Load p99", SELECTION.quantile(0.99, signals.LOAD_DURATION, *by_engine), "s", looks.LOAD_SECONDS),
            Column("Oldest transfer", questions.oldest(*by_engine), "s", looks.AGE_SECONDS),
        ],
        limit=ROWS,
    )


def firing_alerts() -> Panel:
    """Return the table of alerts."""
    return rows(
        "Firing alerts",
        About(
            "Alerts of kvobs that are firing, the most severe on top.",
            "An empty table is normal. Alerts wait before they fire: tiles change colour earlier.",
            "Open the runbook (link on top) at the alert's name.",
            "Prometheus must evaluate kvobs's rules: without them the table is also empty.",
        ),
        {"alertname": "Alert", "connector": "Connector", **PLACE},
        [
            Column("Severity", questions.alerts_by_severity(), words=looks.SEVERITIES),
        ],
        empty="No alert fires",
    )
