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

from dashboards.promql import SCHEDULER_CALLS

SOON, INTERVAL = "15s", "30s"
"""How often rules are evaluated: those about an engine that stands still, and all others."""

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
    """How long it fires after its condition has ended, where conditions come and go."""
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


RECORDINGS = {
    "connector_outcome:kvobs_lookups:rate5m": "rate(kvobs_lookups_total[5m])",
    "connector_outcome:kvobs_loads:rate5m": "sum without (mode) (rate(kvobs_loads_total[5m]))",
    "connector:kvobs_failed_loads:ratio_rate5m": """
        sum without (mode, outcome) (rate(kvobs_loads_total{outcome="failed"}[5m]))
        / (sum without (mode, outcome) (rate(kvobs_loads_total{outcome=~"ok|failed"}[5m])) > 0)
    """,
    "connector:kvobs_call_errors:rate5m": "sum without (hook, error_type) (rate(kvobs_call_errors_total[5m]))",
    "connector_mode:kvobs_load_duration_seconds:p99_rate5m": (
        "histogram_quantile(0.99, rate(kvobs_load_duration_seconds_bucket[5m]))"
    ),
    "connector:kvobs_load_bytes:rate5m": "rate(kvobs_load_bytes_total[5m])",
    "connector:kvobs_load_stall_seconds:rate5m": "rate(kvobs_load_stall_seconds_sum[5m])",
    "connector:kvobs_unused_hit_tokens:ratio_rate5m": """
        sum without (reason) (rate(kvobs_unused_hit_tokens_total{reason="other_chosen"}[5m]))
        / (rate(kvobs_offered_tokens_total[5m]) > 0)
    """,
    "connector:kvobs_scheduler_seconds:rate5m": (
        f'sum without (hook) (rate(kvobs_call_duration_seconds_sum{{hook=~"{SCHEDULER_CALLS}"}}[5m]))'
    ),
    "connector:kvobs_load_seconds_per_token:rate5m": """
        sum without (mode) (rate(kvobs_load_duration_seconds_sum[5m])) / (rate(kvobs_load_tokens_total[5m]) > 0)
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
    # shows. It counts as a whole if the engine is younger than the window (and it is not of the engine before); or if
    # it began within the window, while the engine was scraped. A Prometheus that is new or was away sees both begin at
    # the same time: such events are old.
    "connector_rank:kvobs_stuck_transfers:increase15m": """
        (
          kvobs_stuck_transfers_total
          and (
            timestamp(kvobs_stuck_transfers_total)
            >= ignoring (connector, rank) group_left () timestamp(kvobs_start_time_seconds)
          )
          and (
            kvobs_stuck_transfers_total
            and ignoring (connector, rank) (kvobs_start_time_seconds > time() - 900)
            or count_over_time(kvobs_stuck_transfers_total[15m])
            < ignoring (connector, rank) group_left () count_over_time(kvobs_start_time_seconds[15m])
          )
          or increase(kvobs_stuck_transfers_total[15m])
        )
    """,
    "engine:kvobs_self_seconds:rate5m": "sum without (where) (rate(kvobs_self_seconds_total[5m]))",
    "engine:kvobs_spans_dropped:rate5m": "sum without (where) (rate(kvobs_spans_dropped_total[5m]))",
}
"""The queries of the recording rules, by names of the form level:metric:operation."""

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
