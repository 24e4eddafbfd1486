"""Define the recording rules and what an alert is, and write rules as YAML.

Queries contain the settings of a site as tokens (``__job__``), and sum up *without* the labels that they do not need:
labels that a site adds to its targets (namespace, pod, cluster) are on every result and every alert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from inspect import cleandoc
from typing import Any

import yaml

from dashboards.promql import SCHEDULER_CALLS, WAITS
from kvobs.schema.percentiles import middle_promql
from kvobs.schema.verdicts import POLL_S

SOON, INTERVAL = "15s", "30s"
"""How often rules are evaluated: the ones about an engine that makes no progress, and all others."""

JOB = ("job",)
TARGET = (*JOB, "instance")
ENGINE = (*TARGET, "model_name", "engine")
CONNECTOR = (*ENGINE, "connector")
FLEET = (*JOB, "connector")
DOUBLED = ("instance", "model_name", "engine")
OVERVIEW = "kvobs-overview"


class Severity(StrEnum):
    """How soon somebody has to look."""

    CRITICAL = "critical"  # requests fail or hang, or answers may be wrong
    WARNING = "warning"  # somebody should look, on the same day
    INFO = "info"  # advice: nothing is wrong


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert. In its texts ``{engine}`` and ``{connector}`` stand for what it is about."""

    name: str
    severity: Severity
    about: tuple[str, ...]
    """Labels of its series: they choose what the linked board shows."""
    board: str = OVERVIEW
    expr: str
    hold: str
    """How long its condition is true before it fires: Prometheus's ``for``."""
    keep: str = ""
    """How long it fires after its condition has ended. It outlives its engine by as much: where conditions come and
    go, the query has windows instead, and ends with the engine's life."""
    summary: str
    description: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of Prometheus's YAML."""
        engine = "engine {{ $labels.engine }} of {{ $labels.instance }} ({{ $labels.model_name }})"
        connector = "{{ $labels.connector }} on " + engine
        chosen = "&".join(f"var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in self.about)
        cluster = "{{ with $labels.__cluster__ }}&var-cluster={{ . | urlquery }}{{ end }}"
        return {
            "alert": self.name,
            "expr": cleandoc(self.expr),
            "for": self.hold,
            **({"keep_firing_for": self.keep} if self.keep else {}),
            "labels": {"severity": str(self.severity)},
            "annotations": {
                "summary": self.summary,
                "description": self.description.replace("{engine}", engine).replace("{connector}", connector),
                "runbook_url": f"__runbook__#{self.name.lower()}",
                "dashboard_url": f"__grafana__/d/{self.board}?{chosen}{cluster}",
            },
        }


SOON_RECORDINGS = {
    # Evaluated with the alerts about engines that make no progress, and before them, so that these see what is now.
    # Engines whose scheduler has computed something.
    "engine:kvobs_step_seconds:changed90s": "kvobs_step_seconds_total != kvobs_step_seconds_total offset 90s",
    # Requests wait, and nothing was computed.
    "engine:kvobs_in_flight:idle90s": f"""
        max without (connector, kind) (kvobs_in_flight{{kind=~"{WAITS}"}} > 0)
        unless engine:kvobs_step_seconds:changed90s
    """,
    "connector_kind:kvobs_oldest_in_flight_seconds:idle90s": """
        kvobs_oldest_in_flight_seconds{kind="awaiting_schedule"} > __load_age_s__
        unless ignoring (connector, kind) engine:kvobs_step_seconds:changed90s
    """,
}
"""The same as ``RECORDINGS``, as often as the alerts about engines that make no progress."""

RECORDINGS = {
    # Engines that have been the same for so long, or since they are known; a missed scrape, or an exporter that starts
    # again, does not end them. What a query with such a window, or a longer one, finds is of no engine before them.
    "engine:kvobs_start_time_seconds:same2m": """
        last_over_time(kvobs_start_time_seconds[90s]) == min_over_time(kvobs_start_time_seconds[2m])
    """,
    "engine:kvobs_start_time_seconds:same5m": """
        last_over_time(kvobs_start_time_seconds[90s]) == min_over_time(kvobs_start_time_seconds[5m])
    """,
    "engine:kvobs_start_time_seconds:same10m": """
        last_over_time(kvobs_start_time_seconds[90s]) == min_over_time(kvobs_start_time_seconds[10m])
    """,
    # Connectors of engines where a failed load fails its request: as last seen, since a missed scrape has none.
    "connector:kvobs_connector_info:fail_last2m": """
        max without (index, class, role, load_policy, failure_policy) (
          last_over_time(kvobs_connector_info{failure_policy="fail"}[2m])
        )
    """,
    "connector_outcome:kvobs_lookups:rate5m": "rate(kvobs_lookups_total[5m])",
    "connector_outcome:kvobs_loads:rate5m": "sum without (mode) (rate(kvobs_loads_total[5m]))",
    "connector:kvobs_lookups:ratio_rate5m": """
        (
          sum without (outcome) (connector_outcome:kvobs_lookups:rate5m{outcome="hit"})
          or 0 * sum without (outcome) (connector_outcome:kvobs_lookups:rate5m{outcome=~"hit|miss"})
        )
        / (sum without (outcome) (connector_outcome:kvobs_lookups:rate5m{outcome=~"hit|miss"}) > 0)
    """,
    # An engine that has just replaced another has its own loads only: all that it counted.
    "connector:kvobs_failed_loads:ratio_rate5m": """
        sum without (mode, outcome) (rate(kvobs_loads_total{outcome="failed"}[5m]))
        / (sum without (mode, outcome) (rate(kvobs_loads_total{outcome=~"ok|failed"}[5m])) > 0)
        and ignoring (connector) engine:kvobs_start_time_seconds:same5m
        or (
          sum without (mode, outcome) (
            kvobs_loads_total{outcome="failed"}
            and (
              timestamp(kvobs_loads_total{outcome="failed"})
              >= ignoring (connector, mode, outcome) group_left () timestamp(kvobs_start_time_seconds)
            )
          )
          / (sum without (mode, outcome) (kvobs_loads_total{outcome=~"ok|failed"}) > 0)
          unless ignoring (connector) engine:kvobs_start_time_seconds:same5m
        )
    """,
    # Few loads, of hours: two samples of each series are read, where an increase reads all. A good load hides failures
    # for two hours, and one that fails each hour is seen in six.
    "connector_outcome:kvobs_loads:increase6h": """
        sum without (mode) (
          kvobs_loads_total - kvobs_loads_total offset 6h
          and ignoring (connector, mode, outcome) (kvobs_start_time_seconds == kvobs_start_time_seconds offset 6h)
          or kvobs_loads_total
        )
    """,
    "connector_outcome:kvobs_loads:increase2h": """
        sum without (mode) (
          kvobs_loads_total - kvobs_loads_total offset 2h
          and ignoring (connector, mode, outcome) (kvobs_start_time_seconds == kvobs_start_time_seconds offset 2h)
          or kvobs_loads_total
        )
    """,
    "connector:kvobs_failing_loads:ratio_rate5m": """
        connector:kvobs_failed_loads:ratio_rate5m > __failed_share__
        and sum without (mode, outcome) (increase(kvobs_loads_total{outcome="failed"}[15m])) >= __few_failed__
        or (
          (sum without (outcome) (connector_outcome:kvobs_loads:increase6h{outcome="failed"}) >= 3)
          / sum without (outcome) (connector_outcome:kvobs_loads:increase6h{outcome=~"ok|failed"})
        ) == 1
        or (
          (sum without (outcome) (connector_outcome:kvobs_loads:increase2h{outcome="failed"}) >= 3)
          / sum without (outcome) (connector_outcome:kvobs_loads:increase2h{outcome=~"ok|failed"})
        ) == 1
    """,
    "connector:kvobs_failing_loads:lasting10m": """
        last_over_time(connector:kvobs_failing_loads:ratio_rate5m[10m])
        and count_over_time(connector:kvobs_failing_loads:ratio_rate5m[10m:30s]) > 10
    """,
    # Of a job, in each cluster: engines whose loads fail their requests, others whose loads fail, all that load. Each
    # engine once, also if several replicas of a Prometheus have it; an idle one, or a prefill engine, can't fail.
    "job_connector:kvobs_failed_loads:fail_engines_rate5m": """
        count by (__cluster__, job, connector) (
          group by (__cluster__, job, connector, instance, model_name, engine) (
            connector:kvobs_failed_loads:ratio_rate5m > __failed_share__
            and connector:kvobs_connector_info:fail_last2m
          )
        )
    """,
    "job_connector:kvobs_failed_loads:recompute_engines_rate5m": """
        count by (__cluster__, job, connector) (
          group by (__cluster__, job, connector, instance, model_name, engine) (
            connector:kvobs_failed_loads:ratio_rate5m > __failed_share__
            unless connector:kvobs_connector_info:fail_last2m
          )
        )
    """,
    "job_connector:kvobs_loads:engines_rate5m": """
        count by (__cluster__, job, connector) (
          group by (__cluster__, job, connector, instance, model_name, engine) (
            sum without (outcome) (connector_outcome:kvobs_loads:rate5m{outcome=~"ok|failed"}) > 0
          )
        )
    """,
    "connector:kvobs_loads:increase5m": """
        sum without (mode, outcome) (increase(kvobs_loads_total{outcome=~"ok|failed"}[5m]))
    """,
    "connector:kvobs_loads:async_increase15m": """
        sum without (mode, outcome) (increase(kvobs_loads_total{mode="async",outcome="ok"}[15m]))
    """,
    "connector:kvobs_call_errors:rate5m": "sum without (hook, error_type) (rate(kvobs_call_errors_total[5m]))",
    "connector_mode:kvobs_load_duration_seconds:p99_rate5m": middle_promql(
        "histogram_quantile(0.99, rate(kvobs_load_duration_seconds_bucket[5m]))"
    ),
    "connector_mode:kvobs_load_duration_seconds:p50_rate2m": middle_promql(
        "histogram_quantile(0.5, rate(kvobs_load_duration_seconds_bucket[2m]))"
    ),
    "connector:kvobs_load_bytes:rate5m": "rate(kvobs_load_bytes_total[5m])",
    "connector:kvobs_load_stall_seconds:rate5m": "rate(kvobs_load_stall_seconds_sum[5m])",
    "connector:kvobs_unused_hit_tokens:ratio_rate5m": """
        sum without (reason) (rate(kvobs_unused_hit_tokens_total{reason="other_chosen"}[5m]))
        / (rate(kvobs_offered_tokens_total[5m]) > 0)
    """,
    "connector:kvobs_call_duration_seconds:scheduler_rate5m": f"""
        sum without (hook) (rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[5m]))
    """,
    # Quick calls on engines that compute nothing while requests wait are polling.
    "connector:kvobs_scheduler_seconds:rate2m": f"""
        sum without (hook) (rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[2m]))
        and ignoring (connector) engine:kvobs_start_time_seconds:same2m
        unless (
          sum without (hook) (rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[2m]))
          / (sum without (hook) (rate(kvobs_call_duration_seconds_count{{hook=~"{SCHEDULER_CALLS}"}}[2m])) > 0)
          < {POLL_S}
          and ignoring (connector) engine:kvobs_in_flight:idle90s
        )
    """,
    # Engines all of whose loads are late, because a connector blocks the scheduler, or its calls there are slow.
    "engine:kvobs_scheduler_seconds:late_rate2m": f"""
        max without (connector, hook) (
          rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[2m]) > __scheduler_share__
          unless
            rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[2m])
            / (rate(kvobs_call_duration_seconds_count{{hook=~"{SCHEDULER_CALLS}"}}[2m]) > 0) < 0.1
        )
        or max without (connector) (connector:kvobs_scheduler_seconds:rate2m) > __blocked_share__
    """,
    # A slow load is also slow for the tokens of an average load: long contexts take long.
    "connector_mode:kvobs_slow_loads:p99_rate5m": """
        connector_mode:kvobs_load_duration_seconds:p99_rate5m > __slow_load_s__
        and connector_mode:kvobs_load_duration_seconds:p99_rate5m
          > ignoring (mode) group_left () (
            __slow_load_s_per_1k_tokens__ / 1000 * rate(kvobs_load_tokens_total[5m])
            / (sum without (mode, outcome) (rate(kvobs_loads_total{outcome="ok"}[5m])) > 0)
          )
        and increase(kvobs_load_duration_seconds_count[5m]) >= __few_loads__
        and ignoring (connector, mode) engine:kvobs_start_time_seconds:same5m
        unless ignoring (connector, mode) engine:kvobs_scheduler_seconds:late_rate2m
    """,
    # Most loads of two minutes: a burst of slow ones is soon in the minority, and a change is seen after a minute.
    "connector_mode:kvobs_slow_loads:median_rate2m": """
        connector_mode:kvobs_load_duration_seconds:p50_rate2m > __slow_load_s__
        and connector_mode:kvobs_load_duration_seconds:p50_rate2m
          > ignoring (mode) group_left () (
            __slow_load_s_per_1k_tokens__ / 1000 * rate(kvobs_load_tokens_total[2m])
            / (sum without (mode, outcome) (rate(kvobs_loads_total{outcome="ok"}[2m])) > 0)
          )
        and increase(kvobs_load_duration_seconds_count[5m]) >= __few_loads__
        and ignoring (connector, mode) engine:kvobs_start_time_seconds:same2m
        unless ignoring (connector, mode) engine:kvobs_scheduler_seconds:late_rate2m
    """,
    # For the tokens that are loaded, so that longer contexts are not slower.
    "connector:kvobs_load_seconds_per_token:rate2m": """
        sum without (mode) (rate(kvobs_load_duration_seconds_sum[2m])) / (rate(kvobs_load_tokens_total[2m]) > 0)
    """,
    # As many times as long as a day ago; short loads may vary.
    "connector:kvobs_slowed_loads:ratio_rate2m": """
        connector:kvobs_load_seconds_per_token:rate2m
        / (avg_over_time(connector:kvobs_load_seconds_per_token:rate2m[1h] offset 1d) > 0) > __slowed_times__
        and sum without (mode) (rate(kvobs_load_duration_seconds_sum[2m]))
        / (sum without (mode) (rate(kvobs_load_duration_seconds_count[2m])) > 0) > 0.1
        and sum without (mode) (increase(kvobs_load_duration_seconds_count[5m])) >= __few_loads__
        and ignoring (connector) engine:kvobs_start_time_seconds:same2m
        unless ignoring (connector) engine:kvobs_scheduler_seconds:late_rate2m
    """,
    "connector_rank:kvobs_slowest_rank:ratio_rate15m": """
        rate(kvobs_slowest_rank_total[15m])
        / ignoring (rank) group_left () (sum without (rank) (rate(kvobs_slowest_rank_total[15m])) > 0)
    """,
    "connector:kvobs_rank_skew_seconds:mean_rate15m": """
        sum without (kind) (rate(kvobs_rank_skew_seconds_sum[15m]))
        / (sum without (kind) (rate(kvobs_rank_skew_seconds_count[15m])) > 0)
    """,
    # How often something rare happened, here and in alerts. A series begins with its first event, which no increase
    # shows. It counts as a whole if the engine is younger than the window (what is of the engine before does not); or
    # if it began within the window, while the engine was scraped. A Prometheus that is new or was away sees both begin
    # at the same time: such events are old.
    "connector_rank:kvobs_stuck_transfers:increase15m": """
        (
          kvobs_stuck_transfers_total
          and (
            timestamp(kvobs_stuck_transfers_total)
            >= ignoring (connector, rank) group_left () timestamp(kvobs_start_time_seconds)
          )
          and (
            kvobs_stuck_transfers_total
            and ignoring (connector, rank) (
              kvobs_start_time_seconds > time() - 900
              or kvobs_start_time_seconds > min_over_time(kvobs_start_time_seconds[15m])
            )
            or count_over_time(kvobs_stuck_transfers_total[15m])
            < ignoring (connector, rank) group_left () count_over_time(kvobs_start_time_seconds[15m])
          )
          or increase(kvobs_stuck_transfers_total[15m])
          and ignoring (connector, rank) (
            kvobs_start_time_seconds == min_over_time(kvobs_start_time_seconds[15m])
          )
        )
    """,
    "engine:kvobs_overhead_seconds:rate5m": "sum without (stage) (rate(kvobs_overhead_seconds_total[5m]))",
    "engine:kvobs_overhead_seconds:record_rate5m": """
        sum without (stage) (rate(kvobs_overhead_seconds_total{stage="record"}[5m]))
    """,
    # The ranks that were last at some time: not more than the engine has.
    "engine:kvobs_slowest_rank:count": "count without (rank) (group without (connector) (kvobs_slowest_rank_total))",
    "engine:kvobs_spans_dropped:rate5m": "sum without (where) (rate(kvobs_spans_dropped_total[5m]))",
}
"""The queries of the recording rules, by names of the form level:metric:operation.

What alerts ask more than once is a rule, with one exception: an engine's age in fifteen minutes. Alerts on rare events
ask for it at several times of the past, and a rule that is half a minute late would count events of the engine before.
Panels ask for raw metrics and not for these: boards also work where rules are not loaded, and their windows follow the
chosen time.
"""

HEADER = "# Made by `python -m dashboards`; change what makes it.\n"


def to_yaml(*documents: Mapping[str, Any], header: str = HEADER) -> str:
    """Write YAML that people read: keys in their order, long lines and multi-line texts whole."""
    written = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True) for one in documents]
    return header + "---\n".join(written)


class _Dumper(yaml.SafeDumper):
    """Writes lists within maps indented, and texts of several lines as such."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, indentless=False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
