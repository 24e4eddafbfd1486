"""Turn the stats payload into Prometheus metrics in the API server, with a set of series for each child.

Children's own metrics keep their names and get the label ``connector``. A family that several children define is
registered once, and each child observes through its own metrics object. Nothing here raises into vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs import faults
from kvobs.export.metric_families import Buckets, Families, Sink
from kvobs.log import once
from kvobs.schema import signals, spans
from kvobs.schema.config import RESERVED_NAME
from kvobs.schema.options import Options
from kvobs.schema.signals import LABEL, OTHER_VALUE, SERIES_AT_MOST, SIGNALS, Kind, Scope, Series, Signal
from kvobs.schema.spans import Record, observed_in
from kvobs.schema.version import __version__
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.kvobs_stats import KvobsStats, as_dict
from kvobs.telemetry.requests.sampling import TracingSettings
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.children.specs import ChildSpec
    from kvobs.export.span_export import SpanCutter

_OPEN = {signal.name: signal for signal in SIGNALS if signal.is_open and signal.kind is Kind.COUNTER}


class MultiKVConnectorPromMetrics(stock.MultiKVConnectorPromMetrics):
    """Observes each child's part of the payload through the child's own metrics, and kvobs's numbers itself.

    Constructed like vLLM's class, with ``prom_metrics`` by child name and without ``options``, it observes the
    children's parts only.
    """

    _prom_metrics: dict[str, Any]
    _has_own = False
    _cutter: SpanCutter | None = None

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        prom_metrics: Mapping[str, Any] | None = None,
        *,
        of: Sequence[ChildSpec] = (),
        options: Options | None = None,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues, dict(prom_metrics or {}))
        if options is not None:
            self._define_own(vllm_config, metric_types, of, options)

    def _define_own(
        self, vllm_config: VllmConfig, metric_types: Mapping[Any, Any], of: Sequence[ChildSpec], options: Options
    ) -> None:
        """Define each child's metrics, with its own series, and kvobs's."""
        self._families = Families(metric_types)
        for spec in of:
            metrics = self._child_metrics(vllm_config, spec)
            if metrics is not None:
                self._prom_metrics[spec.name] = metrics
        if options.exporter is not None:
            return  # kvobs's own numbers and spans are there
        self._names = tuple(spec.name for spec in of)
        self._own: dict[str, Any] = {}
        self._sinks: dict[int, dict[int, Sink]] = {}
        self._opened: dict[tuple[str, int, int], dict[tuple[str, ...], Sink]] = {}
        self._buckets: dict[tuple[int, str | None, Series], Buckets] = {}
        self._indirect: list[Buckets] = []
        self._spent: dict[int, dict[str, int]] = {}  # engine -> time spent on payloads, until it is observed
        try:
            for signal in SIGNALS:
                if signal.scope is not Scope.EXPORTER:
                    more = [LABEL] if signal.scope is Scope.CHILD else []
                    self._own[signal.name] = self._families.make(signal, [*self._labelnames, *more])
            self._introduce(of, options)
        except Exception:
            faults.contain("apply")
        self._cutter = self._make_cutter(vllm_config, options)
        self._has_own = True

    def _child_metrics(self, vllm_config: VllmConfig, spec: ChildSpec) -> Any:
        """Let a child define its metrics; None if it has none, or fails."""
        values = {engine: [*labels, spec.name] for engine, labels in self.per_engine_labelvalues.items()}
        try:
            return spec.connector_class.build_prom_metrics(
                spec.vllm_config(vllm_config), self._families.types(), [*self._labelnames, LABEL], values
            )
        except Exception:
            once(
                f"prom:{spec.name}",
                logging.ERROR,
                "connector %r can't define its own metrics: they are missing, all others are exported",
                spec.name,
                exc_info=True,
            )
            return None

    def _make_cutter(self, vllm_config: VllmConfig, options: Options) -> SpanCutter | None:
        """Return the exporter of span records, if anything is traced."""
        try:
            tracing = TracingSettings.of(options, vllm_config)
            if tracing is None:
                return None
            from kvobs.export.span_export import SpanCutter, make_exporter

            return SpanCutter(
                make_exporter(tracing.endpoint),
                {spans.GEN_AI_MODEL: versions.model_name(vllm_config)},
                self._drop_spans,
            )
        except Exception:
            faults.contain("cut")
            return None

    def _drop_spans(self, where: str, n: int) -> None:
        """Count lost spans; the exporter's thread does not know their engine, and counts them for the first one."""
        try:
            self._labelled(signals.SPANS_DROPPED, min(self.per_engine_labelvalues), None, (where,)).inc(n)
        except Exception:
            faults.contain("cut")

    def _introduce(self, of: Sequence[ChildSpec], options: Options) -> None:
        """Set the info metrics: versions and configuration."""
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
            if name != RESERVED_NAME and name in self._prom_metrics:
                self._observe_child(name, value, engine_idx)
        if self._has_own:
            self._observe_numbers(transfer_stats_data, engine_idx)

    def _observe_numbers(self, transfer_stats_data: Mapping[str, Any], engine_idx: int) -> None:
        """Record kvobs's own part of the payload, and the time it takes."""
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
            self._prom_metrics[name].observe(as_dict(value), engine)
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
                "the engine runs a different version of kvobs than the API server, or different connectors: its "
                "numbers (%.200s) are not recorded",
                {key: stats.data.get(key) for key in ("v", "table", "children")},
            )
            self._labelled(signals.INTERNAL_ERRORS, engine, None, ("version",)).inc()
            return
        taken = stats.increments()
        sinks = self._sinks.setdefault(engine, {})
        # One by one: a number that can't be applied does not affect the others.
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
        gauge.set(wire.gauge_value(series.signal, value))

    @faults.contained("apply")
    def _add_open(self, name: str, engine: int, child: int, values: tuple[str, ...], n: int) -> None:
        """Add to a series whose label values come from the peer; their number is limited."""
        signal, child_name = _OPEN[name], self._names[child]
        known = self._opened.setdefault((name, engine, child), {})
        if values not in known and len(known) >= SERIES_AT_MOST:
            values = (OTHER_VALUE,) * len(signal.labels)
        if values not in known:
            known[values] = self._labelled(signal, engine, child_name, values).inc
        known[values](n)

    def _cut(self, cutter: SpanCutter, stats: KvobsStats, engine: int) -> None:
        """Export the payload's spans, and put their exemplars on the histograms."""
        try:
            for record in cutter.cut(wire.spans(stats.data), engine):
                if (series := observed_in(record)) is not None:
                    self._mark(record, series, engine)
        except Exception:
            faults.contain("cut")

    def _mark(self, record: Record, series: Series, engine: int) -> None:
        buckets = self._buckets.get((engine, str(record.attributes.get(spans.CONNECTOR)), series))
        if buckets is not None:
            buckets.mark(record.observed_ns, record.trace_id)

    def _name(self, series: Series, child: int) -> str | None:
        """Return the name of a series's child; None for a series of the process."""
        return self._names[child] if series.signal.scope is Scope.CHILD else None

    def _sink(self, slot: int, engine: int) -> Sink:
        """Return the callable that applies a slot's numbers."""
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
        """Record this process's own cost and internal errors, for the engine of the current payload."""
        try:
            for where, ns in spent_ns.items():
                self._labelled(signals.SELF_SECONDS, engine, None, (where,)).inc(ns * signals.SELF_SECONDS.unit)
            for where, n in faults.take().items():
                self._labelled(signals.INTERNAL_ERRORS, engine, None, (where,)).inc(n)
        except Exception:
            faults.contain("apply")


def _numbers(payload: Mapping[str, Any]) -> KvobsStats | None:
    """Return kvobs's own part of a payload; None in most steps, which have no numbers."""
    if RESERVED_NAME not in payload:
        return None
    stats = KvobsStats(data=as_dict(payload[RESERVED_NAME]))
    return None if stats.is_bare else stats
