"""Define ``MultiConnector``, the class that vLLM loads: it builds the connectors and binds the hooks of its role.

The name is fixed: vLLM compares the literal string. It subclasses vLLM's own class, so that identity checks hold and
hooks of newer vLLM versions reach the connectors through the inherited routing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from kvobs.aggregation import aggregator
from kvobs.connector import wiring
from kvobs.connectors import configured
from kvobs.connectors.configured import all_support_hma, ask, read_specs, required_layout
from kvobs.connectors.endings import must_pass
from kvobs.connectors.fanout import hooks_of, own_attribute
from kvobs.connectors.sub_connector import build, shut_down
from kvobs.page.writer import STOPS
from kvobs.probe.pure import Call
from kvobs.routing.scheduler import SchedulerSide
from kvobs.routing.worker import WorkerSide
from kvobs.state.ledger import Ledger
from kvobs.telemetry import recorders
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, rebuild
from kvobs.telemetry.scheduler_telemetry import SchedulerTelemetry
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.telemetry.worker_telemetry import WorkerTelemetry
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, Cadence

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvobs.export.prometheus import MultiKVConnectorPromMetrics

# vLLM asks this of each waiting request in each step: a generator would cost more than the answers.
_supports_divergent_hits = attrgetter("supports_divergent_local_hybrid_hits")


class MultiConnector(stock.MultiConnector):
    """Load from one of several KV connectors, save to all of them, and record what each does.

    Enable it with ``"kv_connector_module_path": "kvobs"`` next to ``"kv_connector": "MultiConnector"``. Options are
    under ``kv_connector_extra_config.kvobs``, see ``kvobs.schema.config.Options``.

    Raises:
        ConfigError: the configuration has errors; lists each with its JSON path.
    """

    aggregation: aggregator.Aggregation | None = None
    """The aggregator that vLLM's executor is to use; None: vLLM's own."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # vLLM's constructor is skipped: it would build the connectors itself.
        KVConnectorBase_V1.__init__(self, vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        validated = configured.read(vllm_config.kv_transfer_config, wiring.conditions_of(vllm_config, kv_cache_config))
        configuration, specs = validated.configuration, validated.specs
        options = configuration.options
        self._all_support_hma = all_support_hma(specs)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not self._all_support_hma:
            lacking = [spec.name for spec in specs if not KVConnectorFactory.supports_hma_config(spec.transfer_config)]
            raise ValueError(
                f"these connectors don't support the hybrid KV cache manager: {', '.join(lacking)}. "
                "Start vLLM with --disable-hybrid-kv-cache-manager, or remove them"
            )
        tracing = TracingSettings.of(options, vllm_config)
        rank = None if is_scheduler else wiring.rank_of(vllm_config)
        engine = wiring.engine_info(specs, options, vllm_config, tracing)
        built = recorders.build(engine, options, vllm_config, tracing, rank)
        activated = built.traces.activated if built.traces is not None else None
        connectors = build(vllm_config, role, kv_cache_config, specs, built.recorder, activated=activated)
        try:
            parts = wiring.Parts(connectors, built, validated, vllm_config, kv_cache_config)
            self._set_up(parts, tracing, is_scheduler=is_scheduler)
        except BaseException as error:
            error.add_note("while kvobs was set up; its connectors have been shut down")
            shut_down(connectors)
            raise

    def _set_up(self, parts: wiring.Parts, tracing: TracingSettings, *, is_scheduler: bool) -> None:
        """Build the side of this role on the connectors, and bind its hooks."""
        connectors, configuration = parts.connectors, parts.validated.configuration
        # Read by inherited code and by vLLM: the real connectors, and which one loads a request.
        self._connectors = [connector.wrapped for connector in connectors]
        self._ktc_kv_transfer_config = [spec.transfer_config for spec in parts.validated.specs]
        self._extra_async_saves: dict[str, int] = {}
        self._requests_to_connector: Any = {}
        self._sub_connectors = connectors
        self._side: SchedulerSide | WorkerSide
        self._telemetry: SchedulerTelemetry | WorkerTelemetry
        self._bind: wiring.Bind
        if is_scheduler:
            side, telemetry, self._bind = wiring.scheduler_side(
                *parts, tracing=tracing, all_support_hma=self._all_support_hma
            )
            self._side, self._telemetry = side, telemetry
            self._requests_to_connector = Choices(side.ledger)
            if "aggregator" not in configuration.stock:
                stuck_after_s = configuration.options.stuck_after_s
                self.aggregation = aggregator.Aggregation(stuck_after_s, telemetry.note_in_aggregator)
                aggregator.install()
        else:
            self._side, self._telemetry, self._bind = wiring.worker_side(*parts)
        self._has_begun = False
        self._hooks = self._bound()
        self._first_calls = {name: partial(self._call_first, name) for name in self._hooks}
        self.__dict__.update(
            {name: call for name, call in self._first_calls.items() if name not in vars(MultiConnector)}
        )

    # Plug-ins replace hooks of connectors after vLLM has built them, so these are bound again where they have changed:
    # when vLLM calls a hook that is called once, and when it first calls any other one.

    def _bound(self) -> dict[str, Call]:
        """Return the hooks, bound to the connectors' methods as they are now."""
        return hooks_of(self._side, self._sub_connectors, self._bind(), versions.hooks())

    def _call_first(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook that is called once, or any other one for the first time."""
        self._bind_again(begins=HOOKS[name].cadence is not Cadence.ONCE)
        return self._hooks[name](*args, **kwargs)

    def _bind_again(self, *, begins: bool) -> None:
        """Bind what has been replaced; if serving ``begins`` with this call, let vLLM call the hooks themselves."""
        if begins and self._has_begun:
            return
        changed = [connector.bind() for connector in self._sub_connectors]
        if any(changed):
            self._hooks = self._bound()
        if begins:
            self._has_begun = True
            for name, call in self._first_calls.items():
                if HOOKS[name].cadence is not Cadence.ONCE and vars(self).get(name) is call:
                    self.__dict__[name] = self._hooks[name]

    def shutdown(self) -> None:
        """End the connectors, and then what observes them."""
        error = sys.exception()  # vLLM also calls this while an exception stops the engine
        is_well = error is None or isinstance(error, STOPS)
        try:
            self._call_first("shutdown")
        finally:
            self._telemetry.close(is_well=is_well)

    # The wrapper's own metadata must be bound too: vLLM asks has_connector_metadata() before every layer.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(self._side, WorkerSide)
        if not self._has_begun:
            self._bind_again(begins=True)
        self._side.bind_connector_metadata(connector_metadata)
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)

    def clear_connector_metadata(self) -> None:
        assert isinstance(self._side, WorkerSide)
        self._side.clear_connector_metadata()
        KVConnectorBase_V1.clear_connector_metadata(self)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute that vLLM's class does not have, but a connector has.

        Model runners of other platforms call methods of a single connector's class on the object that they find.
        """
        connectors = vars(self).get("_sub_connectors", ())
        if name.startswith("_") or not (found := own_attribute(connectors, name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return found[0]

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        try:
            return all(map(_supports_divergent_hits, self._connectors))
        except BaseException as error:  # perhaps of an isolated connector
            if must_pass(error):
                raise
            return all(connector.ask("supports_divergent_local_hybrid_hits") for connector in self._sub_connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(connector.ask("requires_kv_delivery") for connector in self._sub_connectors)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        parent = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(extra_config),
            kv_load_failure_policy="recompute",  # unknown here; it is checked when the connector is built
        )
        return any(
            ask(spec, "requires_piecewise_for_cudagraph", spec.transfer_config.kv_connector_extra_config)
            for spec in read_specs(parent)
        )

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return all_support_hma(read_specs(kv_transfer_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the KV cache layout that the connectors need (such as "HND"), or None if any will do."""
        return required_layout(vllm_config, read_specs(vllm_config.kv_transfer_config))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVConnectorStats:
        return rebuild(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiKVConnectorPromMetrics:
        from kvobs.export.prometheus import MultiKVConnectorPromMetrics  # of the API server only

        read = configured.read(vllm_config.kv_transfer_config)
        names, values, options = labelnames, per_engine_labelvalues, read.configuration.options
        return MultiKVConnectorPromMetrics(vllm_config, metric_types, names, values, of=read.specs, options=options)


class Choices(Mapping[str, int]):
    """The connector that loads each request, in the form of vLLM's class: for code inherited from newer versions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getitem__(self, request: str) -> int:
        choice = self._ledger.choice(request)
        if choice is None:
            raise KeyError(request)
        return choice

    def __iter__(self) -> Iterator[str]:
        return (request for request in self._ledger if self._ledger.choice(request) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_stock_cache_layout = utils.get_kv_connector_cache_layout


def get_kv_connector_cache_layout(vllm_config: VllmConfig | None = None) -> str | None:
    """Return the KV cache layout that the configured connector needs, as vLLM's helper of this name does.

    If no layout is needed, the result is None, and "NHD" before vLLM 0.30. The default configuration is this process's.
    """
    return versions.required_cache_layout(_stock_cache_layout, vllm_config)
