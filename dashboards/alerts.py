"""Define the alerts about connectors: condition, severity, and the board to open; and put all alerts together.

Most alerts are about one engine, and one of its connectors. Vectors are matched with ``ignoring``, not ``on``:
so labels of a site (cluster, namespace) count, and clusters do not hide each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboards import fleet_alerts, rules, telemetry_alerts
from dashboards.incident_alerts import (
    BRIEFLY,
    INCIDENTS,
    OF_CHILD,
    SOME_TIME,
    blocking,
    of_child,
    oldest,
    unless_polling,
)
from dashboards.promql import ratio, time_in_use
from dashboards.rules import Alert, Asks, Group, Severity
from dashboards.site import Site
from dashboards.telemetry_alerts import PREFIX
from kvobs.schema import signals

ALL_FAILED = 3
"""How many loads of hours say something if all of them failed."""
SLOW_ENOUGH_S = 0.1
"""Mean duration of a load from which it matters that it was shorter before."""


def alerts(site: Site) -> tuple[Alert, ...]:
    """Return all alerts, the most severe first."""
    return tuple(make(site) for make in ALERTS)


def requests_failing(site: Site) -> Alert:
    return of_child(
        site,
        "RequestsFailing",
        Severity.CRITICAL,
        _failing(site, "and"),
        "5m",
        "Requests fail, because loads from a KV connector fail.",
        FAILED + "Their requests fail: kv_load_failure_policy is fail.",
        keep=SOME_TIME,
    )


def connector_failing(site: Site) -> Alert:
    return of_child(
        site,
        "ConnectorFailing",
        Severity.WARNING,
        _failing(site, "unless"),
        "5m",
        "Loads from a KV connector fail.",
        FAILED + "Their tokens are recomputed.",
        keep=SOME_TIME,
    )


FAILED = (
    "{{ $value | humanizePercentage }} of the loads from " + OF_CHILD + " failed in the last five minutes, or in the "
    "last six hours if they are few. "
)


def _failing(site: Site, with_policy_fail: str) -> str:
    asks = Asks(site.scope)
    failed = asks.increase(signals.LOADS, window=rules.LONG_WINDOW, outcome="failed")
    many = f"{fleet_alerts.failing(site, with_policy_fail)}\nand {failed} >= {site.few_failed}"
    few, others = (asks.few(signals.LOADS, outcome=outcome) for outcome in ("failed", "ok"))
    all_failed = f"(({few}) >= bool {ALL_FAILED}) == 1 unless ({others}) > 0"
    return f"{many}\nor {fleet_alerts.by_policy(site, f'({all_failed})', with_policy_fail)}"


def failed_sync_loads(site: Site) -> Alert:
    others = (
        f'{{{{ with printf "kvobs_connector_info{{job=%q,instance=%q,engine=%q,connector!=%q,{site.cluster}=%q}}" '
        f"$labels.job $labels.instance $labels.engine $labels.connector $labels.{site.cluster} | query }}}}"
        "{{ range . }} {{ .Labels.connector }}{{ end }}{{ end }}"
    )
    return of_child(
        site,
        "FailedSyncLoads",
        Severity.CRITICAL,
        f"{Asks(site.scope).rare(signals.FAILED_SYNC_LOADS)} > 0",
        "0m",
        "Synchronous loads failed: other connectors may have saved unfilled blocks.",
        "{{ $value | humanize }} synchronous loads from " + OF_CHILD + " failed in the last fifteen minutes. Blocks "
        "that other connectors saved in the same step may be wrong, and so are answers that use them. Other "
        "connectors:" + others + ".",
        keep="10m",
    )  # fmt: skip


def stuck_transfers(site: Site) -> Alert:
    return of_child(
        site,
        "StuckTransfers",
        Severity.CRITICAL,
        # The counter shows that it began. The alert goes on, and does not begin, while the oldest transfer began before
        # that quarter of an hour: a later one, or one after a restart, is another.
        f"{rules.STUCK} > 0\n"
        f"or ({Asks(site.scope).series(signals.STUCK_TRANSFERS)} and ignoring (alertname, alertstate, severity) "
        f'ALERTS{{alertname="{PREFIX}StuckTransfers",alertstate="firing"}}\n'
        f"  and ignoring (rank) max without (kind) ({oldest(site, 'load|save')}) > {15 * 60})",
        "1m",
        "A rank has not reported transfers that other ranks finished.",
        "Rank {{ $labels.rank }} has not reported {{ $value | humanize }} transfers of " + OF_CHILD + " that other "
        "ranks finished more than `stuck_after_s` ago, in the last fifteen minutes or longer ago and still unfinished. "
        "Their requests wait, or their blocks stay held.",
    )


def connector_blocks_scheduler(site: Site) -> Alert:
    return of_child(
        site,
        "ConnectorBlocksScheduler",
        Severity.WARNING,
        f"{rules.SCHEDULER_SHARE} > {site.scheduler_share} {unless_polling(site)}",
        "5m",
        "Calls into a KV connector take much of the scheduler's time.",
        f"{blocking('five minutes')}.",
        keep=SOME_TIME,
    )


def lookup_unanswered(site: Site) -> Alert:
    return of_child(
        site,
        "LookupUnanswered",
        Severity.WARNING,
        f"{oldest(site, 'lookup')} > {site.lookup_age_s}",
        "0m",
        "A KV connector does not answer lookups: requests do not start.",
        "The oldest lookup of " + OF_CHILD + " has been answered 'not yet' for {{ $value | humanizeDuration }}. Its "
        "request waits for the answer.",
        keep=BRIEFLY,
    )


def connector_quarantined(site: Site) -> Alert:
    return of_child(
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
    return of_child(
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
    return of_child(
        site,
        "LoadsSlow",
        Severity.WARNING,
        f"{rules.LOAD_P99} > {site.slow_load_s}\n"
        f"and {rules.LOAD_P99} > ignoring (mode) group_left () ({site.slow_load_s_per_1k_tokens} / 1000 * {tokens})\n"
        f"and {loads} >= {site.few_loads}\n"
        f"unless ignoring (connector, mode) {_blocked(site)}",
        "10m",
        "Loads from a KV connector are slow.",
        "The p99 of {{ $labels.mode }} loads from " + OF_CHILD + " is about {{ $value | humanizeDuration }} "
        f"(thresholds: {site.slow_load_s} s, and {site.slow_load_s_per_1k_tokens} s per 1000 tokens of an average "
        "load). Requests wait that long for their first token.",
        board="kvobs-slow-loads",
        keep=SOME_TIME,
    )


def loads_slowed(site: Site) -> Alert:
    asks = Asks(site.scope)
    loads = asks.increase(signals.LOAD_DURATION, part="_count")
    return of_child(
        site,
        "LoadsSlowed",
        Severity.WARNING,
        # For the tokens that are loaded, so that longer contexts are not slower.
        f"{rules.LOAD_PACE} / (avg_over_time({rules.LOAD_PACE}[1h] offset {rules.DAY}) > 0) > {site.slowed_times}\n"
        f"and {asks.mean(signals.LOAD_DURATION)} > {SLOW_ENOUGH_S}\n"
        f"and {loads} >= {site.few_loads}\n"
        f"unless ignoring (connector) {_blocked(site)}",
        "15m",
        "Loads from a KV connector take several times as long as a day ago.",
        "Loads from " + OF_CHILD + " take {{ $value | humanize }} times as long as a day ago, for the same number of "
        "tokens.",
        board="kvobs-slow-loads",
        keep=SOME_TIME,
    )  # fmt: skip


def loads_below_link(site: Site) -> Alert:
    asks, window = Asks(site.scope), rules.LONG_WINDOW
    link = asks.series(signals.LINK_SPEED)
    # Sync loads are timed within a step, by parts that overlap.
    loads = asks.increase(signals.LOADS, window=window, mode="async", outcome="ok")
    mean = ratio(asks.increase(signals.LOAD_BYTES, window=window), loads)
    lasted = asks.rate(signals.LOAD_DURATION, part="_sum", window=window, mode="async")
    in_use = time_in_use(lasted, asks.series(signals.IN_FLIGHT, kind="load"), "without (kind)", window)
    return of_child(
        site,
        "LoadsBelowLink",
        Severity.WARNING,
        f"{ratio(asks.rate(signals.LOAD_BYTES, window=window), f'{in_use} * {link}')} < {site.link_share}\n"
        # Short loads end when a step does, whatever the link.
        f"and {mean} > {SLOW_ENOUGH_S} * {site.link_share} * {link}\n"
        f"and {loads} >= {site.few_transfers}\n"
        f"unless ignoring (connector) {_blocked(site)}",
        "15m",
        "Loads from a KV connector use a small part of its link.",
        "While they were in progress, loads from " + OF_CHILD + " used at most {{ $value | humanizePercentage }} of "
        "its links (link_gbps) in the last fifteen minutes. Check that they go by RDMA, not TCP.",
        board="kvobs-slow-loads",
        keep=SOME_TIME,
    )  # fmt: skip


def _blocked(site: Site) -> str:
    """Return engines whose scheduler a connector blocks, which makes all of them late."""
    return f"max without (connector) ({rules.SCHEDULER_SHARE}) > {site.blocked_share}"


def save_backlog(site: Site) -> Alert:
    return of_child(
        site,
        "SaveBacklog",
        Severity.WARNING,
        f"{oldest(site, 'save')} > {site.save_age_s}",
        "5m",
        "Saves hold the blocks of finished requests for a long time.",
        "The oldest promised save of " + OF_CHILD + " has been in progress for {{ $value | humanizeDuration }}. Other "
        "requests cannot use its blocks.",
    )


def kv_events_stopped(site: Site) -> Alert:
    asks = Asks(site.scope)
    saves = asks.increase(signals.SAVES, window=rules.LONG_WINDOW, outcome="ok")
    return of_child(
        site,
        "KvEventsStopped",
        Severity.WARNING,
        f"{saves} >= {site.few_transfers}\n"
        f"and {asks.increase(signals.KV_EVENTS, window=rules.LONG_WINDOW, type='stored')} == 0",
        "10m",
        "A KV connector has stopped publishing what it stores.",
        OF_CHILD + " ended {{ $value | humanize }} saves in the last fifteen minutes, without an event for routers. "
        "Requests are no longer sent to where their prefix is.",
    )


def slowest_rank(site: Site) -> Alert:
    asks = Asks(site.scope)
    transfers = asks.increase(signals.SLOWEST_RANK, window=rules.LONG_WINDOW)
    # Ranks that were never the slowest are not counted: then the fair share is said too large, which is the safe side.
    fair = f"1 / clamp_min(count without (rank) ({asks.series(signals.SLOWEST_RANK)}), 2)"
    return of_child(
        site,
        "SlowestRank",
        Severity.WARNING,
        f"{rules.RANK_SHARE} > ignoring (rank) group_left () ({site.rank_lead} + {fair})\n"
        f"and ignoring (rank) {rules.RANK_SKEW} > {site.rank_skew_s}\n"
        f"and ignoring (rank) {transfers} >= {site.few_transfers}",
        "10m",
        "One rank takes longest in most loads and saves.",
        "Rank {{ $labels.rank }} took longest in {{ $value | humanizePercentage }} of loads and saves of " + OF_CHILD
        + " in the last fifteen minutes; all other ranks waited for it.",
        keep=SOME_TIME,
    )  # fmt: skip


def loads_dont_pay(site: Site) -> Alert:
    asks = Asks(site.scope)
    slower = asks.increase(signals.LOADS_SLOWER)
    ended = asks.increase(signals.LOADS, outcome="ok|failed")
    return of_child(
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
    return of_child(
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
    *INCIDENTS,
    fleet_alerts.engines_failing_requests,
    requests_failing,
    failed_sync_loads,
    stuck_transfers,
    fleet_alerts.engines_failing,
    connector_failing,
    connector_blocks_scheduler,
    lookup_unanswered,
    connector_quarantined,
    connector_errors,
    loads_slow,
    loads_slowed,
    loads_below_link,
    save_backlog,
    kv_events_stopped,
    slowest_rank,
    *telemetry_alerts.ALERTS,
    loads_dont_pay,
    unused_hit_tokens,
    telemetry_alerts.telemetry_cost,
)


def groups(site: Site) -> tuple[Group, ...]:
    """Return all rules, as Prometheus evaluates them."""
    return (
        Group("kvobs.recording", rules.recordings(Asks(site.scope))),
        Group("kvobs.incidents", alerts(site)[: len(INCIDENTS)], rules.SOON),
        Group("kvobs.alerts", alerts(site)[len(INCIDENTS) :]),
    )


def rule_groups(site: Site | None = None) -> dict[str, Any]:
    """Return the content of a rule file, and of a PrometheusRule's spec."""
    return {"groups": [group.as_dict() for group in groups(site or Site())]}


def rules_yaml(site: Site | None = None) -> str:
    """Return the rule file."""
    return rules.to_yaml(rule_groups(site))
