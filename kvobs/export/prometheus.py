"""Take the stats payload in the API server: kvobs's own part to the totals of its engine, the rest to the children.

Children's own metrics keep their names and get the label ``connector``. A family that several children define is
registered once, and each child observes through its own metrics object. Nothing here raises into vLLM.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter_ns, time
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs import faults
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.feed import describe_engine
from kvobs.export.totals import Totals, TotalsCollector
from kvobs.log import once
from kvobs.probe.black_box import Identity
from kvobs.probe.increments import Increments
from kvobs.schema import signals
from kvobs.schema.config import RESERVED_NAME
from kvobs.schema.options import ExporterOptions, Options
from kvobs.schema.signals import LABEL, SIGNALS, Scope
from kvobs.telemetry.payload import wire
from kvobs.telemetry.payload.kvobs_stats import KvobsStats, as_dict
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.connectors.specs import ChildSpec
    from kvobs.export.span_export import SpanCutter

_METRICS = tuple(signal for signal in SIGNALS if signal.scope is not Scope.EXPORTER)


class MultiKVConnectorPromMetrics(stock.MultiKVConnectorPromMetrics):
    """Observes each child's part of the payload through the child's own metrics, and adds up kvobs's numbers."""

    _prom_metrics: dict[str, Any]
    _cutter: SpanCutter | None = None
    _warns = False
    _registered: ClassVar[list[Any]] = []
    """The collectors in prometheus_client's registry of the last engine that was built in this process."""

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
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues, {})
        self._totals: dict[int, Totals] = {}
        self.collector = TotalsCollector(self._totals.values(), _METRICS)
        self._spent: dict[int, defaultdict[int, int]] = {}  # engine -> time spent by slot, until it is added
        self._forget_last_engine()
        self._define_childrens(vllm_config, metric_types, of)
        if not isinstance(options.exporter, ExporterOptions):  # else kvobs's own numbers and spans are there
            is_seen = metric_types[Counter] is Counter and not versions.has_multiprocess_metrics()
            self._warns = not is_seen and options.exporter is not None
            self._names = tuple(spec.name for spec in of)
            self._define_own(vllm_config, of, options, is_seen=is_seen)
            self._cutter = self._make_cutter(vllm_config, options)

    @classmethod
    def _forget_last_engine(cls) -> None:
        while cls._registered:
            with suppress(KeyError):  # vLLM has unregistered it, as it does with names that begin with "vllm:"
                REGISTRY.unregister(cls._registered.pop())

    def _define_childrens(
        self, vllm_config: VllmConfig, metric_types: Mapping[Any, Any], of: Sequence[ChildSpec]
    ) -> None:
        """Let each child define its metrics, with its own series."""
        shared = self._shared(metric_types)
        for spec in of:
            values = {engine: [*labels, spec.name] for engine, labels in self.per_engine_labelvalues.items()}
            try:
                metrics = spec.connector_class.build_prom_metrics(
                    spec.vllm_config(vllm_config), shared, [*self._labelnames, LABEL], values
                )
            except Exception:
                text = "connector %r can't define its own metrics: they are missing, all others are exported"
                once(f"prom:{spec.name}", logging.ERROR, text, spec.name, exc_info=True)
            else:
                if metrics is not None:
                    self._prom_metrics[spec.name] = metrics

    def _shared(self, metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return stand-ins for ``metric_types`` that register each family once."""
        families: dict[str, Any] = {}

        def maker(real: Any) -> Any:
            def make(name: str, *args: Any, **kwargs: Any) -> Any:
                if name not in families:
                    families[name] = real(name, *args, **kwargs)
                    self._registered.append(families[name])
                return families[name]

            return make

        return {kind: maker(real) for kind, real in metric_types.items()}

    @faults.contained("apply")
    def _define_own(self, vllm_config: VllmConfig, of: Sequence[ChildSpec], options: Options, *, is_seen: bool) -> None:
        """Begin the totals of each engine, and publish them if vLLM's own metrics are in the same registry."""
        engine, identity = describe_engine(vllm_config, of, options, os.getpid()), Identity.of(vllm_config)
        for index, values in self.per_engine_labelvalues.items():
            model = str(dict(zip(self._labelnames, values, strict=True))[signals.VLLM_LABELS[0]])
            mine = replace(engine, model=model, index=index, pages=identity.pages(index))
            self._totals[index] = Totals(mine, EngineWatch(mine, logs_end=True) if is_seen else None)
        if is_seen:
            self._registered.append(self.collector)
            REGISTRY.register(self.collector)

    @faults.contained("cut")
    def _make_cutter(self, vllm_config: VllmConfig, options: Options) -> SpanCutter | None:
        """Return the exporter of span records, if anything is traced."""
        if (tracing := TracingSettings.of(options, vllm_config)) is None:
            return None
        from kvobs.export.span_export import make_cutter

        return make_cutter(tracing.endpoint, versions.model_name(vllm_config), self._drop_spans)

    @faults.contained("cut")
    def _drop_spans(self, where: str, n: int) -> None:
        """Count lost spans; the exporter's thread does not know their engine, and counts them for the first one."""
        _count(self._totals[min(self._totals)], {signals.slot(signals.SPANS_DROPPED, where): n})

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's payload of one engine."""
        for name, value in transfer_stats_data.items():
            if name != RESERVED_NAME and name in self._prom_metrics:
                self._observe_child(name, value, engine_idx)
        if self._totals:
            self._observe_numbers(transfer_stats_data, engine_idx)

    def _observe_child(self, name: str, value: Any, engine: int) -> None:
        try:
            self._prom_metrics[name].observe(as_dict(value), engine)
        except Exception:
            text = "the stats of connector %r can't be recorded as metrics"
            once(f"observe:{name}", logging.ERROR, text, name, exc_info=True)

    def _observe_numbers(self, transfer_stats_data: Mapping[str, Any], engine: int) -> None:
        """Add kvobs's own part of the payload, and the time it takes."""
        begin = perf_counter_ns()
        stats = None
        try:
            stats = _numbers(transfer_stats_data)
            if stats is not None:
                if self._warns:
                    once("unseen", logging.WARNING, _UNSEEN)
                self._add(stats, self._totals[engine])
        except Exception:
            faults.contain("apply")
        applied = perf_counter_ns()
        if stats is not None and self._cutter is not None:
            self._cut(self._cutter, stats, engine)
        spent = self._spent.setdefault(engine, defaultdict(int))
        spent[_APPLY] += applied - begin
        spent[_CUT] += perf_counter_ns() - applied
        if stats is not None or faults.are_waiting():
            self._observe_self(engine)

    def _add(self, stats: KvobsStats, totals: Totals) -> None:
        if stats.is_ours and tuple(stats.children) == self._names:
            totals.add(stats.increments())
            return
        text = (
            "the engine runs a different version of kvobs than the API server, or different connectors: its "
            "numbers (%.200s) are not recorded"
        )
        once("version", logging.ERROR, text, {key: stats.data.get(key) for key in ("v", "table", "children")})
        _count(totals, {signals.slot(signals.INTERNAL_ERRORS, "version"): 1})

    @faults.contained("cut")
    def _cut(self, cutter: SpanCutter, stats: KvobsStats, engine: int) -> None:
        """Export the payload's spans, and put their exemplars on the histograms."""
        for record in cutter.cut(wire.spans(stats.data), engine):
            self._totals[engine].mark(record, time())

    @faults.contained("apply")
    def _observe_self(self, engine: int) -> None:
        """Add this process's own cost and internal errors, for the engine of the current payload."""
        counts = self._spent.pop(engine)
        for where, n in faults.take().items():
            counts[signals.slot(signals.INTERNAL_ERRORS, where)] += n
        _count(self._totals[engine], counts)


_UNSEEN = (
    "this process gets kvobs's numbers, and does not show them: several API servers, Ray Serve, or "
    f"{versions.MULTIPROCESS}. Set kvobs.exporter to {{}}"
)
_APPLY, _CUT = (signals.slot(signals.SELF_SECONDS, where) for where in ("apply", "cut"))


def _count(totals: Totals, counts: dict[int, int]) -> None:
    totals.add(Increments(counts, [], {}))


def _numbers(payload: Mapping[str, Any]) -> KvobsStats | None:
    """Return kvobs's own part of a payload; None in most steps, which have no numbers."""
    if RESERVED_NAME not in payload:
        return None
    stats = KvobsStats(data=as_dict(payload[RESERVED_NAME]))
    return None if stats.is_bare else stats
