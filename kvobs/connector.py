"""``MultiConnector``, the class that vLLM loads: it builds the children and binds the hooks of its role.

The name is fixed: vLLM compares the literal string. It subclasses vLLM's own class, so that identity checks hold and
hooks of newer vLLM versions reach the children through the inherited routing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from kvobs import faults
from kvobs.aggregation import aggregator
from kvobs.children import configured, fanout
from kvobs.children.child import build
from kvobs.children.configured import all_support_hma, read_specs, required_layout
from kvobs.children.specs import ChildSpec
from kvobs.children.validation import Validated
from kvobs.export import destinations
from kvobs.export.feed import Feed, described, exported
from kvobs.log import log
from kvobs.routing import wiring
from kvobs.routing.scheduler import SchedulerSide
from kvobs.routing.worker import WorkerSide
from kvobs.schema import __version__
from kvobs.schema.config import STOCK_VARIABLE
from kvobs.schema.options import Options
from kvobs.state.ledger import Ledger
from kvobs.telemetry import recorders
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, rebuild
from kvobs.telemetry.recorders import Telemetry
from kvobs.telemetry.requests import sampling
from kvobs.telemetry.requests.sampling import TracingSettings
from kvobs.telemetry.timeline.black_box import SINCE, STEPS
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, Combine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvobs.export.prometheus import MultiKVConnectorPromMetrics

# vLLM asks this of each waiting request in each step: a generator would cost more than the answers.
_supports_divergent_hits = attrgetter("supports_divergent_local_hybrid_hits")


class MultiConnector(stock.MultiConnector):
    """Load from one of several KV connectors, save to all of them, and record what each does.

    Enable it with ``"kv_connector_module_path": "kvobs"`` beside ``"kv_connector": "MultiConnector"``. Options are
    under ``kv_connector_extra_config.kvobs``, see ``kvobs.schema.config.Options``.

    Raises:
        ConfigError: the configuration has mistakes; lists each with its JSON path.
    """

    aggregation: aggregator.Aggregation | None = None
    """The aggregator that vLLM's executor is to use; None: vLLM's own."""
    _feed: Feed | None = None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # vLLM's constructor is skipped: it would build the children itself.
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
        records = recorders.build(configuration.names, options, vllm_config, tracing, rank)
        self._box = records.recorder.box.words
        activated = records.traces.activated if records.traces is not None else None
        self._children = build(vllm_config, role, kv_cache_config, specs, records.recorder, activated=activated)
        # Read by inherited code and by vLLM: the real connectors, and which one loads a request.
        self._connectors = [child.connector for child in self._children]
        self._ktc_kv_transfer_config = [spec.transfer_config for spec in specs]
        self._extra_async_saves: dict[str, int] = {}
        self._requests_to_connector: Any = {}
        parts = (self._children, records, validated, vllm_config, kv_cache_config)
        if is_scheduler:
            self._feed = _feed(vllm_config, specs, options, tracing)
            side = wiring.scheduler_side(*parts, feed=self._feed)
            self._side: SchedulerSide | WorkerSide = side
            self._requests_to_connector = Choices(side.ledger)
            if "aggregator" not in configuration.stock:
                note = side.open_transfers.note_in_aggregator
                self.aggregation = aggregator.Aggregation(options.stuck_after_s, note)
                aggregator.install()
            _introduce(validated, tracing)
        else:
            self._side = wiring.worker_side(*parts)
        self._put_hooks_in_place(records)

    def _put_hooks_in_place(self, records: Telemetry) -> None:
        """Bind general hooks to the children and the role's hooks to its side, if this vLLM has them.

        Hooks that this class defines itself are not replaced.
        """
        fanout.bind(self, self._children, versions.has_hook)
        if isinstance(self._side, WorkerSide):
            for calls in self._side.stalls.layer_calls:
                setattr(self, calls.hook, calls.fan_out)
        for name, hook in HOOKS.items():
            if hook.combine is Combine.ROUTED and name not in vars(MultiConnector) and versions.has_hook(name):
                routed = getattr(self._side, name, None)
                if routed is not None:
                    setattr(self, name, routed)
        # Bound just now: unknown to mypy.
        setattr(self, "shutdown", partial(self._end, getattr(self, "shutdown"), records))  # noqa: B009, B010

    def _end(self, shutdown: Callable[[], None], records: Telemetry) -> None:
        """End the connectors by their hook ``shutdown``, and then what records them."""
        is_well = not isinstance(sys.exception(), Exception)  # vLLM also calls it while an error ends the engine
        try:
            shutdown()
        finally:
            if records.log is not None:
                records.log.close()
            if self._feed is not None and isinstance(self._side, SchedulerSide):
                self._side.feed_last(self._feed)
                self._feed.close(is_well=is_well)
            if is_well:
                records.recorder.box.close()

    # The wrapper's own metadata must be bound too: vLLM asks has_connector_metadata() before every layer.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(self._side, WorkerSide)
        self._box[SINCE] = perf_counter_ns()
        self._side.bind_connector_metadata(connector_metadata)
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)

    def clear_connector_metadata(self) -> None:
        assert isinstance(self._side, WorkerSide)
        self._side.clear_connector_metadata()
        KVConnectorBase_V1.clear_connector_metadata(self)
        self._box[SINCE] = 0
        self._box[STEPS] += 1

    # What the children can do

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(map(_supports_divergent_hits, self._connectors))

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._connectors)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        parent = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config=dict(extra_config),
            kv_load_failure_policy="recompute",  # unknown here; it is checked when the connector is built
        )
        return any(
            spec.connector_class.requires_piecewise_for_cudagraph(spec.transfer_config.kv_connector_extra_config)
            for spec in read_specs(parent)
        )

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return all_support_hma(read_specs(kv_transfer_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the KV cache layout that the children need (such as "HND"), or None if any will do."""
        return required_layout(vllm_config, read_specs(vllm_config.kv_transfer_config))

    # Stats and metrics, in the API server

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
    """The child that loads each request, in the form of vLLM's class: for code inherited from newer versions."""

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

    If none is needed the result is None, and "NHD" before vLLM 0.30. The default configuration is this process's.
    """
    return versions.required_cache_layout(_stock_cache_layout, vllm_config)


def _feed(
    vllm_config: VllmConfig, specs: Sequence[ChildSpec], options: Options, tracing: TracingSettings | None
) -> Feed | None:
    """Return the way to the exporter; None if it does not run, or can't be made. Say where metrics are."""
    try:
        setup = destinations.Setup.of_engine(options, vllm_config)
        exporter, engine = setup.running, None
        if exporter is not None:
            engine = exported(described(vllm_config, specs, options, os.getppid()), vllm_config, exporter, tracing)
        destinations.announce(setup, engine)
        return None if engine is None else Feed(engine)
    except Exception:
        faults.contain("flush")
        return None


def _introduce(validated: Validated, tracing: TracingSettings | None) -> None:
    """Log at start to which connectors kvobs routes, which parts of vLLM it leaves in place, and what may surprise."""
    configuration = validated.configuration
    listed = ", ".join(f"{spec.name} ({spec.connector_class.__name__})" for spec in validated.specs)
    log.info("kvobs %s routes to %s; load_policy %s", __version__, listed, configuration.options.load_policy)
    if configuration.stock:
        log.info("by %s vLLM's own stay in place: %s", STOCK_VARIABLE, ", ".join(sorted(configuration.stock)))
    for warning in validated.warnings:
        log.warning("%s", warning)
    sampling.warn_about(configuration.options, tracing)
    if unknown := versions.unknown_hooks():
        text = (
            "this vLLM has hooks that kvobs does not know: %s. They are routed by the class inherited from vLLM, and "
            "are not observed"
        )
        log.warning(text, ", ".join(unknown))
