"""``MultiConnector``: the one class that vLLM sees. It builds the children and puts the hooks of its role in place.

The name is fixed: vLLM compares the literal string. It subclasses vLLM's own, so that identity checks hold and a hook
that a newer vLLM adds reaches the children through the inherited routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvobs import __version__, aggregation, children, fanout, faults, flight, sampling
from kvobs.block_copies import BlockCopies
from kvobs.call_spans import CallSpans
from kvobs.config import Options, read
from kvobs.hooks import HOOKS, INHERITED, Combine
from kvobs.layout import CacheLayout
from kvobs.ledger import Ledger
from kvobs.metrics import MultiKVConnectorPromMetrics
from kvobs.notices import log
from kvobs.recorder import WALL_OFFSET, Recorder
from kvobs.sampling import Tracing, Verdicts
from kvobs.scheduler import SchedulerSide
from kvobs.stats import MultiKVConnectorStats, rebuild
from kvobs.traces import Traces, Untraced
from kvobs.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class MultiConnector(stock.MultiConnector):
    """Load from one of several KV connectors, save to all, and count what each does.

    Enable it with ``"kv_connector_module_path": "kvobs"`` beside ``"kv_connector": "MultiConnector"``. Options are
    under ``kv_connector_extra_config.kvobs``, see ``kvobs.config.Options``.

    Raises:
        ConfigError: when the configuration has mistakes; lists each with its JSON path.
    """

    aggregation: aggregation.Aggregation | None = None
    """How vLLM's executor is to put the workers' outputs together; None leaves it to vLLM's own class."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # Not stock's constructor, which builds the children its own way.
        KVConnectorBase_V1.__init__(self, vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        configuration = read(transfer_config.kv_connector_extra_config)
        specs = children.specs_of(transfer_config, configuration)
        self._all_support_hma = children.all_support_hma(specs)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not self._all_support_hma:
            lacking = [s.name for s in specs if not KVConnectorFactory.supports_hma_config(s.transfer_config)]
            raise ValueError(
                f"these connectors don't support the hybrid KV cache manager: {', '.join(lacking)}. "
                "Start vLLM with --disable-hybrid-kv-cache-manager, or remove them"
            )
        options = configuration.options
        slow_ns_of = {hook: int(ms * 1e6) for hook, ms in options.slow_call_ms_by_hook.items()}
        recorder = Recorder(len(specs), int(options.slow_call_ms * 1e6), configuration.names, slow_ns_of)
        parallel = vllm_config.parallel_config
        rank = parallel.rank % parallel.world_size  # an external launcher counts on through data parallel engines
        tracing = Tracing.of(options, vllm_config)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        recorder.flight = flight.begin(
            options.timeline, vllm_config, None if is_scheduler else rank, configuration.names, WALL_OFFSET
        )
        traces = _trace(role, recorder, configuration.names, tracing, rank)
        activated = traces.activated if isinstance(traces, Traces) and tracing and tracing.propagates else None
        self._children = children.build(vllm_config, role, kv_cache_config, specs, recorder, activated=activated)
        # What inherited code and vLLM itself look at: the real objects, and which one loads a request.
        self._connectors = [child.connector for child in self._children]
        self._ktc_kv_transfer_config = [spec.transfer_config for spec in specs]
        self._extra_async_saves: dict[str, int] = {}
        self._requests_to_connector: Any = {}
        groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
        if is_scheduler:
            ranks = parallel.world_size
            self._side: SchedulerSide | WorkerSide = SchedulerSide(
                self._children,
                recorder,
                options,
                ranks,
                CacheLayout.of(groups, ranks),
                traces=traces,
            )
            self._requests_to_connector = Choices(self._side.ledger)
            if options.aggregator == "kvobs":
                note = self._side.open_transfers.note_in_aggregator
                self.aggregation = aggregation.Aggregation(options.stuck_after_s, note)
                aggregation.install()
            _introduce(specs, options)
            children.warn_about(transfer_config, specs)
            sampling.warn_about(options, tracing)
            _name_unknown_hooks()
        else:
            blocks = kv_cache_config.num_blocks if kv_cache_config is not None else 0
            copies = BlockCopies(recorder, options.block_copy, blocks)
            self._side = WorkerSide(self._children, recorder, rank, len(groups), copies)
        self._put_hooks_in_place(recorder.flight)

    def _put_hooks_in_place(self, noting: flight.Flight | None) -> None:
        """Bind the general hooks to the children and those of this role to its side, where this vLLM knows them.

        What this class defines itself stays its own.
        """
        fanout.bind(self, self._children, _known_to_host)
        if isinstance(self._side, WorkerSide):
            for calls in self._side.layer_calls:
                setattr(self, calls.hook, calls.fan_out)
        for name, hook in HOOKS.items():
            if hook.combine is Combine.ROUTED and name not in vars(MultiConnector) and _known_to_host(name):
                routed = getattr(self._side, name, None)
                if routed is not None and noting is not None and name in flight.ROUTED:
                    routed = noting.noted(flight.OWN, name, routed)
                if routed is not None:
                    setattr(self, name, routed)

    # The wrapper's own metadata must be bound too: vLLM asks has_connector_metadata() before every layer.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(self._side, WorkerSide)
        self._side.bind_connector_metadata(connector_metadata)
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)

    def clear_connector_metadata(self) -> None:
        assert isinstance(self._side, WorkerSide)
        self._side.clear_connector_metadata()
        KVConnectorBase_V1.clear_connector_metadata(self)

    # What the children can do

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(child.supports_divergent_local_hybrid_hits for child in self._connectors)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return all(getattr(child, "prefer_cross_layer_blocks", False) for child in self._connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(child.requires_kv_delivery for child in self._connectors)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return any(
            spec.connector_class.requires_piecewise_for_cudagraph(spec.transfer_config.kv_connector_extra_config)
            for spec in children.specs(_transfer_config(extra_config))
        )

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return children.all_support_hma(children.specs(kv_transfer_config))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return all(
            spec.connector_class.supports_sleep_mode(spec.transfer_config)
            for spec in children.specs(kv_transfer_config)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the KV cache layout that the children need (such as "HND"), or None when any will do."""
        return children.required_layout(vllm_config, children.specs(vllm_config.kv_transfer_config))

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
        transfer_config = vllm_config.kv_transfer_config
        configuration = read(transfer_config.kv_connector_extra_config)
        specs = children.specs_of(transfer_config, configuration)
        return MultiKVConnectorPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            of=specs,
            options=configuration.options,
        )


def _trace(
    role: KVConnectorRole, recorder: Recorder, names: Sequence[str], tracing: Tracing | None, rank: int
) -> Untraced:
    """Put a tracer behind the recorder, and return the requests' traces: the scheduler's, where anything is traced."""
    if tracing is None:
        return Untraced()
    try:
        verdicts = Verdicts()
    except Exception:
        faults.contain("trace")
        return Untraced()
    if role is KVConnectorRole.SCHEDULER:
        return Traces(names, recorder, tracing, verdicts)
    recorder.tracer = CallSpans(names, recorder, tracing, verdicts, rank=rank)
    return Untraced()


class Choices(Mapping[str, int]):
    """The child that loads each request, as stock keeps it: for code inherited from a newer vLLM."""

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


def get_kv_connector_cache_layout(vllm_config: VllmConfig | None = None) -> str | None:
    """Return the KV cache layout that the configured connector needs, or None.

    Args:
        vllm_config: vLLM's configuration; by default the one that is current in this process.

    The same as vLLM's helper of this name.
    """
    config = vllm_config if vllm_config is not None else get_current_vllm_config_or_none()
    if config is None or config.kv_transfer_config is None:
        return None
    connector_class = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    layout: str | None = connector_class.get_required_kvcache_layout(config)
    return layout


def _transfer_config(extra_config: dict[str, Any]) -> KVTransferConfig:
    # The policy is not told where this is asked, and is checked where the connector is built.
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config=dict(extra_config),
        kv_load_failure_policy="recompute",
    )


def _known_to_host(name: str) -> bool:
    return hasattr(KVConnectorBase_V1, name) or hasattr(SupportsHMA, name)


def unknown_hooks() -> list[str]:
    """Return the public hooks of this vLLM that the table does not know."""
    public = {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in vars(cls) if not name.startswith("_")}
    return sorted(public - set(HOOKS) - set(INHERITED))


def _introduce(specs: Sequence[children.ChildSpec], options: Options) -> None:
    """Say once at start what stands behind the name MultiConnector."""
    listed = ", ".join(f"{spec.name} ({spec.connector_class.__name__})" for spec in specs)
    log.info("kvobs %s routes to %s; load_policy %s", __version__, listed, options.load_policy)


def _name_unknown_hooks() -> None:
    unknown = unknown_hooks()
    if unknown:
        log.warning(
            "this vLLM has hooks that kvobs does not know yet: %s. They reach the connectors through the routing "
            "inherited from vLLM, unobserved",
            ", ".join(unknown),
        )
