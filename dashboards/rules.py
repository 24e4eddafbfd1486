"""Make Prometheus's rules: the recording rules, as data, and the files in which rules travel.

Rules sum up *without* the labels they do not need, so that whatever a site adds to its targets (namespace, pod,
cluster) is on every result and every alert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import yaml

from dashboards.promql import SCHEDULER_CALLS, Selection, ratio
from dashboards.site import Site
from kvobs.schema import signals
from kvobs.schema.signals import Kind, Scope, Signal

WINDOW = "5m"
"""Of rates: at least four scrapes, whatever their interval."""
LONG_WINDOW = "15m"
"""For rare events."""
FEW_WINDOW = "6h"
"""For events that are few though all requests have them."""
DAY = "1d"
"""How long the past matters, to what is still there."""
SOON, INTERVAL = "15s", "30s"
"""How often rules are evaluated: those about an engine that stands still, and all others."""


class Rule(Protocol):
    """An entry of a group."""

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of Prometheus's YAML."""


@dataclass(frozen=True)
class Recording:
    """One recording rule; its name is level:metric:operation."""

    record: str
    expr: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of Prometheus's YAML."""
        return {"record": self.record, "expr": self.expr}


class Severity(StrEnum):
    """How soon somebody has to look."""

    CRITICAL = "critical"  # requests fail or hang, or answers may be wrong
    WARNING = "warning"  # somebody should look, on the same day
    INFO = "info"  # advice: nothing is wrong


@dataclass(frozen=True)
class Alert:
    """One alert. ``about`` are labels of its series that choose what the linked board shows."""

    site: Site
    board: str
    about: tuple[str, ...]
    name: str
    severity: Severity
    expr: str
    hold: str
    summary: str
    description: str
    keep: str = ""
    """How long it goes on after its condition has ended, where states come and go."""

    @property
    def runbook_url(self) -> str:
        """The address of its section in the runbook."""
        return f"{self.site.runbook}#{self.name.lower()}"

    @property
    def dashboard_url(self) -> str:
        """The address of its board, with its labels selected."""
        chosen = "&".join(f"var-{label}={{{{ $labels.{label} | urlquery }}}}" for label in self.about)
        cluster = f"{{{{ with $labels.{self.site.cluster} }}}}&var-cluster={{{{ . | urlquery }}}}{{{{ end }}}}"
        return f"{self.site.grafana}/d/{self.board}?{chosen}{cluster}"

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of Prometheus's YAML."""
        board = {"dashboard_url": self.dashboard_url} if self.site.grafana else {}
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            **({"keep_firing_for": self.keep} if self.keep else {}),
            "labels": {"severity": str(self.severity)},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.runbook_url,
                **board,
            },
        }


@dataclass(frozen=True)
class Group:
    """Rules that are evaluated one after the other."""

    name: str
    rules: Sequence[Rule]
    interval: str = INTERVAL

    def as_dict(self) -> dict[str, Any]:
        """Return it in the form of Prometheus's YAML."""
        return {"name": self.name, "interval": self.interval, "rules": [rule.as_dict() for rule in self.rules]}


@dataclass(frozen=True)
class Asks:
    """Write the expressions of rules; ``scope`` are matchers that all series must meet, such as ``cluster="a"``."""

    scope: str = ""

    def series(self, signal: Signal, part: str = "", **labels: str) -> str:
        """Return a selector, without braces if it has no matchers."""
        return Selection(WINDOW, self.scope).series(signal, part, **labels).removesuffix("{}")

    def rate(self, signal: Signal, *keep: str, part: str = "", window: str = WINDOW, **labels: str) -> str:
        """Return a rate per second; of the signal's own labels it has those to keep."""
        return without(signal, keep, f"rate({self.series(signal, part, **labels)}[{window}])")

    def increase(self, signal: Signal, *keep: str, part: str = "", window: str = WINDOW, **labels: str) -> str:
        """Return an increase, likewise."""
        return without(signal, keep, f"increase({self.series(signal, part, **labels)}[{window}])")

    def rare(self, signal: Signal, *keep: str) -> str:
        """Return how often something rare happened within ``LONG_WINDOW``.

        Series begin with their first event, which no increase shows. They count as a whole if the engine is younger
        than the window (and they are not of the one before it); and if they began within the window, while the engine
        was scraped. A Prometheus that is new or was away finds both at the same time: what it finds is old.
        """
        series, start = self.series(signal), self.series(signals.START_TIME)
        of = f"ignoring ({_own(signal)})"
        young = f"{start} > time() - {15 * 60}"
        samples = f"count_over_time({series}[{LONG_WINDOW}])"
        began = f"{samples} < {of} group_left () count_over_time({start}[{LONG_WINDOW}])"
        is_current = f"(timestamp({series}) >= {of} group_left () timestamp({start}))"
        whole = f"{series} and {is_current} and ({series} and {of} ({young}) or {began})"
        events = f"{whole} or increase({series}[{LONG_WINDOW}])"
        summed = without(signal, keep, events)
        return f"({events})" if summed == events else summed

    def few(self, signal: Signal, **labels: str) -> str:
        """Return a counter's events within ``FEW_WINDOW``, or since the engine's start or the first one.

        It reads two samples of each series, where an increase reads those of hours.
        """
        series, start = self.series(signal, **labels), self.series(signals.START_TIME)
        same = f"{start} == {start} offset {FEW_WINDOW}"
        since = f"{series} - {series} offset {FEW_WINDOW} and ignoring ({_own(signal)}) ({same})"
        return without(signal, (), f"{since} or {series}")

    def mean(self, signal: Signal, *keep: str, window: str = WINDOW, **labels: str) -> str:
        """Return a histogram's mean."""
        total, count = (self.rate(signal, *keep, part=part, window=window, **labels) for part in ("_sum", "_count"))
        return ratio(total, count)

    def quantile(self, q: float, signal: Signal, *keep: str) -> str:
        """Return a histogram's quantile."""
        return f"histogram_quantile({q}, {self.rate(signal, 'le', *keep, part='_bucket')})"


def _own(signal: Signal) -> str:
    return ", ".join((*(["connector"] if signal.scope is Scope.CHILD else []), *signal.labels))


def without(signal: Signal, keep: Sequence[str], vector: str) -> str:
    """Return the sum over all of a signal's own labels but those to keep."""
    own = (*signal.labels, *(("le",) if signal.kind is Kind.HISTOGRAM and "_bucket" in vector else ()))
    if unknown := set(keep) - set(own):
        raise ValueError(f"{signal.name} has no label {', '.join(sorted(unknown))}: it has {', '.join(own)}")
    dropped = [label for label in own if label not in keep]
    return f"sum without ({', '.join(dropped)}) ({vector})" if dropped else vector


FAILED_SHARE = "connector:kvobs_failed_loads:ratio_rate5m"
LOAD_P99 = "connector_mode:kvobs_load_duration_seconds:p99_rate5m"
UNUSED_HIT_SHARE = "connector:kvobs_unused_hit_tokens:ratio_rate5m"
LOAD_PACE = "connector:kvobs_load_seconds_per_token:rate5m"
SCHEDULER_SHARE = "connector:kvobs_scheduler_seconds:rate5m"
RANK_SHARE = "connector_rank:kvobs_slowest_rank:ratio_rate15m"
RANK_SKEW = "connector:kvobs_rank_skew_seconds:mean_rate15m"
STUCK = "connector_rank:kvobs_stuck_transfers:increase15m"
SELF = "engine:kvobs_self_seconds:rate5m"
SPANS_DROPPED = "engine:kvobs_spans_dropped:rate5m"


def recordings(asks: Asks) -> tuple[Recording, ...]:
    """Return all recording rules: rates and errors of each connector, and the inputs of alerts."""
    failed, ended = (asks.rate(signals.LOADS, outcome=outcome) for outcome in ("failed", "ok|failed"))
    unused, offered = asks.rate(signals.UNUSED_HIT_TOKENS, reason="other_chosen"), asks.rate(signals.OFFERED_TOKENS)
    last = (asks.rate(signals.SLOWEST_RANK, *keep, window=LONG_WINDOW) for keep in (("rank",), ()))
    table = {
        "connector_outcome:kvobs_lookups:rate5m": asks.rate(signals.LOOKUPS, "outcome"),
        "connector_outcome:kvobs_loads:rate5m": asks.rate(signals.LOADS, "outcome"),
        FAILED_SHARE: ratio(failed, ended),
        "connector:kvobs_call_errors:rate5m": asks.rate(signals.CALL_ERRORS),
        LOAD_P99: asks.quantile(0.99, signals.LOAD_DURATION, "mode"),
        "connector:kvobs_load_bytes:rate5m": asks.rate(signals.LOAD_BYTES),
        "connector:kvobs_load_stall_seconds:rate5m": asks.rate(signals.LOAD_STALL, part="_sum"),
        UNUSED_HIT_SHARE: ratio(unused, offered),
        SCHEDULER_SHARE: scheduler_share(asks),
        LOAD_PACE: ratio(asks.rate(signals.LOAD_DURATION, part="_sum"), asks.rate(signals.LOAD_TOKENS)),
        RANK_SHARE: "{} / ignoring (rank) group_left () ({} > 0)".format(*last),
        RANK_SKEW: asks.mean(signals.RANK_SKEW, window=LONG_WINDOW),
        STUCK: asks.rare(signals.STUCK_TRANSFERS, "rank"),
        SELF: asks.rate(signals.SELF_SECONDS),
        SPANS_DROPPED: asks.rate(signals.SPANS_DROPPED),
    }
    return tuple(Recording(record, expr) for record, expr in table.items())


def scheduler_share(asks: Asks, window: str = WINDOW) -> str:
    """Return the share of the scheduler's time that calls into each connector take."""
    return asks.rate(signals.CALL_DURATION, part="_sum", window=window, hook=SCHEDULER_CALLS)


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
