"""Define the alerts about kvobs's own numbers: targets and jobs that have none, errors, losses, cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dashboards import rules
from dashboards.promql import Selection, with_host
from dashboards.rules import Alert, Asks, Severity
from dashboards.site import Site
from kvobs.schema import signals

PREFIX = "Kvobs"
JOB = ("job",)
TARGET = (*JOB, "instance")
ENGINE = (*TARGET, "model_name", "engine")
DOUBLED = ("instance", "model_name", "engine")
OF_ENGINE = "engine {{ $labels.engine }} of {{ $labels.instance }} ({{ $labels.model_name }})"
OVERVIEW = "kvobs-overview"


def job_missing(site: Site) -> Alert:
    up = f"up{{{_matchers(site)}}}"
    by, build = f"group by ({site.cluster}, job)", Asks(site.scope).series(signals.BUILD_INFO)
    return Alert(
        site,
        OVERVIEW,
        JOB,
        PREFIX + "JobMissing",
        Severity.WARNING,
        # Of one cluster of several, or never there at all; and no other job has the metrics.
        f"({by} (last_over_time({up}[{rules.DAY}])) unless {by} ({up}) unless on ({site.cluster}) {build})\n"
        f"or (absent_over_time({up}[{rules.DAY}]) unless on () {build})",
        "15m",
        "Nothing is scraped for kvobs.",
        f"The job {{{{ $labels.job }}}}{{{{ with $labels.{site.cluster} }}}} of {{{{ . }}}}{{{{ end }}}} has no target."
        " No other kvobs alert can fire there.",
    )


def telemetry_missing(site: Site) -> Alert:
    asks = Asks(site.scope)
    build, engine_up = asks.series(signals.BUILD_INFO), asks.series(signals.ENGINE_UP)
    own = ", ".join(("model_name", "engine", *signals.BUILD_INFO.labels))
    return Alert(
        site,
        OVERVIEW,
        TARGET,
        PREFIX + "TelemetryMissing",
        Severity.WARNING,
        # Both parts have the labels of the target, so that an alert goes on when an exporter ends after its engine.
        f"(up{{{_matchers(site)}}} unless ignoring ({own}) {build})\n"
        f"or (min without (model_name, engine) ({engine_up}) == 0) - 1",
        "20m",  # large models take that long to start
        "kvobs metrics are missing.",
        "{{ $labels.instance }} of job {{ $labels.job }} "
        "{{ if eq $value 0.0 }}can't be scraped{{ else if lt $value 0.0 }}is an exporter whose engine is gone{{ else }}"
        "is scraped but has no kvobs metrics{{ end }}. No other kvobs alert can fire for this server.",
    )


def telemetry_stale(site: Site) -> Alert:
    last = Asks(site.scope).series(signals.LAST_PAYLOAD)
    works = f"rate({Selection(rules.WINDOW, site.scope).vllm_series('generation_tokens_total')}[{rules.WINDOW}]) > 0"
    return _of_engine(
        site,
        "TelemetryStale",
        Severity.WARNING,
        # It stands still, or is not scraped any more.
        beside_vllm(site, f"last_over_time({last}[1h]) unless changes({last}[10m]) > 0", works),
        "5m",
        "kvobs's numbers stand still while vLLM generates tokens.",
        "The exporter of " + OF_ENGINE + " has served no new numbers for ten minutes, or cannot be scraped, while vLLM "
        "generates tokens. No other kvobs alert can fire for this engine.",
    )  # fmt: skip


def beside_vllm(site: Site, own: str, vllm: str) -> str:
    """Return series of kvobs's for which vLLM has some on the same host, whatever the port, and of the same engine."""
    return f"{with_host(own)} and on ({site.cluster}, host, model_name, engine) {with_host(vllm)}"


def scraped_twice(site: Site) -> Alert:
    labels = ", ".join((site.cluster, *DOUBLED))
    build = Asks(site.scope).series(signals.BUILD_INFO)
    return Alert(
        site,
        OVERVIEW,
        DOUBLED,
        PREFIX + "ScrapedTwice",
        Severity.WARNING,
        f"count by ({labels}) (group by ({labels}, job) ({build})) > 1",
        "10m",
        "kvobs metrics are scraped by more than one job: boards count twice.",
        "{{ $value }} jobs scrape kvobs metrics of "
        + OF_ENGINE
        + ". Boards show multiples of the real rates, and alerts "
        "fire once per job.",
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
    asks = Asks(site.scope)
    alone, shared = (asks.rate(signals.SELF_SECONDS, where=where) for where in ("merge|apply|cut", "record|flush"))
    # The ranks that were last at some time: not more than there are, so no process costs more than this says.
    ranks = f"count without (rank) (group without (connector) ({asks.series(signals.SLOWEST_RANK)}))"
    return _of_engine(
        site,
        "TelemetryCost",
        Severity.INFO,
        f"(({shared} / {ranks}) or {shared}) > {site.self_share}\nor {alone} > {site.self_share}",
        "15m",
        "kvobs's telemetry uses much CPU time.",
        "Telemetry uses {{ $value | humanizePercentage }} of one core in one process of " + OF_ENGINE + ".",
    )


ALERTS: tuple[Callable[[Site], Alert], ...] = (
    job_missing,
    telemetry_missing,
    telemetry_stale,
    scraped_twice,
    internal_errors,
    telemetry_dropping,
)


def _of_engine(site: Site, name: str, *rest: Any) -> Alert:
    return Alert(site, OVERVIEW, ENGINE, PREFIX + name, *rest)


def _matchers(site: Site) -> str:
    return ",".join(matcher for matcher in (site.scope, f'job="{site.job}"') if matcher)
