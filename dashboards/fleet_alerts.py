"""Define the alerts about many engines of a cluster at once: what they share has failed, not one of them.

They see what alerts about single engines cannot: failures spread so thin that no engine has enough of them.
"""

from __future__ import annotations

from dashboards import rules
from dashboards.rules import Alert, Asks, Severity
from dashboards.site import Site
from dashboards.telemetry_alerts import ENGINE, JOB, OVERVIEW, PREFIX
from kvobs.schema import signals

FLEET = (*JOB, "connector")
WORST = 3
"""How many engines an alert names: with it, those of the single engines are not sent."""


def engines_failing_requests(site: Site) -> Alert:
    return _engines(
        site,
        "EnginesFailingRequests",
        Severity.CRITICAL,
        "Requests fail on many engines, because loads from a KV connector fail.",
        "Their requests fail: kv_load_failure_policy is fail.",
    )


def engines_failing(site: Site) -> Alert:
    return _engines(
        site,
        "EnginesFailing",
        Severity.WARNING,
        "Loads from a KV connector fail on many engines.",
        "Their tokens are recomputed.",
    )


def failing(site: Site, with_policy_fail: str) -> str:
    """Return the share of failed loads where it is too high; ``and`` or ``unless`` that fails requests."""
    return by_policy(site, f"{rules.FAILED_SHARE} > {site.failed_share}", with_policy_fail)


def by_policy(site: Site, bad: str, with_policy_fail: str) -> str:
    """Return what is bad on engines that fail the requests of failed loads, or on the others."""
    policy = Asks(site.scope).series(signals.CONNECTOR_INFO, failure_policy="fail")
    return f"{bad} {with_policy_fail} ignoring ({', '.join(signals.CONNECTOR_INFO.labels)}) {policy}"


def _engines(site: Site, name: str, severity: Severity, summary: str, consequence: str) -> Alert:
    by = f"by ({site.cluster}, {', '.join(FLEET)})"
    # Each once, also if several replicas of a Prometheus have it.
    each = f"group by ({site.cluster}, {', '.join((*FLEET, *ENGINE[1:]))})"
    bad = f"count {by} ({each} ({failing(site, 'and' if severity is Severity.CRITICAL else 'unless')}))"
    # Of the engines that load: an idle one, or a prefill engine of a pair, can't fail.
    loading = f"count {by} ({each} ({Asks(site.scope).rate(signals.LOADS, outcome='ok|failed')} > 0))"
    share = f"max by ({site.cluster}, instance, engine) ({rules.FAILED_SHARE}{{job=%q,connector=%q,{site.cluster}=%q}})"
    worst = (
        f'{{{{ with printf "topk({WORST}, {share})" '
        f"$labels.job $labels.connector $labels.{site.cluster} | query }}}}"
        "{{ range . }} {{ .Labels.instance }}/{{ .Labels.engine }}{{ end }}{{ end }}"
    )
    return Alert(
        site,
        OVERVIEW,
        FLEET,
        PREFIX + name,
        severity,
        f"{bad} / {loading} > {site.failing_engines}\n"
        # No least number of failures: on three engines for five minutes there are six.
        f"and {bad} >= {site.few_failing_engines}",
        "5m",
        summary,
        "On {{ $value | humanizePercentage }} of the engines of job {{ $labels.job }}{{ with $labels."
        + site.cluster
        + " }} of {{ . }}{{ end }} that load from {{ $labels.connector }}, these loads fail. "
        + consequence
        + " What the engines share may be the cause: the store, the network, a new version. Worst:"
        + worst
        + ".",
        "5m",
    )
