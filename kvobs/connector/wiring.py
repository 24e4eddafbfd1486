"""Build both sides of the connector: the router on the built connectors, and what observes it in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import vllm
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvobs import faults
from kvobs.connectors.block_copies import BlockCopies
from kvobs.connectors.fanout import own_methods
from kvobs.connectors.specs import ConnectorSpec, StoreSizes, between_engines, chunk_tokens, load_ends_save
from kvobs.connectors.sub_connector import SubConnector
from kvobs.connectors.sync_loads import Conditions
from kvobs.connectors.validation import Validated
from kvobs.export import destinations, starter
from kvobs.log import log
from kvobs.page.description import ConnectorInfo, EngineInfo
from kvobs.probe.layer_calls import ARGUMENTS, Stalls
from kvobs.probe.native import choice
from kvobs.probe.pure import Call
from kvobs.routing.completions import Completions, OutputView
from kvobs.routing.hook_targets import HookTargets
from kvobs.routing.isolation import GIVE_UP_NS, Isolation
from kvobs.routing.lookups import Lookups, OpenLookups
from kvobs.routing.metadata import NextOrders
from kvobs.routing.scheduler import EngineFacts, SchedulerSide
from kvobs.routing.visibility import Visibility
from kvobs.routing.worker import WorkerSide
from kvobs.routing.worker_isolation import WorkerGates
from kvobs.schema import __version__
from kvobs.schema.config import STOCK_VARIABLE
from kvobs.schema.options import Options
from kvobs.state.cache_layout import CacheLayout, bytes_of_blocks, layers_differ
from kvobs.state.events import Observer
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import InProgress
from kvobs.telemetry.composed import Composed
from kvobs.telemetry.estimates.gains import Gains, step_limits
from kvobs.telemetry.estimates.reuse import PromptReuse, cache_tokens, hash_block_size
from kvobs.telemetry.payload.collector import Collector
from kvobs.telemetry.payload.stats import StatsParts, class_path
from kvobs.telemetry.recorders import Recorders
from kvobs.telemetry.scheduler_telemetry import SchedulerTelemetry
from kvobs.telemetry.tracing import sampling
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.telemetry.transfers.first_requests import FirstLoads
from kvobs.telemetry.transfers.load_warnings import SlowLoads, SyncLoadWarnings
from kvobs.telemetry.transfers.offers import OfferCounts
from kvobs.telemetry.transfers.open_transfers import OpenTransfers
from kvobs.telemetry.transfers.outcomes import Outcomes
from kvobs.telemetry.transfers.peers import Peers
from kvobs.telemetry.verify.fingerprints import Fingerprints, Layers
from kvobs.telemetry.verify.sample import BlockSample
from kvobs.telemetry.verify.verifier import Verifier
from kvobs.telemetry.worker_telemetry import WorkerTelemetry
from kvobs.vllm_api import versions
from kvobs.vllm_api.proc import launch, served_port, server_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


Bind = Callable[[], Mapping[str, Call]]
"""Bind a side to the hooks that each connector implements now; return the fan-outs of the hooks of layers."""


class Parts(NamedTuple):
    """What both sides are built of."""

    connectors: Sequence[SubConnector]
    recorders: Recorders
    validated: Validated
    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig | None


def engine_info(
    specs: Sequence[ConnectorSpec], options: Options, vllm_config: VllmConfig, tracing: TracingSettings
) -> EngineInfo:
    """Return what an engine's metrics and their readers need to know about it."""
    server = server_of(os.getppid())
    return EngineInfo(
        connectors=tuple(
            ConnectorInfo(
                spec.name,
                spec.connector_class.__name__,
                str(spec.transfer_config.kv_role),
                options.link_gbps.get(spec.name),
            )
            for spec in specs
        ),
        model=versions.model_name(vllm_config),
        index=versions.engine_position(vllm_config).number,
        load_policy=options.load_policy,
        failure_policy=str(getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", None) or ""),
        vllm_version=vllm.__version__,
        kvobs_version=__version__,
        ranks=vllm_config.parallel_config.world_size,
        has_spans=tracing.is_on,
        endpoint=tracing.endpoint,
        port=served_port(server),
        launch=launch(server),
    )


def scheduler_side(
    connectors: Sequence[SubConnector],
    recorders: Recorders,
    validated: Validated,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    *,
    tracing: TracingSettings,
    all_support_hma: bool,
) -> tuple[SchedulerSide, SchedulerTelemetry, Bind]:
    """Build the side in EngineCore, its telemetry, and what binds both to the connectors' hooks."""
    options, specs, recorder = validated.configuration.options, validated.specs, recorders.recorder
    names, groups, parallel = validated.configuration.names, groups_of(kv_cache_config), vllm_config.parallel_config
    reporting = reporting_ranks(vllm_config)
    layout = CacheLayout.of(groups, parallel.world_size, getattr(parallel, "decode_context_parallel_size", 1))
    isolates = any(connector.gate is not None for connector in connectors)

    ledger = Ledger([connector.index for connector in connectors if load_ends_save(connector.wrapped)])
    awaited = tuple(InProgress[str]() for _ in connectors)
    minimum = [options.min_tokens.get(name, 1) for name in names]
    followers: list[Observer | None] = [OfferCounts(recorder, minimum), Outcomes(names, recorder)]
    followers += [
        SlowLoads(names, int(options.slow_load_ms * 1e6)),
        recorders.traces,
        recorders.loads,
        recorders.reports,
    ]
    handing = between_engines(specs)
    handed_over = [spec.index for spec in handing]
    followers += [Peers(recorder, handed_over) if handing else None, _first_loads(handing)]
    followed = Composed(followers)
    chunk, in_flight = step_limits(vllm_config)
    gains = Gains(recorder, followed, chunk, in_flight)
    prompt_sizes = hash_block_size(kv_cache_config, layout), cache_tokens(vllm_config, kv_cache_config, layout)
    chunks = chunk_tokens(specs, max(layout.block_sizes, default=0))
    reuse = PromptReuse(recorder, followed, *prompt_sizes, chunks=chunks, elsewhere=handed_over)
    for connector in connectors:
        connector.kv_events.watcher = reuse.evictions
    open_transfers = OpenTransfers(names, ledger, awaited, recorder, reporting, options.stuck_after_s)
    warnings = SyncLoadWarnings(validated.unsafe) if validated.unsafe else None
    share = options.verify.sample_ratio
    sample = BlockSample(share, layout, prompt_sizes[0], reporting, in_flight) if share is not None else None
    longest = getattr(vllm_config.model_config, "max_model_len", 0)
    copies = getattr(kv_cache_config, "kv_tp_replicas", 1)
    sizes = StoreSizes(recorder, specs, parallel.world_size, copies, longest)
    observer = Composed([*followers, reuse, gains, open_transfers, warnings, sample, sizes])
    collector = _collector(connectors)
    starts = faults.contained("export")(starter.of_scheduler)(options.exporter, vllm_config)
    telemetry = SchedulerTelemetry(recorders, collector, gains, open_transfers, starter=starts, sample=sample)

    visibility = [Visibility() for _ in connectors]
    isolation = Isolation(connectors, ledger, visibility, observer, int(options.best_effort_slow_ms * 1e6))
    next_orders = NextOrders()
    lookups = Lookups(
        connectors,
        options,
        observer,
        visibility,
        awaited=awaited,
        # Without isolated connectors a lookup costs less.
        isolation=isolation if isolates else None,
        async_only=validated.async_only,
    )
    view = OutputView(connectors, ledger, visibility, StatsParts(collector.classes), observer.unexpected)
    completions = Completions(
        connectors=connectors,
        ledger=ledger,
        view=view,
        observer=observer,
        next_orders=next_orders,
        isolation=isolation,
        lookups=lookups,
        layout=layout,
        ranks=parallel.world_size,
    )
    open_lookups = OpenLookups(connectors, visibility, lookups.answered_late)
    may_hide = lookups.may_leave_open or isolates
    side = SchedulerSide(
        connectors=connectors,
        ledger=ledger,
        lookups=lookups,
        targets=HookTargets(connectors, visibility, isolation, open_lookups, ledger, may_hide=may_hide),
        completions=completions,
        next_orders=next_orders,
        facts=EngineFacts(layout, reporting, all_support_hma),
        observer=observer,
        annotator=telemetry,
        stats=telemetry,
    )
    _introduce(validated, tracing)

    def bind() -> Mapping[str, Call]:
        lookups.bind()
        view.bind()
        collector.hooks = stats_hooks(connectors)
        return {}

    return side, telemetry, bind


def worker_side(
    connectors: Sequence[SubConnector],
    recorders: Recorders,
    validated: Validated,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
) -> tuple[WorkerSide, WorkerTelemetry, Bind]:
    """Build the side in a worker, its telemetry, and what binds both to the connectors' hooks."""
    blocks = kv_cache_config.num_blocks if kv_cache_config is not None else 0
    is_stock = "block_copy" in validated.configuration.stock
    verifier = _verifier(recorders, validated, vllm_config, kv_cache_config)
    rank, groups = rank_of(vllm_config), groups_of(kv_cache_config)
    # A pipeline stage has its own layers.
    has_own_bytes = vllm_config.parallel_config.pipeline_parallel_size > 1 or layers_differ(groups)
    start = faults.contained("export")(starter.of_worker)
    starts = start(validated.configuration.options.exporter, vllm_config, recorders.page)
    collector = _collector(connectors)
    telemetry = WorkerTelemetry(recorders, collector, verifier, starts)

    def stalls() -> Stalls:
        targets = {hook: [c.layer_target(hook) for c in connectors if hook in c.implemented] for hook in ARGUMENTS}
        return Stalls(targets, recorders.recorder)

    side = WorkerSide(
        connectors=connectors,
        rank=rank,
        ids_are_unique=len(groups) <= 1,
        copies=BlockCopies(recorders.recorder, blocks, is_stock=is_stock),
        gates=WorkerGates(connectors) if any(connector.gate is not None for connector in connectors) else None,
        observer=telemetry,
        stats=telemetry,
        block_bytes=bytes_of_blocks(groups) if has_own_bytes else (),
    )

    def bind() -> Mapping[str, Call]:
        side.bind()
        side.waits = waits = stalls()
        collector.hooks = stats_hooks(connectors)
        return waits.fan_outs

    return side, telemetry, bind


def _first_loads(handing: Sequence[ConnectorSpec]) -> FirstLoads | None:
    """Return what watches a decode engine's first requests; None for an engine that loads from no other."""
    takers = {spec.index: spec.name for spec in handing if spec.transfer_config.is_kv_consumer}
    only_takes = not any(spec.transfer_config.is_kv_producer for spec in handing)
    return FirstLoads(takers, only_takes=only_takes) if takers else None


def stats_hooks(connectors: Sequence[SubConnector]) -> list[tuple[str, Call]]:
    """Return the calls for the stats of the connectors that have any, by name."""
    hook = "get_kv_connector_stats"
    return [(connector.name, getattr(connector, hook)) for connector in connectors if hook in connector.implemented]


def _verifier(
    recorders: Recorders, validated: Validated, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> Verifier | None:
    """Return the comparison of loaded blocks on this rank, if the operator asks for it."""
    configuration = validated.configuration
    if (share := configuration.options.verify.sample_ratio) is None or kv_cache_config is None:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    hidden = vllm_config.model_config.get_total_num_hidden_layers()
    cache = Layers(groups_of(kv_cache_config), layers, kv_cache_config.num_blocks, hidden)
    parallel = vllm_config.parallel_config
    shares = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.decode_context_parallel_size
    fingerprints = Fingerprints(cache, reads_all=share >= 1, parallel=shares)
    return Verifier(
        configuration.names,
        rank_of(vllm_config),
        recorders.recorder,
        fingerprints,
        refuses=configuration.options.verify.recomputes,
        hands_over=any(spec.transfer_config.is_kv_producer for spec in between_engines(validated.specs)),
    )


def _collector(connectors: Sequence[SubConnector]) -> Collector:
    return Collector({connector.name: class_path(type(connector.wrapped)) for connector in connectors})


def _introduce(validated: Validated, tracing: TracingSettings) -> None:
    """Log at start to which connectors kvobs routes, which parts of vLLM it leaves in place, and what may surprise."""
    configuration = validated.configuration
    listed = ", ".join(f"{spec.name} ({spec.connector_class.__name__})" for spec in validated.specs)
    options = configuration.options
    go_to = faults.contained("export")(destinations.described_at_start)(options.exporter, tracing)
    log.info("kvobs %s routes to %s; load_policy %s%s", __version__, listed, options.load_policy, go_to or "")
    if choice().is_native:
        log.info("calls are counted by the compiled probe")
    else:
        log.info("calls are counted in Python: %s", choice().reason)
    if configuration.stock:
        log.info(
            "%s is set, so these parts of vLLM stay in use: %s", STOCK_VARIABLE, ", ".join(sorted(configuration.stock))
        )
    for spec in validated.specs:
        if names := own_methods(spec.connector_class):
            text = (
                "connector %r has methods that are not vLLM hooks: %s. kvobs passes calls to them on but does not "
                "record them"
            )
            log.info(text, spec.name, ", ".join(names))
    if isolated := ", ".join(configuration.options.best_effort):
        text = (
            "best-effort connectors: %s. A connector that fails goes into quarantine. A request whose load it may have "
            "started waits up to %g s, because the connector may still write into its blocks"
        )
        log.info(text, isolated, GIVE_UP_NS / 1e9)
    for warning in validated.warnings:
        log.warning("%s", warning)
    sampling.warn_about(configuration.options, tracing)
    if unknown := versions.unknown_hooks():
        text = (
            "this vLLM has hooks that kvobs does not know: %s. vLLM's own MultiConnector routes them, and kvobs does "
            "not observe them"
        )
        log.warning(text, ", ".join(unknown))


def conditions_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> Conditions:
    """Return the properties by which an engine can, or can't, recompute a failed synchronous load."""
    _, steps = step_limits(vllm_config)
    return Conditions(len(groups_of(kv_cache_config)), steps, versions.has_v2_runner(vllm_config))


def groups_of(kv_cache_config: KVCacheConfig | None) -> list[KVCacheGroupSpec]:
    """Return the KV cache groups; none without a configuration."""
    return kv_cache_config.kv_cache_groups if kv_cache_config is not None else []


def rank_of(vllm_config: VllmConfig) -> int:
    """Return this worker's rank within its engine: an external launcher counts on through data parallel engines."""
    return vllm_config.parallel_config.rank % vllm_config.parallel_config.world_size


def reporting_ranks(vllm_config: VllmConfig) -> int:
    """Return how many workers report to this scheduler: 1 if each executor has one worker.

    With an external launcher every worker has its own engine, and all engines get the same requests.
    """
    executor = Executor.get_class(vllm_config)
    return 1 if issubclass(executor, UniProcExecutor) else int(vllm_config.parallel_config.world_size)
