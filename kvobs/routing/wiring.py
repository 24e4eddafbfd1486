"""Build both sides of the connector: all parts that route, on the built connectors and this process's telemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from kvobs.children.block_copies import BlockCopies
from kvobs.children.child import Child
from kvobs.children.collector import Collector, FlushRule, Sink
from kvobs.children.configured import all_support_hma
from kvobs.children.layer_calls import Stalls
from kvobs.children.specs import load_ends_save
from kvobs.children.sync_loads import Conditions, async_only, unsafe_loads
from kvobs.children.validation import Validated
from kvobs.routing import policies
from kvobs.routing.completions import Completions, OutputView
from kvobs.routing.gains import Gains, step_limits
from kvobs.routing.isolation import Isolation
from kvobs.routing.lookups import Offers, OpenLookups
from kvobs.routing.metadata import NextOrders
from kvobs.routing.outcomes import OpenTransfers, Outcomes
from kvobs.routing.reuse import PromptReuse, cache_tokens, hash_block_size, record_sizes
from kvobs.routing.scheduler import SchedulerSide
from kvobs.routing.sync_load_warnings import SyncLoadWarnings
from kvobs.routing.visibility import Visibility
from kvobs.routing.worker import WorkerSide
from kvobs.routing.worker_isolation import WorkerGates
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.ledger import Ledger
from kvobs.state.transfer_listener import TransferListener, TransferListeners
from kvobs.telemetry.recorders import Telemetry
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def scheduler_side(
    children: Sequence[Child],
    telemetry: Telemetry,
    validated: Validated,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
    *,
    feed: Sink | None = None,
) -> SchedulerSide:
    """Build the side in EngineCore; ``feed`` takes kvobs's own numbers to the exporter, if there is one."""
    options, specs, recorder = validated.configuration.options, validated.specs, telemetry.recorder
    names, groups, parallel = validated.configuration.names, groups_of(kv_cache_config), vllm_config.parallel_config
    reporting = reporting_ranks(vllm_config)
    layout = CacheLayout.of(groups, parallel.world_size, getattr(parallel, "decode_context_parallel_size", 1))
    record_sizes(recorder, specs, layout, parallel.world_size, getattr(kv_cache_config, "kv_tp_replicas", 1))
    isolates = any(child.gate is not None for child in children)

    ledger = Ledger([child.index for child in children if load_ends_save(child.connector)])
    visibility = [Visibility() for _ in children]
    isolation = Isolation(children, ledger, visibility, recorder, int(options.isolate_slow_ms * 1e6))
    next_orders = NextOrders()

    listeners: list[TransferListener] = [Outcomes(names, recorder), *telemetry.listeners]
    gains = Gains(recorder, TransferListeners(listeners), *step_limits(vllm_config))
    policy = policies.configured(options, children, gains)
    learning = [policy] if isinstance(policy, TransferListener) else []
    unsafe = unsafe_loads(specs, validated.conditions, validated.policy)
    warning = [SyncLoadWarnings(unsafe)] if unsafe else []
    listener = TransferListeners([*listeners, gains, *learning, *warning])

    offers = Offers(
        children,
        options,
        recorder,
        policy,
        visibility,
        # Without isolated connectors a lookup costs less.
        isolation=isolation if isolates else None,
        async_only=async_only(specs, validated.conditions),
    )
    completions = Completions(
        children=children,
        ledger=ledger,
        view=OutputView(children, ledger, visibility, listener.stray),
        listener=listener,
        next_orders=next_orders,
        isolation=isolation,
        offers=offers,
        layout=layout,
        ranks=parallel.world_size,
        to_reset=[child for child in children if child.name in options.reset_after_failed_sync_load],
    )
    return SchedulerSide(
        children=children,
        ledger=ledger,
        visibility=visibility,
        isolation=isolation,
        offers=offers,
        open_lookups=OpenLookups(children, visibility, offers.answered_late),
        completions=completions,
        next_orders=next_orders,
        listener=listener,
        gains=gains,
        reuse=PromptReuse(
            recorder, hash_block_size(kv_cache_config, layout), cache_tokens(vllm_config, kv_cache_config, layout)
        ),
        open_transfers=OpenTransfers(names, ledger, recorder, reporting, options.stuck_after_s),
        traces=telemetry.traces,
        reports=telemetry.reports,
        collector=Collector(children, recorder, feed),
        flush_rule=FlushRule(telemetry.journal),
        feed=feed,
        box=recorder.box.words,
        layout=layout,
        reporting=reporting,
        all_support_hma=all_support_hma(specs),
        may_hide=offers.may_leave_open or isolates,
    )


def worker_side(
    children: Sequence[Child],
    telemetry: Telemetry,
    validated: Validated,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
) -> WorkerSide:
    """Build the side in a worker."""
    blocks = kv_cache_config.num_blocks if kv_cache_config is not None else 0
    is_stock = "block_copy" in validated.configuration.stock
    return WorkerSide(
        children=children,
        rank=rank_of(vllm_config),
        ids_are_unique=len(groups_of(kv_cache_config)) <= 1,
        copies=BlockCopies(telemetry.recorder, blocks, is_stock=is_stock),
        collector=Collector(children, telemetry.recorder),
        stalls=Stalls(children, telemetry),
        gates=WorkerGates(children) if any(child.gate is not None for child in children) else None,
        journal=telemetry.journal,
        tracer=telemetry.tracer,
    )


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
