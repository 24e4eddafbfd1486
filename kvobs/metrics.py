"""API server: turn the stats payload into Prometheus metrics, one set of series for each child instance.

Children's own metrics keep their names and gain the label ``connector``. A family that several children define is
registered once, and each child observes through its own metrics object. Nothing here raises into vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import nan
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvobs import __version__, faults, signals, spans
from kvobs.config import RESERVED_NAME, Options
from kvobs.families import Buckets, Families, Sink
from kvobs.hooks import HOOKS
from kvobs.notices import once
from kvobs.payload import KvobsStats, as_dict
from kvobs.recorder import OTHER_ERROR as OTHER
from kvobs.sampling import Tracing
from kvobs.signals import SIGNALS, Kind, Scope, Series, Signal
from kvobs.spans import Record, Span

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.children import ChildSpec
    from kvobs.tracing import SpanCutter

LABEL = "connector"
_OPEN = {signal.name: signal for signal in SIGNALS if signal.is_open and signal.kind is Kind.COUNTER}
SERIES_AT_MOST = 256  # of an open signal, an engine and a child: those after that are one, with OTHER as every label


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """Observes each child's part of the payload through that child's own metrics, and kvobs's numbers itself."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        of: Sequence[ChildSpec],
        options: Options,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._families = Families(metric_types)
        self._children = {
            spec.name: metrics for spec in of if (metrics := self._child_metrics(vllm_config, spec)) is not None
        }
        self._names = tuple(spec.name for spec in of)
        self._own: dict[str, Any] = {}
        self._sinks: dict[int, dict[int, Sink]] = {}
        self._opened: dict[tuple[str, int, int], dict[tuple[str, ...], Sink]] = {}
        self._buckets: dict[tuple[int, str | None, Series], Buckets] = {}
        self._indirect: list[Buckets] = []
        self._spent: dict[int, dict[str, int]] = {}  # engine -> what payloads took, until it is told
        try:
            for signal in SIGNALS:
                more = [LABEL] if signal.scope is Scope.CHILD else []
                self._own[signal.name] = self._families.make(signal, [*labelnames, *more])
            self._introduce(of, options)
        except Exception:
            faults.contain("apply")
        self._cutter = self._make_cutter(vllm_config, options)

    def _child_metrics(self, vllm_config: VllmConfig, spec: ChildSpec) -> Any:
        """Let a child define its metrics for its own series; None when it has none, or can't."""
        values = {engine: [*labels, spec.name] for engine, labels in self.per_engine_labelvalues.items()}
        try:
            return spec.connector_class.build_prom_metrics(
                spec.vllm_config(vllm_config), self._families.types(), [*self._labelnames, LABEL], values
            )
        except Exception:
            once(
                f"prom:{spec.name}",
                logging.ERROR,
                "connector %r can't define its own metrics; they are left out, all others work",
                spec.name,
                exc_info=True,
            )
            return None

    def _make_cutter(self, vllm_config: VllmConfig, options: Options) -> SpanCutter | None:
        """Return what makes spans of records, where anything is traced."""
        try:
            tracing = Tracing.of(options, vllm_config)
            if tracing is None:
                return None
            from kvobs.tracing import SpanCutter, make_exporter

            model = vllm_config.model_config.served_model_name
            name = str(model[0] if isinstance(model, list | tuple) else model)
            return SpanCutter(make_exporter(tracing.endpoint), {spans.GEN_AI_MODEL: name}, self._drop_spans)
        except Exception:
            faults.contain("cut")
            return None

    def _drop_spans(self, where: str, n: int) -> None:
        """Count lost spans; the exporter's thread does not know whose, and says so for the first engine."""
        try:
            self._labelled(signals.SPANS_DROPPED, min(self.per_engine_labelvalues), None, (where,)).inc(n)
        except Exception:
            faults.contain("cut")

    def _introduce(self, of: Sequence[ChildSpec], options: Options) -> None:
        """Say what runs and what is configured."""
        failure_policy = getattr(self._kv_transfer_config, "kv_load_failure_policy", None) or ""
        for engine in self.per_engine_labelvalues:
            self._labelled(signals.BUILD_INFO, engine, None, (__version__, vllm.__version__)).set(1)
            for spec in of:
                role = str(spec.transfer_config.kv_role)
                values = (str(spec.index), spec.connector_class.__name__, role, options.load_policy, failure_policy)
                self._labelled(signals.CONNECTOR_INFO, engine, spec.name, values).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's payload of one engine."""
        for name, value in transfer_stats_data.items():
            if name != RESERVED_NAME and name in self._children:
                self._observe_child(name, value, engine_idx)
        begin = perf_counter_ns()
        stats = None
        try:
            stats = _numbers(transfer_stats_data)
            if stats is not None:
                self._observe_own(stats, engine_idx)
        except Exception:
            faults.contain("apply")
        applied = perf_counter_ns()
        if stats is not None and self._cutter is not None:
            self._cut(self._cutter, stats, engine_idx)
        spent = self._spent.setdefault(engine_idx, {"apply": 0, "cut": 0})
        spent["apply"] += applied - begin
        spent["cut"] += perf_counter_ns() - applied
        if stats is not None or faults.are_waiting():
            self._observe_self(engine_idx, self._spent.pop(engine_idx))

    def _observe_child(self, name: str, value: Any, engine: int) -> None:
        try:
            self._children[name].observe(as_dict(value), engine)
        except Exception:
            once(
                f"observe:{name}",
                logging.ERROR,
                "the stats of connector %r can't be recorded as metrics",
                name,
                exc_info=True,
            )

    def _observe_own(self, stats: KvobsStats, engine: int) -> None:
        if not stats.is_ours or tuple(stats.children) != self._names:
            once(
                "version",
                logging.ERROR,
                "the engine runs another version of kvobs than the API server, or other connectors: its numbers "
                "(%.200s) are not recorded",
                {key: stats.data.get(key) for key in ("v", "table", "children")},
            )
            self._labelled(signals.INTERNAL_ERRORS, engine, None, ("version",)).inc()
            return
        taken = stats.taken()
        sinks = self._sinks.setdefault(engine, {})
        # One by one: what can't be applied costs nothing else.
        for slot, n in taken.counts.items():
            try:
                sink = sinks.get(slot)
                if sink is None:
                    sink = sinks[slot] = self._sink(slot, engine)
                sink(n)
            except Exception:
                faults.contain("apply")
        for slot, value in taken.gauges.items():
            self._set(slot, value, engine)
        for name, child, *values, n in taken.opened:
            self._add_open(name, engine, child, tuple(values), n)
        for buckets in self._indirect:
            buckets.flush()

    @faults.contained("apply")
    def _set(self, slot: int, value: int, engine: int) -> None:
        series, _, child = signals.locate(slot)
        gauge = self._labelled(series.signal, engine, self._name(series, child), series.values)
        gauge.set(value * series.signal.unit if value or series.signal is not signals.OLDEST_IN_FLIGHT else nan)

    @faults.contained("apply")
    def _add_open(self, name: str, engine: int, child: int, values: tuple[str, ...], n: int) -> None:
        """Add to a series whose label values come from the peer: of these there are so many and no more."""
        signal, child_name = _OPEN[name], self._names[child]
        known = self._opened.setdefault((name, engine, child), {})
        if values not in known and len(known) >= SERIES_AT_MOST:
            values = (OTHER,) * len(signal.labels)
        if values not in known:
            known[values] = self._labelled(signal, engine, child_name, values).inc
        known[values](n)

    def _cut(self, cutter: SpanCutter, stats: KvobsStats, engine: int) -> None:
        """Export the payload's spans, and put exemplars on the histograms that saw what they tell of."""
        try:
            for record in cutter.cut(stats.spans(), engine):
                span = spans.SPANS[record.name]
                if span.histogram is not None and record.observed_ns:
                    self._mark(record, span, span.histogram, engine)
        except Exception:
            faults.contain("cut")

    def _mark(self, record: Record, span: Span, histogram: Signal, engine: int) -> None:
        values = [str(record.attributes.get(label)) for label in span.labels]
        if span is spans.CALL and values[0] in HOOKS:
            values = [signals.hook_label(*values)]
        series = signals.find(histogram, *values)
        buckets = self._buckets.get((engine, str(record.attributes.get(spans.CONNECTOR)), series)) if series else None
        if buckets is not None:
            buckets.mark(record.observed_ns, record.trace_id)

    def _name(self, series: Series, child: int) -> str | None:
        """Return the name of the child that a series is of; None where it is the process's."""
        return self._names[child] if series.signal.scope is Scope.CHILD else None

    def _sink(self, slot: int, engine: int) -> Sink:
        """Return what takes the numbers of a slot."""
        series, offset, child = signals.locate(slot)
        name = self._name(series, child)
        metric = self._labelled(series.signal, engine, name, series.values)
        if series.signal.kind is not Kind.HISTOGRAM:
            inc, unit = metric.inc, series.signal.unit
            return inc if unit == 1 else lambda n: inc(n * unit)
        key = (engine, name, series)
        if key not in self._buckets:
            self._buckets[key] = Buckets(metric, series.signal)
            if not self._buckets[key].is_direct:
                self._indirect.append(self._buckets[key])
        return self._buckets[key].sinks[offset]

    def _labelled(self, signal: Signal, engine: int, child: str | None, values: Sequence[str]) -> Any:
        labels = self.per_engine_labelvalues[engine]
        return self._own[signal.name].labels(*labels, *([] if child is None else [child]), *values)

    def _observe_self(self, engine: int, spent_ns: Mapping[str, int]) -> None:
        """Record what this process itself costs, and its faults; the engine is the one whose payload was in hand."""
        try:
            for where, ns in spent_ns.items():
                self._labelled(signals.SELF_SECONDS, engine, None, (where,)).inc(ns * signals.SELF_SECONDS.unit)
            for where, n in faults.take().items():
                self._labelled(signals.INTERNAL_ERRORS, engine, None, (where,)).inc(n)
        except Exception:
            faults.contain("apply")


def _numbers(payload: Mapping[str, Any]) -> KvobsStats | None:
    """Return kvobs's own part of a payload; None in most steps, which have no numbers in it."""
    if RESERVED_NAME not in payload:
        return None
    stats = KvobsStats(data=as_dict(payload[RESERVED_NAME]))
    return None if stats.is_bare else stats
