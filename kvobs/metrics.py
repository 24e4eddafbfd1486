"""API server: turn the stats payload into Prometheus metrics, one set of series for each child instance.

Children's own metrics keep their names and gain the label ``connector``. A family that several children define is
registered once, and each child observes through its own metrics object. Nothing here raises into vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvobs.config import RESERVED_NAME
from kvobs.notices import once
from kvobs.recorder import WIDTH
from kvobs.signals import COUNTERS, SLOTS
from kvobs.stats import KvobsStats, as_dict

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.children import ChildSpec

LABEL = "connector"


class Families:
    """Metric families by name: made on first use with vLLM's metric classes, handed out again after that."""

    def __init__(self, metric_types: Mapping[Any, Any]) -> None:
        self._metric_types = metric_types
        self._by_name: dict[str, Any] = {}

    def types(self) -> dict[Any, Any]:
        """Return stand-ins for ``metric_types`` that register each family once."""
        return {kind: self._maker(real) for kind, real in self._metric_types.items()}

    def make(self, kind: Any, name: str, help_text: str, labelnames: Sequence[str]) -> Any:
        """Return the family ``name`` of kind Counter, Gauge or Histogram."""
        return self._maker(self._metric_types[kind])(name=name, documentation=help_text, labelnames=list(labelnames))

    def _maker(self, real: Any) -> Any:
        def make(name: str, *args: Any, **kwargs: Any) -> Any:
            if name not in self._by_name:
                self._by_name[name] = self._register(real, name, args, kwargs)
            return self._by_name[name]

        return make

    @staticmethod
    def _register(real: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left_over = _registered.pop(name, None)
        if left_over is not None:
            with suppress(KeyError):  # vLLM has removed it: it does so for names that begin with "vllm:"
                REGISTRY.unregister(left_over)
        family = _registered[name] = real(name, *args, **kwargs)
        return family


# What this process has registered, for an engine that is built a second time.
_registered: dict[str, Any] = {}


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """Observes each child's part of the payload through that child's own metrics, and kvobs's counters itself."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        of: Sequence[ChildSpec],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._families = Families(metric_types)
        self._children = {
            spec.name: metrics for spec in of if (metrics := self._child_metrics(vllm_config, spec)) is not None
        }
        self._counters = {
            signal.name: self._families.make(Counter, signal.name, signal.help, [*labelnames, LABEL, *signal.labels])
            for signal in COUNTERS
        }
        self._series: dict[tuple[int, str, int], Any] = {}  # (engine, child, slot) -> the labelled counter

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's payload of one engine."""
        for name, value in transfer_stats_data.items():
            try:
                if name == RESERVED_NAME:
                    self._observe_own(KvobsStats(data=as_dict(value)), engine_idx)
                elif (metrics := self._children.get(name)) is not None:
                    metrics.observe(as_dict(value), engine_idx)
            except Exception:
                once(
                    f"observe:{name}",
                    logging.ERROR,
                    "the stats of connector %r can't be recorded as metrics",
                    name,
                    exc_info=True,
                )

    def _observe_own(self, stats: KvobsStats, engine: int) -> None:
        if not stats.is_ours:
            once(
                "version",
                logging.ERROR,
                "the engine runs another version of kvobs than the API server: its counters (%s) are not recorded",
                {key: stats.data.get(key) for key in ("v", "table")},
            )
            return
        names = list(stats.children)
        for slot, value in stats.counts().items():
            child, own = divmod(slot, WIDTH)
            self._counter(engine, names[child], own).inc(value)

    def _counter(self, engine: int, child: str, slot: int) -> Any:
        key = (engine, child, slot)
        if key not in self._series:
            signal, values = SLOTS[slot]
            labels = [*self.per_engine_labelvalues[engine], child, *values]
            self._series[key] = self._counters[signal.name].labels(*labels)
        return self._series[key]
