"""Define the alerts: condition, threshold, and the board to open.

An alert is about one engine, and mostly about one of its connectors.
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
    """The settings of a site: thresholds, scrape job, Grafana's address."""

    job: str = "kvobs"
    """The job that scrapes ``kvobs_*``, with the exporter or without, as in the README."""
    scope: str = ""
    """Matchers that all series must meet, such as ``cluster="a"``."""
    grafana: str = "http://localhost:3000"
    failed_share: float = 0.05
    """Of the loads that ended, those that failed."""
    slow_load_s: float = signals.LOAD_DURATION.buckets[10]
    """About a second. It must be a bucket bound: only there is a histogram exact."""
    few_loads: int = 20
    """In five minutes; fewer have no 99th percentile worth the name."""
    save_age_s: int = 60
    unused_hit_share: float = 0.3
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
    """Return all alerts, the most severe first."""
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
        "Their tokens are recomputed, or their requests fail, depending on kv_load_failure_policy.",
    )


def failed_sync_loads(site: Site) -> Alert:
    others = (
        '{{ with printf "kvobs_connector_info{job=%q,instance=%q,engine=%q,connector!=%q}" $labels.job '
        "$labels.instance $labels.engine $labels.connector | query }}{{ range . }} {{ .Labels.connector }}"
        "{{ end }}{{ end }}"
    )
    return _of_child(
        site,
        "FailedSyncLoads",
        Severity.CRITICAL,
        f"{Asks(site.scope).rare(signals.FAILED_SYNC_LOADS)} > 0",
        "0m",
        "Synchronous loads failed: other connectors may have saved unfilled blocks.",
        "{{ $value | humanize }} synchronous loads from " + OF_CHILD + " failed in the last fifteen minutes. Blocks "
        "that other connectors saved in the same step may be wrong, and so are answers that use them. Other "
        "connectors:" + others + ".",
    )  # fmt: skip


def stuck_transfers(site: Site) -> Alert:
    return _of_child(
        site,
        "StuckTransfers",
        Severity.CRITICAL,
        f"{Asks(site.scope).rare(signals.STUCK_TRANSFERS, 'rank')} > 0",
        "1m",
        "A rank has not reported transfers that other ranks finished.",
        "Rank {{ $labels.rank }} has not reported {{ $value | humanize }} transfers of " + OF_CHILD + " that other "
        "ranks finished more than `stuck_after_s` ago (last fifteen minutes). Their requests wait, or their blocks "
        "stay held.",
    )


def connector_quarantined(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorQuarantined",
        Severity.WARNING,
        f"avg_over_time({Asks(site.scope).series(signals.QUARANTINED)}[{rules.WINDOW}]) > 0.5",
        "2m",
        "A best-effort KV connector is in quarantine.",
        OF_CHILD + " was in quarantine for {{ $value | humanizePercentage }} of the last five minutes, because it "
        "fails. Requests are served without this cache.",
    )


def connector_errors(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorErrors",
        Severity.WARNING,
        f"{Asks(site.scope).rare(signals.CALL_ERRORS)} > 0",
        "1m",
        "A KV connector raises exceptions.",
        OF_CHILD + " raised {{ $value | humanize }} exceptions in the last fifteen minutes. If it is not in the option "
        "isolate, one exception can end the engine.",
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
        "The p99 of {{ $labels.mode }} loads from " + OF_CHILD + " is about {{ $value | humanizeDuration }} "
        f"(threshold {site.slow_load_s:.2f} s). Requests wait that long for their first token.",
        board="kvobs-slow-loads",
    )


def save_backlog(site: Site) -> Alert:
    return _of_child(
        site,
        "SaveBacklog",
        Severity.WARNING,
        f'{rules.OLDEST_AGE}{{kind="save"}} > {site.save_age_s}',
        "5m",
        "Saves hold the blocks of finished requests for a long time.",
        "The oldest promised save of " + OF_CHILD + " has been in progress for {{ $value | humanizeDuration }}. Other "
        "requests cannot use its blocks.",
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
        "One rank finishes last in most loads and saves.",
        "Rank {{ $labels.rank }} was last in {{ $value | humanizePercentage }} of the loads and saves of " + OF_CHILD
        + " in the last fifteen minutes; all other ranks waited for it.",
    )  # fmt: skip


def unused_hit_tokens(site: Site) -> Alert:
    offered = Asks(site.scope).rate(signals.OFFERED_TOKENS)
    return _of_child(
        site,
        "UnusedHitTokens",
        Severity.WARNING,
        f"{rules.UNUSED_HIT_SHARE} > {site.unused_hit_share}\nand {offered} >= {site.few_tokens}",
        "30m",
        "Hit tokens are recomputed because another connector was chosen.",
        "{{ $value | humanizePercentage }} of the tokens offered by " + OF_CHILD + " were not loaded but computed, "
        "because a connector with fewer tokens was chosen.",
    )


def telemetry_missing(site: Site) -> Alert:
    asks = Asks(site.scope)
    build, engine_up = asks.series(signals.BUILD_INFO), asks.series(signals.ENGINE_UP)
    matchers = ",".join(matcher for matcher in (site.scope, f'job="{site.job}"') if matcher)
    return Alert(
        site.grafana,
        "kvobs-overview",
        TARGET,
        PREFIX + "TelemetryMissing",
        Severity.WARNING,
        # Both parts have the labels of the target, so that an alert goes on when an exporter ends after its engine.
        f"(up{{{matchers}}} unless on (job, instance) {build})\n"
        f"or (min without (model_name, engine) ({engine_up}) == 0) - 1",
        "5m",
        "kvobs metrics are missing.",
        "{{ $labels.instance }} of job {{ $labels.job }} "
        "{{ if eq $value 0.0 }}can't be scraped{{ else if lt $value 0.0 }}is an exporter whose engine is gone{{ else }}"
        "is scraped but has no kvobs metrics{{ end }}. No other kvobs alert can fire for this server.",
    )


def internal_errors(site: Site) -> Alert:
    return _of_engine(
        site,
        "InternalErrors",
        Severity.WARNING,
        f"{Asks(site.scope).rare(signals.INTERNAL_ERRORS, 'where')} > 0",
        "1m",
        "Internal errors in kvobs's telemetry.",
        "{{ $value | humanize }} contained errors in {{ $labels.where }} in the last fifteen minutes on " + OF_ENGINE
        + ". Numbers or spans are lost; serving is not affected.",
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
        "kvobs's telemetry uses much CPU time.",
        "Telemetry uses {{ $value | humanizePercentage }} of one core over all processes of " + OF_ENGINE + ".",
    )


ALERTS: tuple[Callable[[Site], Alert], ...] = (
    connector_failing,
    failed_sync_loads,
    stuck_transfers,
    connector_quarantined,
    connector_errors,
    loads_slow,
    save_backlog,
    slowest_rank,
    unused_hit_tokens,
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
