"""Define the alerts about connectors: condition, severity, and the board to open; and put all alerts together.

Most alerts are about one engine, and one of its connectors. Vectors are matched with ``ignoring``, not ``on``:
so labels of a site (cluster, namespace) count, and clusters do not hide each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboards import fleet_alerts, rules, telemetry_alerts
from dashboards.promql import ratio
from dashboards.rules import Alert, Asks, Group, Severity
from dashboards.site import Site
from dashboards.telemetry_alerts import ENGINE, OF_ENGINE, PREFIX
from kvobs.schema import signals

CHILD = (*ENGINE, "connector")
OF_CHILD = "{{ $labels.connector }} on " + OF_ENGINE


def alerts(site: Site) -> tuple[Alert, ...]:
    """Return all alerts, the most severe first."""
    return tuple(make(site) for make in ALERTS)


def requests_failing(site: Site) -> Alert:
    return _of_child(
        site,
        "RequestsFailing",
        Severity.CRITICAL,
        _failing(site, "and"),
        "5m",
        "Requests fail, because loads from a KV connector fail.",
        "{{ $value | humanizePercentage }} of the loads from " + OF_CHILD + " failed in the last five minutes. Their "
        "requests fail: kv_load_failure_policy is fail.",
    )


def connector_failing(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorFailing",
        Severity.WARNING,
        _failing(site, "unless"),
        "5m",
        "Loads from a KV connector fail.",
        "{{ $value | humanizePercentage }} of the loads from " + OF_CHILD + " failed in the last five minutes. "
        "Their tokens are recomputed.",
    )


def _failing(site: Site, with_policy_fail: str) -> str:
    failed = Asks(site.scope).increase(signals.LOADS, window=rules.LONG_WINDOW, outcome="failed")
    return f"{fleet_alerts.failing(site, with_policy_fail)}\nand {failed} >= {site.few_failed}"


def failed_sync_loads(site: Site) -> Alert:
    others = (
        f'{{{{ with printf "kvobs_connector_info{{job=%q,instance=%q,engine=%q,connector!=%q,{site.cluster}=%q}}" '
        f"$labels.job $labels.instance $labels.engine $labels.connector $labels.{site.cluster} | query }}}}"
        "{{ range . }} {{ .Labels.connector }}{{ end }}{{ end }}"
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
        # The counter shows that it began; the age shows that the oldest transfer began before that quarter of an hour.
        f"{rules.STUCK} > 0\n"
        f"or (max_over_time({rules.STUCK}[{rules.DAY}]) > 0\n"
        f"  and ignoring (rank) max without (kind) ({rules.OLDEST_AGE}{{kind!='lookup'}}) > {15 * 60})",
        "1m",
        "A rank has not reported transfers that other ranks finished.",
        "Rank {{ $labels.rank }} has not reported {{ $value | humanize }} transfers of " + OF_CHILD + " that other "
        "ranks finished more than `stuck_after_s` ago, in the last fifteen minutes or longer ago and still unfinished. "
        "Their requests wait, or their blocks stay held.",
    )


def call_hangs(site: Site) -> Alert:
    calls, asks = signals.CALL_IN_PROGRESS, Asks(site.scope)
    return _of_child(
        site,
        "CallHangs",
        Severity.CRITICAL,
        # What is called once, such as the registration of a large cache, may take long.
        f"{asks.series(calls)} > {site.call_age_s} unless {asks.series(calls, hook=signals.OTHER)}",
        "30s",
        "A call into a KV connector does not return: the engine stands still.",
        "{{ $labels.hook }} of " + OF_CHILD + " has been in progress for {{ $value | humanizeDuration }} (rank: "
        "{{ $labels.rank }}). No step runs until it returns: all requests of this engine wait.",
    )  # fmt: skip


def engine_ended(site: Site) -> Alert:
    ended = Asks(site.scope).series(signals.ENGINE_ENDED)
    return Alert(
        site,
        "kvobs-overview",
        ENGINE,
        PREFIX + "EngineEnded",
        Severity.CRITICAL,
        f"max_over_time({ended}[{rules.LONG_WINDOW}]) > 0",
        "0m",
        "An engine has ended unexpectedly.",
        "The last life of " + OF_ENGINE + " ended within the last fifteen minutes"
        "{{ with $labels.connector }} in {{ $labels.hook }} of {{ . }}{{ else }}, in no connector's call{{ end }}: "
        "{{ $labels.reason }}.",
    )  # fmt: skip


def load_unfinished(site: Site) -> Alert:
    return _of_child(
        site,
        "LoadUnfinished",
        Severity.CRITICAL,
        f'{rules.OLDEST_AGE}{{kind="load"}} > {site.load_age_s}',
        "3m",
        "A load does not finish: its request waits.",
        "The oldest load of "
        + OF_CHILD
        + " has been in progress for {{ $value | humanizeDuration }}. Its request waits "
        "until all ranks have reported it.",
    )


def connector_blocks_engine(site: Site) -> Alert:
    return _blocking(
        site,
        "ConnectorBlocksEngine",
        Severity.CRITICAL,
        site.blocked_share,
        summary="An engine spends most of its time in calls into a KV connector.",
        therefore=": all requests of this engine wait.",
    )


def connector_blocks_scheduler(site: Site) -> Alert:
    return _blocking(
        site,
        "ConnectorBlocksScheduler",
        Severity.WARNING,
        site.scheduler_share,
        summary="Calls into a KV connector take much of the scheduler's time.",
        therefore=".",
    )


def _blocking(site: Site, name: str, severity: Severity, share: float, *, summary: str, therefore: str) -> Alert:
    return _of_child(
        site,
        name,
        severity,
        f"{rules.SCHEDULER_SHARE} > {share}",
        "5m",
        summary,
        "The scheduler spent {{ $value | humanizePercentage }} of the last five minutes in calls into "
        f"{OF_CHILD}. No step runs during such a call{therefore}",
    )


def lookup_unanswered(site: Site) -> Alert:
    return _of_child(
        site,
        "LookupUnanswered",
        Severity.WARNING,
        f'{rules.OLDEST_AGE}{{kind="lookup"}} > {site.lookup_age_s}',
        "3m",
        "A KV connector does not answer lookups: requests do not start.",
        "The oldest lookup of " + OF_CHILD + " has been answered 'not yet' for {{ $value | humanizeDuration }}. Its "
        "request waits for the answer.",
    )


def connector_quarantined(site: Site) -> Alert:
    return _of_child(
        site,
        "ConnectorQuarantined",
        Severity.WARNING,
        # Without traffic there is no probation: the value may be old.
        f"avg_over_time({Asks(site.scope).series(signals.QUARANTINED)}[{rules.WINDOW}]) > 0.5\n"
        f"and ignoring (connector) {rules.SELF} > 0",
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
    asks = Asks(site.scope)
    loads = asks.increase(signals.LOAD_DURATION, "mode", part="_count")
    # Long contexts take long: what is slow is slow for the tokens of an average load, too.
    tokens = ratio(asks.rate(signals.LOAD_TOKENS), asks.rate(signals.LOADS, outcome="ok"))
    return _of_child(
        site,
        "LoadsSlow",
        Severity.WARNING,
        f"{rules.LOAD_P99} > {site.slow_load_s}\n"
        f"and {rules.LOAD_P99} > ignoring (mode) group_left () ({site.slow_load_s_per_1k_tokens} / 1000 * {tokens})\n"
        f"and {loads} >= {site.few_loads}",
        "10m",
        "Loads from a KV connector are slow.",
        "The p99 of {{ $labels.mode }} loads from " + OF_CHILD + " is about {{ $value | humanizeDuration }} "
        f"(thresholds: {site.slow_load_s} s, and {site.slow_load_s_per_1k_tokens} s per 1000 tokens of an average "
        "load). Requests wait that long for their first token.",
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
        "One rank takes longest in most loads and saves.",
        "Rank {{ $labels.rank }} took longest in {{ $value | humanizePercentage }} of loads and saves of " + OF_CHILD
        + " in the last fifteen minutes; all other ranks waited for it.",
    )  # fmt: skip


def loads_dont_pay(site: Site) -> Alert:
    asks = Asks(site.scope)
    slower = asks.increase(signals.LOADS_SLOWER)
    ended = asks.increase(signals.LOADS, outcome="ok|failed")
    return _of_child(
        site,
        "LoadsDontPay",
        Severity.INFO,
        f"{ratio(slower, ended)} > {site.slower_share}\nand {ended} >= {site.few_loads}",
        "30m",
        "Most loads from a KV connector take longer than computing.",
        "For {{ $value | humanizePercentage }} of the loads from "
        + OF_CHILD
        + " requests waited longer than computing "
        "the same tokens would have taken.",
    )


def unused_hit_tokens(site: Site) -> Alert:
    asks = Asks(site.scope)
    offered, admitted = asks.rate(signals.OFFERED_TOKENS), asks.rate(signals.ADMITTED_TOKENS)
    return _of_child(
        site,
        "UnusedHitTokens",
        Severity.INFO,
        # Of an isolated connector with synchronous loads nothing is ever admitted, by design.
        f"{rules.UNUSED_HIT_SHARE} > {site.unused_hit_share}\nand {offered} >= {site.few_tokens}\nand {admitted} > 0",
        "30m",
        "Hit tokens are recomputed because another connector was chosen.",
        "{{ $value | humanizePercentage }} of the tokens offered by " + OF_CHILD + " were not loaded but computed, "
        "because a connector with fewer tokens was chosen.",
    )


ALERTS: tuple[Callable[[Site], Alert], ...] = (
    engine_ended,
    call_hangs,
    fleet_alerts.engines_failing_requests,
    requests_failing,
    failed_sync_loads,
    stuck_transfers,
    load_unfinished,
    connector_blocks_engine,
    fleet_alerts.engines_failing,
    connector_failing,
    connector_blocks_scheduler,
    lookup_unanswered,
    connector_quarantined,
    connector_errors,
    loads_slow,
    save_backlog,
    slowest_rank,
    *telemetry_alerts.ALERTS,
    loads_dont_pay,
    unused_hit_tokens,
    telemetry_alerts.telemetry_cost,
)


def _of_child(site: Site, name: str, *rest: Any, board: str = "kvobs-connector") -> Alert:
    return Alert(site, board, CHILD, PREFIX + name, *rest)


def groups(site: Site) -> tuple[Group, ...]:
    """Return all rules, as Prometheus evaluates them."""
    return (
        Group("kvobs.recording", rules.recordings(Asks(site.scope))),
        Group("kvobs.alerts", alerts(site)),
    )


def rule_groups(site: Site | None = None) -> dict[str, Any]:
    """Return the content of a rule file, and of a PrometheusRule's spec."""
    return {"groups": [group.as_dict() for group in groups(site or Site())]}


def rules_yaml(site: Site | None = None) -> str:
    """Return the rule file."""
    return rules.to_yaml(rule_groups(site))
