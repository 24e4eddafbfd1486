"""The settings of a site: names, links, thresholds; and how they replace the tokens of a template."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvobs.schema import verdicts

RUNBOOK = verdicts.RUNBOOK


def threshold(value: float, meaning: str) -> Any:
    """Return a field of ``Site`` that ``kvobs dashboards export --threshold`` can set."""
    return field(default=value, metadata={"threshold": meaning})


@dataclass(frozen=True)
class Site:
    """The settings of a site: scrape job, label of the cluster, addresses of links, thresholds."""

    job: str = "kvobs"
    """The job that scrapes ``kvobs_*``, with the exporter or without, as in docs/quickstart.md."""
    cluster: str = "cluster"
    """The label with a target's cluster, if there are several; without it nothing changes."""
    grafana: str = "http://localhost:3000"
    """Of the compose file; empty for alerts without a link to a board."""
    runbook: str = RUNBOOK

    failed_share: float = threshold(0.05, "share of loads that failed, in 5 minutes")
    few_failed: int = threshold(5, "failed loads in 15 minutes; fewer raise no alert")
    failing_engines: float = threshold(0.2, "share of a cluster's loading engines whose loads fail at the same time")
    few_failing_engines: int = threshold(3, "engines whose loads fail; fewer raise only the alerts of each engine")
    load_age_s: int = threshold(60, "age of the oldest unfinished load, or loaded request that waits, in seconds")
    slow_load_s: float = threshold(
        float(verdicts.SLOW.limits["load_p99"]),
        "p99 of load durations, in seconds; must be a bucket bound of the histogram",
    )
    slow_load_s_per_1k_tokens: float = threshold(
        0.1, "p99 of load durations, in seconds per 1000 tokens of an average load"
    )
    few_loads: int = threshold(20, "loads in 5 minutes; fewer give no meaningful p99")
    slowed_times: float = threshold(4, "how many times as long loading a token takes compared with a day ago")
    link_share: float = threshold(0.1, "share of a connector's links (`link_gbps`) that its loads use")
    call_age_s: int = threshold(60, "age of a call into a connector that an engine waits for, in seconds")
    lookup_age_s: int = threshold(60, "age of the oldest unanswered lookup, in seconds")
    scheduler_share: float = threshold(0.1, "share of the scheduler's time in one connector")
    blocked_share: float = threshold(
        0.5, "share of the scheduler's time in one connector at which hardly any step runs"
    )
    save_age_s: int = threshold(60, "age of the oldest unfinished promised save, in seconds")
    slower_share: float = threshold(0.5, "share of loads that take longer than computing")
    thrash_share: float = threshold(
        verdicts.THRASHING.limits["thrash_share"], "share of the tokens evicted from a store that prompts ask for again"
    )
    unused_hit_share: float = threshold(0.3, "share of offered tokens that are computed")
    few_tokens: int = threshold(verdicts.FEW_TOKENS, "offered tokens per second; fewer are not worth a change")
    loadable_share: float = threshold(
        verdicts.LOADABLE_SHARE,
        "share of the prompts' tokens that were seen before and since evicted from vLLM's own cache",
    )
    rank_lead: float = threshold(0.3, "share of transfers in which one rank is the slowest, above its fair share")
    rank_skew_s: float = threshold(0.05, "mean time that the slowest rank took longer than the fastest, in seconds")
    few_transfers: int = threshold(20, "transfers in 15 minutes; fewer do not allow a comparison of ranks")
    spans_dropped: float = threshold(0.1, "lost spans per second")
    self_share: float = threshold(0.2, "CPU time of kvobs's telemetry in one process, as a share of a core")


def thresholds() -> dict[str, str]:
    """Return the thresholds by name, with their meaning."""
    return {each.name: each.metadata["threshold"] for each in fields(Site) if each.metadata}


def token(name: str) -> str:
    """Return what a template has instead of this setting."""
    return f"__{name}__"


def settings() -> dict[str, Any]:
    """Return the defaults with which an export fills templates."""
    site = Site()
    meanings = thresholds().items()
    return {
        "job": site.job,
        "cluster": site.cluster,
        "runbook": site.runbook,
        "thresholds": {name: {"value": getattr(site, name), "meaning": meaning} for name, meaning in meanings},
    }


def fill(content: Any, site: Site) -> Any:
    """Return texts, alone or in maps and lists, with the settings of a site instead of their tokens."""
    if isinstance(content, dict):
        return {key: fill(value, site) for key, value in content.items()}
    if isinstance(content, list):
        return [fill(each, site) for each in content]
    for name, value in vars(site).items():
        content = content.replace(token(name), str(value))
    return content
