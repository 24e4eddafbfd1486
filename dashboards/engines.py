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
            f"A row for each connector of each engine, the worst {ROWS}; an engine on several hosts has a row for "
            "each.",
            "If one instance is bad, take it out of the load balancing and read its log; if all are, look at the "
            "connector's store or network.",
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
            "Alerts of kvobs that fire, the most severe on top; without kvobs's rules in Prometheus the table is "
            "always empty.",
            "Open the runbook (link on top) at the alert's name.",
        ),
        {"alertname": "Alert", "connector": "Connector", **PLACE},
        [
            Column("Severity", questions.alerts_by_severity(), words=looks.SEVERITIES),
        ],
        empty="No alert fires",
    )
