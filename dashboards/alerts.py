"""Make the alerts: what is wrong, from when on, and where to look.

All of them are quiet without traffic. An alert is about one engine, and mostly about one child of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dashboards import rules
from dashboards.rules import Alert, Asks, Group, Severity
from kvobs import signals

PREFIX = "Kvobs"


@dataclass(frozen=True)
class Site:
    """What differs from site to site: the thresholds, the scrape job, where Grafana is."""

    job: str = "kvobs"
    """The job that scrapes ``kvobs_*``, as in the README."""
    scope: str = ""
    """Matchers that all series must meet, such as ``cluster="a"``."""
    grafana: str = "http://localhost:3000"
    failed_share: float = 0.05
    """Of the loads that ended, those that failed."""
    slow_load_s: float = signals.LOAD_DURATION.buckets[10]
    """About a second. A histogram tells exactly what is above a bound of it, and nothing else: it must be one."""
    few_loads: int = 20
    """In five minutes; fewer have no 99th percentile worth the name."""
    save_age_s: int = 60
    forgone_share: float = 0.3
    few_tokens: int = 100
    """A second: a child that offers fewer is not worth a change."""
    rank_share: float = 0.8
    rank_skew_s: float = 0.05
    few_transfers: int = 20
    """In fifteen minutes."""
    spans_dropped: float = 0.1
    """A second."""
    self_share: float = 0.2
    """Of a core, for all processes of an engine together."""


TARGET = ("job", "instance")
ENGINE = (*TARGET, "model_name", "engine")
CHILD = (*ENGINE, "connector")
OF_ENGINE = "engine {{ $labels.engine }} of {{ $labels.instance }} ({{ $labels.model_name }})"
OF_CHILD = "{{ $labels.connector }} on " + OF_ENGINE


def alerts(site: Site) -> tuple[Alert, ...]:
    """Return all alerts, what hurts most first."""
    return tuple(make(site) for make in ALERTS)


def connector_failing(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorFailing",
        Severity.CRITICAL,
        f"{rules.FAILED_SHARE} > {site.failed_share}",
        "5m",
        "Loads from a KV connector fail.",
        "{{ $value | humanizePercentage }} of the loads from " + OF_CHILD + " failed in the last five minutes. "
        "Their tokens are computed again, or their requests fail, as kv_load_failure_policy says.",
    )


def stuck_transfers(site: Site) -> Alert:
    return _of_child(
        site,
        "StuckTransfers",
        Severity.CRITICAL,
        f"{Asks(site.scope).rare(signals.STUCK_TRANSFERS, 'rank')} > 0",
        "1m",
        "A rank does not report loads or saves that others have done.",
        "Rank {{ $labels.rank }} owes {{ $value | humanize }} loads or saves of " + OF_CHILD + ", of the last fifteen "
        "minutes, that other ranks have done long ago. Requests wait for them, or their blocks stay taken.",
    )


def connector_quarantined(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorQuarantined",
        Severity.WARNING,
        f"avg_over_time({Asks(site.scope).series(signals.QUARANTINED)}[{rules.WINDOW}]) > 0.5",
        "2m",
        "A best-effort KV connector is left out.",
        OF_CHILD + " was left out for {{ $value | humanizePercentage }} of the last five minutes, because it fails. "
        "Serving goes on without its hits and saves.",
    )


def connector_errors(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorErrors",
        Severity.WARNING,
        f"{Asks(site.scope).rare(signals.CALL_ERRORS)} > 0",
        "1m",
        "A KV connector raises exceptions.",
        OF_CHILD
        + " raised {{ $value | humanize }} exceptions in the last fifteen minutes. Outside the option isolate, one "
        "is enough to end the engine.",
    )


def loads_slow(site: Site) -> Alert:
    loads = Asks(site.scope).increase(signals.LOAD_DURATION, "mode", part="_count")
    return _of_child(
        site,
        "LoadsSlow",
        Severity.WARNING,
        f"{rules.LOAD_P99} > {site.slow_load_s}\nand {loads} >= {site.few_loads}",
        "10m",
        "Loads from a KV connector are slow.",
        "The slowest hundredth of the {{ $labels.mode }} loads from "
        + OF_CHILD
        + " takes {{ $value | humanizeDuration }} "
        "or more. Requests wait that long for their first token.",
        board="kvobs-slow-loads",
    )


def save_backlog(site: Site) -> Alert:
    return _of_child(
        site,
        "SaveBacklog",
        Severity.WARNING,
        f'{rules.OLDEST_AGE}{{kind="save"}} > {site.save_age_s}',
        "5m",
        "Saves hold the blocks of finished requests for long.",
        "The oldest save that " + OF_CHILD + " has promised is open for {{ $value | humanizeDuration }}. The blocks of "
        "such requests are not free for others.",
    )


def slowest_rank(site: Site) -> Alert:
    transfers = Asks(site.scope).increase(signals.SLOWEST_RANK, window=rules.LONG_WINDOW)
    return _of_child(
        site,
        "SlowestRank",
        Severity.WARNING,
        f"{rules.RANK_SHARE} > {site.rank_share}\n"
        f"and ignoring (rank) {rules.RANK_SKEW} > {site.rank_skew_s}\n"
        f"and ignoring (rank) {transfers} >= {site.few_transfers}",
        "10m",
        "One rank is last in nearly all loads and saves.",
        "Rank {{ $labels.rank }} was last in {{ $value | humanizePercentage }} of the loads and saves of " + OF_CHILD
        + " in the last fifteen minutes, and all others waited for it.",
    )  # fmt: skip


def forgone_tokens(site: Site) -> Alert:
    offered = Asks(site.scope).rate(signals.OFFERED_TOKENS)
    return _of_child(
        site,
        "ForgoneTokens",
        Severity.WARNING,
        f"{rules.FORGONE_SHARE} > {site.forgone_share}\nand {offered} >= {site.few_tokens}",
        "30m",
        "Much of what a KV connector could load is computed.",
        "{{ $value | humanizePercentage }} of the tokens that " + OF_CHILD + " offered were beyond what the chosen "
        "connector had: they were computed.",
    )


def telemetry_missing(site: Site) -> Alert:
    build = Asks(site.scope).series(signals.BUILD_INFO)
    matchers = ",".join(matcher for matcher in (site.scope, f'job="{site.job}"') if matcher)
    return Alert(
        site.grafana,
        "kvobs-overview",
        TARGET,
        PREFIX + "TelemetryMissing",
        Severity.WARNING,
        f"up{{{matchers}}} unless on (job, instance) {build}",
        "5m",
        "A vLLM server tells nothing of its KV connectors.",
        "{{ $labels.instance }} of job {{ $labels.job }} "
        "{{ if eq $value 0.0 }}can't be scraped{{ else }}is scraped, and has no metrics of kvobs{{ end }} "
        "(up is {{ $value }}). All other alerts of kvobs are blind to it.",
    )


def internal_errors(site: Site) -> Alert:
    return _of_engine(
        site,
        "InternalErrors",
        Severity.WARNING,
        f"{Asks(site.scope).rare(signals.INTERNAL_ERRORS, 'where')} > 0",
        "1m",
        "kvobs's telemetry has a fault of its own.",
        "{{ $value | humanize }} faults in {{ $labels.where }} in the last fifteen minutes, contained, on " + OF_ENGINE
        + ". Numbers or spans are lost; serving is not touched.",
    )  # fmt: skip


def telemetry_dropping(site: Site) -> Alert:
    return _of_engine(
        site,
        "TelemetryDropping",
        Severity.WARNING,
        f"{rules.SPANS_DROPPED} > {site.spans_dropped}",
        "10m",
        "Spans of KV transfers are lost.",
        "{{ $value | humanize }} spans a second are lost on " + OF_ENGINE + ". Traces have gaps; metrics are complete.",
    )


def telemetry_cost(site: Site) -> Alert:
    return _of_engine(
        site,
        "TelemetryCost",
        Severity.WARNING,
        f"{rules.SELF} > {site.self_share}",
        "15m",
        "kvobs's telemetry takes much time.",
        "Recording and reporting take {{ $value | humanizePercentage }} of a core, all processes together, of "
        + OF_ENGINE
        + ".",
    )


ALERTS: tuple[Callable[[Site], Alert], ...] = (
    connector_failing,
    stuck_transfers,
    connector_quarantined,
    connector_errors,
    loads_slow,
    save_backlog,
    slowest_rank,
    forgone_tokens,
    telemetry_missing,
    internal_errors,
    telemetry_dropping,
    telemetry_cost,
)


def _of_child(site: Site, name: str, *rest: Any, board: str = "kvobs-connector") -> Alert:
    return Alert(site.grafana, board, CHILD, PREFIX + name, *rest)


def _of_engine(site: Site, name: str, *rest: Any) -> Alert:
    return Alert(site.grafana, "kvobs-overview", ENGINE, PREFIX + name, *rest)


def groups(site: Site) -> tuple[Group, ...]:
    """Return all rules, as Prometheus evaluates them."""
    return (
        Group("kvobs.recording", rules.recordings(Asks(site.scope))),
        Group("kvobs.alerts", alerts(site)),
    )


def rule_groups(site: Site | None = None) -> dict[str, Any]:
    """Return the content of a rule file, and of a PrometheusRule's spec."""
    return {"groups": [group.as_dict() for group in groups(site or Site())]}


def rules_yaml() -> str:
    """Return the rule file."""
    return rules.to_yaml(rule_groups())
