"""Put all rules together, as groups that Prometheus evaluates, and fill in the settings of a site."""

from __future__ import annotations

from inspect import cleandoc
from typing import Any

from dashboards.connector_alerts import CONNECTORS
from dashboards.incident_alerts import INCIDENTS
from dashboards.rules import INTERVAL, RECORDINGS, SOON, SOON_RECORDINGS, Severity, to_yaml
from dashboards.site import Site, fill
from dashboards.telemetry_alerts import TELEMETRY

ALERTS = tuple(sorted((*INCIDENTS, *CONNECTORS, *TELEMETRY), key=lambda alert: list(Severity).index(alert.severity)))
"""All alerts, the most severe first."""


def rule_groups(site: Site | None = None) -> dict[str, Any]:
    """Return the content of a rule file, and of a PrometheusRule's spec: of a site, or of a template."""
    recordings, soon = (
        [{"record": name, "expr": cleandoc(expr)} for name, expr in rules.items()]
        for rules in (RECORDINGS, SOON_RECORDINGS)
    )
    incidents = [alert.as_dict() for alert in INCIDENTS]
    others = [alert.as_dict() for alert in ALERTS if alert not in INCIDENTS]
    groups = {
        "groups": [
            {"name": "kvobs.recording", "interval": INTERVAL, "rules": recordings},
            {"name": "kvobs.incidents", "interval": SOON, "rules": [*soon, *incidents]},
            {"name": "kvobs.alerts", "interval": INTERVAL, "rules": others},
        ]
    }
    if site and not site.grafana:
        for alert in (*incidents, *others):
            del alert["annotations"]["dashboard_url"]
    return fill(groups, site) if site else groups


def rules_yaml(site: Site | None = None) -> str:
    """Return the rule file of a site, or its template."""
    return to_yaml(rule_groups(site))
