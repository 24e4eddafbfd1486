"""Define the alerts about an engine that stands still: it ended, a call hangs, nothing is resumed.

They fire within two minutes: most read ages, which are durations already, and they are evaluated most often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dashboards import rules
from dashboards.promql import SCHEDULER_CALLS, WAITS, Selection
from dashboards.rules import Alert, Asks, Severity
from dashboards.site import Site
from dashboards.telemetry_alerts import ENGINE, OF_ENGINE, OVERVIEW, PREFIX, beside_vllm
from kvobs.schema import signals, verdicts

CHILD = (*ENGINE, "connector")
OF_CHILD = "{{ $labels.connector }} on " + OF_ENGINE
BRIEFLY, SOME_TIME = "2m", "5m"
"""How long alerts go on whose conditions come and go."""


def engine_ended(site: Site) -> Alert:
    ended = Asks(site.scope).series(signals.ENGINE_ENDED)
    return Alert(
        site,
        OVERVIEW,
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


def call_hangs(site: Site) -> Alert:
    calls, asks = signals.CALL_IN_PROGRESS, Asks(site.scope)
    return of_child(
        site,
        "CallHangs",
        Severity.CRITICAL,
        # What is called once, such as the registration of a large cache, may take long.
        f"{asks.series(calls)} > {site.call_age_s} unless {asks.series(calls, hook=signals.OTHER)}",
        "0m",  # an age is a duration already
        "A call into a KV connector does not return: the engine stands still.",
        "{{ $labels.hook }} of " + OF_CHILD + " has been in progress for {{ $value | humanizeDuration }} (rank: "
        "{{ $labels.rank }}). No step runs until it returns: all requests of this engine wait.",
        keep=BRIEFLY,
    )  # fmt: skip


def requests_not_resumed(site: Site) -> Alert:
    asks, vllm = Asks(site.scope), Selection(rules.WINDOW, site.scope)
    waits = f"{oldest(site, 'resume')} > {site.load_age_s} unless ignoring (connector, kind) {computing(site)}"
    # vLLM's own numbers say it too, without the connector; its target is another one on the same host.
    loaded = vllm.vllm_series("num_requests_kv_fetch_by_stage", 'stage="completed_waiting"')
    # Two minutes are not over where the first sample is younger.
    waited = f"min_over_time({loaded}[2m]) > 0 and {loaded} offset 90s > 0"
    running = f"max_over_time({vllm.vllm_series('num_requests_running')}[2m])"
    build = f"group without ({', '.join(signals.BUILD_INFO.labels)}) ({asks.series(signals.BUILD_INFO)})"
    stock = beside_vllm(site, build, f"{waited} unless ignoring (stage) {running} > 0")
    return Alert(
        site,
        OVERVIEW,
        ENGINE,
        PREFIX + "RequestsNotResumed",
        Severity.CRITICAL,
        f"{waits}\nor ({stock} unless ignoring (host, connector, kind) ({waits}))",
        "0m",
        "Requests whose loads have finished are not resumed, and no other runs.",
        "On " + OF_ENGINE + " no step computes anything, and a request whose load has finished"
        "{{ with $labels.connector }} ({{ . }}) has waited for {{ $value | humanizeDuration }}"
        "{{ else }} has waited for two minutes, by vLLM's own numbers{{ end }}: nothing frees the blocks it needs.",
        keep=BRIEFLY,
    )  # fmt: skip


def load_unfinished(site: Site) -> Alert:
    return of_child(
        site,
        "LoadUnfinished",
        Severity.CRITICAL,
        f"{oldest(site, 'load')} > {site.load_age_s}",
        "0m",
        "A load does not finish: its request waits.",
        "The oldest load of "
        + OF_CHILD
        + " has been in progress for {{ $value | humanizeDuration }}. Its request waits "
        "until all ranks have reported it.",
        keep=BRIEFLY,
    )


def connector_blocks_engine(site: Site) -> Alert:
    # Within the window as many seconds as a call that hangs. It has no two samples of a target that is scraped once a
    # minute.
    share = (rules.scheduler_share(Asks(site.scope), window) for window in ("90s", rules.WINDOW))
    return of_child(
        site,
        "ConnectorBlocksEngine",
        Severity.CRITICAL,
        f"({' or '.join(share)}) > {site.blocked_share} {unless_polling(site)}",
        "0m",
        "An engine spends most of its time in calls into a KV connector.",
        f"{blocking('90 seconds')}: all requests of this engine wait.",
        keep=BRIEFLY,
    )


INCIDENTS: tuple[Callable[[Site], Alert], ...] = (
    engine_ended,
    call_hangs,
    requests_not_resumed,
    load_unfinished,
    connector_blocks_engine,
)
"""About an engine that stands still: evaluated most often."""


def computing(site: Site) -> str:
    """Return a value for each engine that has computed a step within 90 seconds."""
    asks = Asks(site.scope)
    return "{} != {}".format(
        *(f"sum without (kind) ({asks.series(signals.STEP_SECONDS)}{at})" for at in ("", " offset 90s"))
    )


def unless_polling(site: Site) -> str:
    """Return the end of a share: without quick calls on engines that compute nothing, which poll."""
    asks, own = Asks(site.scope), "ignoring (connector, kind)"
    mean = asks.mean(signals.CALL_DURATION, hook=SCHEDULER_CALLS)
    waiting = asks.series(signals.IN_FLIGHT, kind=WAITS)
    return f"unless ({mean} < {verdicts.POLL_S} and {own} ({waiting} > 0 unless {own} {computing(site)}))"


def blocking(span: str) -> str:
    """Return what an alert says about a connector's share of the scheduler's time."""
    return (
        f"The scheduler spent {{{{ $value | humanizePercentage }}}} of the last {span} in calls into {OF_CHILD}. No "
        "step runs during such a call"
    )


def oldest(site: Site, kinds: str) -> str:
    """Return the ages of what is in progress, of these kinds."""
    return Asks(site.scope).series(signals.OLDEST_IN_FLIGHT, kind=kinds)


def of_child(site: Site, name: str, *rest: Any, board: str = "kvobs-connector", keep: str = "") -> Alert:
    """Return an alert about a connector of an engine."""
    return replace(Alert(site, board, CHILD, PREFIX + name, *rest), keep=keep)
