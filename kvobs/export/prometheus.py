"""Show the metrics in vLLM's API server: kvobs's own read from the pages, the connectors' stats by their own metrics.

Connectors' own metrics keep their names and get the label ``connector``. A family that several of them define is
registered once, and each observes through its own metrics object. Nothing here raises into vLLM.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock

from kvobs import faults
from kvobs.export.engine import Engine
from kvobs.export.engine_watch import EngineWatch
from kvobs.export.summary import Summary
from kvobs.export.totals import Totals, TotalsCollector
from kvobs.log import log, once
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.schema import signals
from kvobs.schema.config import RESERVED_NAME
from kvobs.schema.options import ExporterOptions, Options
from kvobs.schema.signals import LABEL, SIGNALS, Scope
from kvobs.telemetry.payload.stats import as_dict
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.connectors.specs import ConnectorSpec
    from kvobs.export.span_export import SpanConverter
    from kvobs.export.span_reading import SpanReading

_METRICS = tuple(signal for signal in SIGNALS if signal.scope is not Scope.EXPORTER)


class MultiKVConnectorPromMetrics(stock.MultiKVConnectorPromMetrics):
    """Observes each connector's part of the stats through its own metrics, and publishes kvobs's numbers."""

    _prom_metrics: dict[str, Any]
    _registered: ClassVar[list[Any]] = []
    """The collectors in prometheus_client's registry of the last engine that was built in this process."""
    _shown: ClassVar[list[Shown]] = []
    """What this process shows of that engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        of: Sequence[ConnectorSpec],
        options: Options,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues, {})
        self._forget_last_engine()
        self._define_each(vllm_config, metric_types, of)
        # Several API servers expose files of prometheus_client, and Ray exposes metrics of its classes.
        is_seen = metric_types[Counter] is Counter and not versions.has_multiprocess_metrics()
        if is_seen and not isinstance(options.exporter, ExporterOptions):
            self._define_own(vllm_config, options)

    @classmethod
    def _forget_last_engine(cls) -> None:
        while cls._registered:
            with suppress(KeyError):  # vLLM has unregistered it, as it does with names that begin with "vllm:"
                REGISTRY.unregister(cls._registered.pop())
        while cls._shown:
            cls._shown.pop().close()

    def _define_each(
        self, vllm_config: VllmConfig, metric_types: Mapping[Any, Any], of: Sequence[ConnectorSpec]
    ) -> None:
        """Let each connector define its metrics, with its own series."""
        shared = self._shared(metric_types)
        for spec in of:
            values = {engine: [*labels, spec.name] for engine, labels in self.per_engine_labelvalues.items()}
            try:
                metrics = spec.connector_class.build_prom_metrics(
                    spec.vllm_config(vllm_config), shared, [*self._labelnames, LABEL], values
                )
            except Exception:
                text = "connector %r can't define its own metrics: they are missing, and all others are exported"
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

    @faults.contained("read")
    def _define_own(self, vllm_config: VllmConfig, options: Options) -> None:
        """Publish kvobs's metrics of each engine, unless an exporter shows them, and inform the engines."""
        identity, models = Identity.of(vllm_config), {}
        if files.is_held(files.folder(), f"{identity.server}{files.EXPORTER}"):
            log.info("kvobs's exporter serves the metrics; /metrics of this process does not")
            return
        for index, values in self.per_engine_labelvalues.items():
            models[index] = str(dict(zip(self._labelnames, values, strict=True))[signals.VLLM_LABELS[0]])
        shown = Shown(identity.server, models, TracingSettings.of(options, vllm_config))
        try:
            REGISTRY.register(shown.collector)
        except ValueError:  # others have these names; the exporter that is started then also sends the spans
            shown.close()
            raise
        self._registered.append(shown.collector)
        self._shown.append(shown)
        shown.announce()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's stats of one engine."""
        for name, value in transfer_stats_data.items():
            if name != RESERVED_NAME and name in self._prom_metrics:
                self._observe_connector(name, value, engine_idx)

    def _observe_connector(self, name: str, value: Any, engine: int) -> None:
        try:
            self._prom_metrics[name].observe(as_dict(value), engine)
        except Exception:
            text = "the stats of connector %r can't be recorded as metrics"
            once(f"observe:{name}", logging.ERROR, text, name, exc_info=True)


class Shown:
    """Shows the engines of a server from their pages, and exports their spans: ``models`` by the engine's number."""

    def __init__(self, server: str, models: Mapping[int, str], tracing: TracingSettings) -> None:
        self._server = server
        self._totals: dict[int, Totals] = {}
        for index, model in models.items():
            engine = Engine(f"{server}-{index}-")
            engine.find()
            self._totals[index] = Totals(engine, EngineWatch(engine, logs_end=True), model)
        self.collector = TotalsCollector(self._totals.values, _METRICS)
        self._locks: list[files.Lock] = []
        self._is_over, self._reading = Event(), Lock()
        self._converter = self._make_converter(tracing, next(iter(models.values()), "")) if tracing.is_on else None
        self._spans = self._read_spans(self._converter) if self._converter is not None else None
        self._summaries = {index: Summary() for index in models}
        Thread(target=_run, args=(weakref.ref(self), self._is_over), name="kvobs-spans", daemon=True).start()

    def announce(self) -> None:
        """Let the engines know that this process shows them."""
        with files.reported(
            "the engines are not informed that this process exposes their metrics, so they start an exporter: %s"
        ):
            names = [f"{self._server}-{index}{files.COLLECTOR}" for index in self._totals]
            self._locks += [files.Lock(files.folder(), name) for name in names]

    def close(self) -> None:
        """End, once the last spans are exported."""
        self._is_over.set()
        self.export_spans(is_last=not any(totals.engine.is_alive for totals in self._totals.values()))
        with self._reading:
            self._spans = None
        if self._converter is not None:
            self._converter.close()
        for lock in self._locks:
            lock.release()
        self._locks = []

    @faults.contained("export")
    def _make_converter(self, tracing: TracingSettings, model: str) -> SpanConverter:
        from kvobs.export.span_export import make_converter

        converter = make_converter(tracing.endpoint, model, self._drop_spans)
        atexit.register(_close, weakref.ref(self))  # it is called before the converter's own
        return converter

    def _read_spans(self, converter: SpanConverter) -> SpanReading:
        from kvobs.export.span_reading import SpanReading

        return SpanReading(converter)

    @faults.contained("export")
    def _drop_spans(self, where: str, n: int) -> None:
        """Count lost spans; the exporter's thread does not know their engine, and counts them for the first one."""
        self._totals[min(self._totals)].count(signals.slot(signals.SPANS_DROPPED, where), n)

    @faults.contained("export")
    def export_spans(self, *, is_last: bool = False) -> None:
        """Export what the engines have written since, and put exemplars on the histograms."""
        with self._reading:
            if self._spans is not None:
                export = self._spans.finish if is_last else self._spans.go_on
                export(tuple(self._totals.values()))

    @faults.contained("read")
    def look(self) -> None:
        """Count the contained errors of this process, and log what the connectors did, now and then."""
        for where, n in faults.take().items():
            self._totals[min(self._totals)].count(signals.slot(signals.INTERNAL_ERRORS, where), n)
        for index, totals in self._totals.items():
            self._summaries[index].log(totals.engine, index)


LOOK_S = 0.25


def _run(reference: weakref.ref[Shown], is_over: Event) -> None:
    while not is_over.wait(LOOK_S) and (shown := reference()) is not None:
        shown.export_spans()
        shown.look()
        del shown


def _close(reference: weakref.ref[Shown]) -> None:
    if (shown := reference()) is not None:
        shown.close()
