"""The queries of boards about connectors, as PromQL with a board's variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dashboards.promql import (
    CLUSTER,
    ENGINE,
    ENGINE_LABELS,
    SCHEDULER_CALLS,
    SITE_LABELS,
    WAITS,
    Selection,
    ratio,
    share,
)
from kvobs.schema import signals, verdicts

VARIABLES = (*ENGINE_LABELS, "connector")
ROLE = "role"
"""A further variable, of the board *Prefill and decode*: the connector's kv_role."""

SELECTION = Selection(
    window="$__rate_interval",
    engine=",".join(f'{label}=~"${label}"' for label in ENGINE_LABELS),
    connector='connector=~"$connector"',
)

by_connector = ("connector",)
by_engine = ("connector", *SITE_LABELS, "instance", "engine")
"""Labels of a connector of one engine. In a fleet the mean hides the one that fails."""

_INFO = SELECTION.series(signals.CONNECTOR_INFO)
_CORES = SELECTION.series(signals.LOCAL_CACHE_TOKENS)
"""A series of each engine, on the host of its EngineCore: a host that has only ranks serves all else about these."""

VLLM = Selection(SELECTION.window, 'cluster=~"$cluster",model_name=~"$model_name",engine=~"$engine"', beside=_INFO)
"""vLLM's metrics come from another job, and with the exporter from another port (see docs/quickstart.md)."""

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"


def side(role: str, other: str) -> tuple[Selection, Selection]:
    """Return kvobs's and vLLM's series of the engines of one side: those with a connector of this role, or of both.

    An engine with a connector of the ``other`` role is on the other side, whatever else it has.
    """
    engines = replace(SELECTION, engine=f'{SELECTION.engine},{ROLE}=~"${ROLE}"').series(
        signals.CONNECTOR_INFO, role=f"{role}|{BOTH}"
    )
    others = replace(SELECTION, connector="").series(signals.CONNECTOR_INFO, role=other)
    of_role = f"{engines} unless {ENGINE} {others}"
    return replace(SELECTION, among=of_role), replace(VLLM, beside=f"({of_role})")


PREFILL, PREFILL_VLLM = side(PRODUCER, CONSUMER)
DECODE, DECODE_VLLM = side(CONSUMER, PRODUCER)

SEVERITIES = ("info", "warning", "critical")


def every(*by: str) -> str:
    """Return a 1 for every configured connector by these labels, whether or not it has done anything."""
    return SELECTION.gauge(signals.CONNECTOR_INFO, *by, how="max")


def engines(*by: str) -> str:
    """Return the number of engines by these labels of their connectors; one on several hosts counts once."""
    grouped = f" by ({', '.join(by)}) " if by else ""
    each = replace(SELECTION, among=_CORES).gauge(signals.CONNECTOR_INFO, *by, *by_engine[1:], how="max")
    return f"count{grouped}({each})"


def worst_engine(expr: str) -> str:
    """Return a value for each connector: the value on the engine where it is highest."""
    return f"max by (connector) ({expr})"


def calls() -> str:
    """Return the ages of the calls that engines wait for."""
    return SELECTION.gauge(signals.CALL_IN_PROGRESS, "connector", "hook", "instance", "engine", "rank", how="max")


def firing_alerts(severity: str = ".+", name: str = "Kvobs.+") -> str:
    """Return alerts of kvobs that fire: not all of them have all labels."""
    chosen = ",".join(f'{label}=~"${label}|"' for label in VARIABLES)
    return f'ALERTS{{alertname=~"{name}",alertstate="firing",severity=~"{severity}",{chosen}}}'


def alerts_by_severity() -> str:
    """Return alerts that fire, each with its severity as a number, by what they are about."""
    every_one = " or ".join(f"{index} * {firing_alerts(name)}" for index, name in enumerate(SEVERITIES, 1))
    return f"max by (alertname, {', '.join(by_engine)}) ({every_one})"


def alerts_firing() -> str:
    """Return how many alerts fire, as the table has them, by severity: ranks are one. "none" is 0 where none fires."""
    each = f"count by (severity) (group by (alertname, severity, {', '.join(by_engine)}) ({firing_alerts()}))"
    return f'{each} or on () label_replace(vector(0), "severity", "none", "", "")'


def wrong_blocks(*by: str) -> str:
    """Return blocks that were loaded with wrong bytes since the engine's start: restarting mends it."""
    return f"{SELECTION.gauge(signals.CORRUPT_BLOCKS, *by)} > 0"


def engines_down() -> str:
    """Return how many engines are gone, of those that had kvobs within a day and whose target is still one."""
    target = f"{CLUSTER}, job, instance"
    known = f"group by ({target}, engine) (last_over_time({_CORES}[1d]))"
    unseen = f'max by ({target}) (up{{job=~"$job",cluster=~"$cluster"}} == bool 0)'
    ended = f"{SELECTION.series(signals.ENGINE_UP)} == bool 0 and {ENGINE} {_CORES}"
    return f"sum({known} * on ({target}) group_left () {unseen}) + (sum({ended}) or vector(0))"


def failures(*by: str, among: str = "") -> str:
    """Return loads that failed and exceptions, per second, of the engines that the query ``among`` finds."""
    return _or_raised(SELECTION.rates(signals.LOADS, outcome="failed"), by, among)


def attempts(*by: str, among: str = "") -> str:
    """Return loads that succeeded or failed, and exceptions, per second: an aborted load is neither."""
    return _or_raised(SELECTION.rates(signals.LOADS, outcome="ok|failed"), by, among)


def _or_raised(loads: str, by: Sequence[str], among: str) -> str:
    either = f"{loads} or {SELECTION.rates(signals.CALL_ERRORS)}"
    return f"sum by ({', '.join(by)}) ({f'({either}) and {ENGINE} {among}' if among else either})"


def failing_share(*by: str) -> str:
    """Return failures among attempts: a connector whose lookups raise has no loads that could fail.

    Where EngineCore is: hosts that have only ranks count exceptions, and no loads.
    """
    return share(failures(*by, among=_CORES), attempts(*by, among=_CORES))


def hit_share(*by: str) -> str:
    """Return hits among the requests that were answered."""
    hits, answered = (SELECTION.rate(signals.LOOKUPS, *by, outcome=o) for o in ("hit", "hit|miss"))
    return share(hits, answered)


def unused_hit_share(*by: str) -> str:
    """Return the tokens that no connector loaded although this one had them, among those that it offered."""
    unused = SELECTION.rate(signals.UNUSED_HIT_TOKENS, *by, reason="other_chosen")
    return share(unused, SELECTION.rate(signals.OFFERED_TOKENS, *by))


def net_gain(*by: str) -> str:
    """Return the seconds that loads save, minus those that requests wait for them, per second."""
    saved, waited = (SELECTION.rate(s, *by) for s in (signals.PREFILL_SAVED, signals.LOAD_WAITED))
    return f"({saved} or 0 * {waited}) - {waited}"


def net_gain_share(*by: str) -> str:
    """Return the same as a share of the engines' time: 1 is a second per second on each engine."""
    return ratio(f"({net_gain(*by)})", engines(*by))


def slower_share(*by: str) -> str:
    """Return the loads that took longer than computing, among the loads that succeeded or failed."""
    return share(SELECTION.rate(signals.LOADS_SLOWER, *by), SELECTION.rate(signals.LOADS, *by, outcome="ok|failed"))


def estimated_share(*by: str) -> str:
    """Return the loads with an estimate of what they saved, among the loads that succeeded or failed."""
    return share(SELECTION.rate(signals.ESTIMATED_LOADS, *by), SELECTION.rate(signals.LOADS, *by, outcome="ok|failed"))


def loaded_share() -> str:
    """Return the prompt tokens that connectors loaded, among all.

    Both by vLLM, which counts a prompt once: kvobs counts a preempted request's loads every time.
    """
    loaded = VLLM.vllm_rate("prompt_tokens_by_source_total", matching='source="external_kv_transfer"')
    return ratio(loaded, VLLM.vllm_rate("prompt_tokens_total"))


def oldest(*by: str, of: Selection = SELECTION, **labels: str) -> str:
    """Return the age of the oldest lookup, load, resume or promised save in progress; 0 if there is none."""
    return of.gauge(signals.OLDEST_IN_FLIGHT, *by, how="max", **labels)


def resume_ages(*by: str) -> str:
    """Return the age of the oldest resume on engines that compute nothing: there it does not wait for others."""
    age, steps = (
        SELECTION.series(signals.OLDEST_IN_FLIGHT, kind="awaiting_schedule"),
        SELECTION.series(signals.STEP_SECONDS),
    )
    # Where an engine is scraped once a minute, its last two scrapes are further apart.
    rarely = f"{steps} > {steps} offset 90s unless count_over_time({steps}[30s]) > 1"
    return f"max by ({', '.join(by)}) ({age} unless {ENGINE} ({steps} > {steps} offset 30s or {rarely}))"


def hang_ages() -> str:
    """Return the ages of the calls that engines wait for, and of what has been in progress for too long."""
    by, limits = (*by_engine, "kind"), verdicts.HANGS.limits
    unscheduled = f"{resume_ages(*by)} >= {limits['awaiting_schedule']}"
    waiting = f"{oldest(*by, kind='lookup|load')} >= {limits['load']} or {unscheduled}"
    return f"{calls()} or {waiting}"


def requests(*by: str) -> str:
    """Return 1 for the connectors of engines that have requests, by vLLM."""
    vllm = replace(VLLM, beside="")
    some = " or ".join(f"{vllm.vllm_series(f'num_requests_{state}')} > 0" for state in ("running", "waiting"))
    return f"max by ({', '.join(by)}) ({replace(SELECTION, beside=some).on_host(_INFO)})"


def quarantine(*by: str) -> str:
    """Return 1 for connectors in quarantine."""
    return SELECTION.gauge(signals.QUARANTINED, *by, how="max")


def scheduler_share(*by: str, of: Selection = SELECTION) -> str:
    """Return the share of time that the scheduler spends in calls into connectors."""
    return of.rate(signals.CALL_DURATION, *by, part="_sum", hook=SCHEDULER_CALLS)


def _blocking(*by: str) -> str:
    """Return that share without quick calls on engines that compute nothing while requests wait, which poll."""
    engine = replace(SELECTION, connector='connector=~".+"')
    waiting = f"{engine.series(signals.IN_FLIGHT, kind=WAITS)} > 0"
    polling = f"{waiting} unless {ENGINE} {engine.rates(signals.STEP_SECONDS)} > 0"
    others = replace(SELECTION, among=f"{_INFO} unless {ENGINE} ({polling})")
    mean = SELECTION.mean(signals.CALL_DURATION, *by, hook=SCHEDULER_CALLS)
    return f"({scheduler_share(*by, of=others)} or {scheduler_share(*by)} and {mean} >= {verdicts.POLL_S})"


def link_share(*, at_most: bool = False) -> str:
    """Return the share of its links that each connector's loads use while in progress, where it is lowest.

    The time in which some load was in progress is at most the loads' time together; and, with ``at_most``, at least
    that divided by the most that were in progress at once.
    """
    lasted = SELECTION.rate(signals.LOAD_DURATION, *by_engine, part="_sum")
    in_use = f"clamp_max({lasted}, 1)"
    if at_most:
        loads = SELECTION.series(signals.IN_FLIGHT, kind="load")
        most = f"max by ({', '.join(by_engine)}) (max_over_time({loads}[{SELECTION.window}]))"
        in_use = f"clamp_max({ratio(lasted, f'clamp_min({most}, 1)')}, 1)"
    in_use += f" * {SELECTION.gauge(signals.LINK_SPEED, *by_engine, how='max')}"
    return f"min by (connector) ({ratio(SELECTION.rate(signals.LOAD_BYTES, *by_engine), in_use)})"


def load_speed(*by: str, of: Selection = SELECTION) -> str:
    """Return bytes per second of a load while it runs, as a mean."""
    return ratio(of.rate(signals.LOAD_BYTES, *by), of.rate(signals.LOAD_DURATION, *by, part="_sum"))


def with_role(expr: str) -> str:
    """Return values of connectors of single engines (``by_engine``), with their role as a label."""
    chosen = replace(SELECTION, engine=f'{SELECTION.engine},{ROLE}=~"${ROLE}"')
    roles = chosen.gauge(signals.CONNECTOR_INFO, *by_engine, ROLE, how="max")
    return f"({expr}) * on ({', '.join(by_engine)}) group_left ({ROLE}) {roles}"


def none_if_empty(expr: str) -> str:
    """Return 0 for a connector called "none" if there is no such connector, nothing without kvobs."""
    no_connector = f'label_replace(0 * max({every(*by_connector)}), "connector", "none", "", "")'
    return f"{expr} or on () {no_connector}"


def connector_or_zero(expr: str) -> str:
    """Return a value for every connector: 0 where it has not been counted yet."""
    return f"{expr} or 0 * {every(*by_connector)}"


def with_index(expr: str) -> str:
    """Return values by connector with its position in the configuration as the label ``index``.

    Where engines are configured differently one of the positions is taken.
    """
    return f"({expr}) * on (connector) group_left (index) topk by (connector) (1, {_INFO})"


def measures(*by: str) -> dict[str, str]:
    """Return the query of each measure of ``verdicts``, by these labels."""
    return {
        "ended": SELECTION.gauge(signals.ENGINE_ENDED, *by, how="max"),
        "call": SELECTION.gauge(signals.CALL_IN_PROGRESS, *by, how="max"),
        "lookup": oldest(*by, kind="lookup"),
        "load": oldest(*by, kind="load"),
        "awaiting_schedule": resume_ages(*by),
        "corrupt_blocks": SELECTION.gauge(signals.CORRUPT_BLOCKS, *by),  # since the start: it is not mended yet
        "quarantined": quarantine(*by),
        "failing_share": failing_share(*by),
        "scheduler_share": _blocking(*by),
        "load_p99": SELECTION.quantile(0.99, signals.LOAD_DURATION, *by),
        "thrash_share": thrash_share(*by),
        "never_serves": f"max by ({', '.join(by)}) ({firing_alerts(name='KvobsNeverServes')})",
        "time_in_calls": SELECTION.rate(signals.CALL_DURATION, *by, part="_sum"),
        "in_progress": SELECTION.gauge(signals.IN_FLIGHT, *by),
        "requests": requests(*by),
        "configured": every(*by),
    }


def verdict(*by: str) -> str:
    """Return a state by these labels, as a number of ``looks``; the worst state counts."""
    asked, states = measures(*by), enumerate(verdicts.STATES, 1)
    return " or ".join(
        f"0 * ({asked[measure]} >= {limit:g}) + {len(verdicts.STATES) - rank}"
        for rank, state in states
        for measure, limit in state.limits.items()
    )


def evicted_too_early(*by: str, of: Selection = SELECTION) -> str:
    """Return the share of evicted tokens that prompts asked for before they were stored again."""
    return share(of.rate(signals.REUSED_EVICTIONS, *by), of.rate(signals.FOLLOWED_EVICTIONS, *by))


def thrash_share(*by: str) -> str:
    """Return how much of what a store evicts is asked for again, where it evicts much and loads less than that.

    Over half an hour, as the alert KvobsStoreTooSmall: what is evicted now is asked for later. With several media a
    lower one keeps what a higher one evicts.
    """
    of = replace(SELECTION, window="30m")
    asked = evicted_too_early(*by, of=of)
    lost = of.rate(signals.EVICTED_TOKENS, *by)
    loaded = f"({of.rate(signals.LOAD_TOKENS, *by)} or 0 * {lost})"
    grouped = ", ".join(by)
    media = f"group by ({grouped}, medium) ({of.series(signals.SAVE_TOKENS)})"
    return (
        f"({asked} and {lost} >= {verdicts.FEW_TOKENS} and {asked} * {lost} > {loaded}"
        f" unless count by ({grouped}) ({media}) > 1)"
    )


def collector_losses(metric: str) -> str:
    """Return spans per second that collectors counted so, of those with the most.

    The metric has the suffix ``_total`` or not, as the collector's settings have it.
    """
    names = (metric, f"{metric}_total")
    either = " or ".join(f'rate({name}{{cluster=~"$cluster"}}[$__rate_interval])' for name in names)
    return f"topk(10, sum by (instance, exporter) ({either}))"


def restarts() -> str:
    """Return a value where an engine has restarted."""
    start = SELECTION.series(signals.START_TIME)
    return f"changes({start}[$__rate_interval]) > 0 or ({start} unless {start} offset $__rate_interval)"


def new_versions() -> str:
    """Return a value where a version runs that did not five minutes before."""
    running = SELECTION.series(signals.BUILD_INFO)
    versions = "group by (version, vllm_version)"
    return f"{versions} ({running}) unless {versions} ({running} offset 5m)"
