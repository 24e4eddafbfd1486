"""The table of vLLM's connector hooks: the side that calls each, how often, and how the connectors' answers combine.

Covers vLLM 0.27 to 0.33, and what its main branch has added until November 2026. Hooks of newer versions reach the
connectors through the routing inherited from vLLM's own ``MultiConnector``, and are logged once at start.
"""

import dis
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import CodeType
from typing import Any


class Side(Enum):
    """The process that calls a hook."""

    CONFIG = "config"  # on the class, in any process, before there is an instance
    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"


class Cadence(Enum):
    """How often a hook is called."""

    ONCE = "once"
    REQUEST = "request"
    STEP = "step"
    LAYER = "layer"


class Combine(Enum):
    """How the connectors' answers are combined."""

    EACH = "each"  # every connector is called; the hook has no answer
    GUARDED = "guarded"  # as EACH, and all connectors are called even if one raises
    ANY = "any"  # true if any connector answers true
    ALL = "all"  # true if all connectors (at least one) answer true
    CHAIN = "chain"  # the connectors' items, concatenated
    ROUTED = "routed"  # its own rule, in the module of its side


@dataclass(frozen=True, slots=True)
class Hook:
    """One public member of ``KVConnectorBase_V1`` or ``SupportsHMA``."""

    name: str
    side: Side
    cadence: Cadence
    combine: Combine
    is_property: bool = False


def _rows(side: Side, cadence: Cadence, combine: Combine, names: str, is_property: bool = False) -> Iterable[Hook]:
    return (Hook(name, side, cadence, combine, is_property) for name in names.split())


_C, _S, _W, _B = Side
_ONCE, _REQUEST, _STEP, _LAYER = Cadence
_EACH, _GUARDED, _ANY, _ALL, _CHAIN, _ROUTED = Combine

HOOKS: dict[str, Hook] = {
    hook.name: hook
    for rows in (
        # Decided by the configuration alone.
        _rows(_C, _ONCE, _ANY, "requires_piecewise_for_cudagraph"),
        _rows(_C, _ONCE, _ALL, "supports_sleep_mode"),
        _rows(_C, _ONCE, _ROUTED, "get_required_kvcache_layout build_prom_metrics"),
        _rows(_C, _STEP, _ROUTED, "build_kv_connector_stats"),
        _rows(_B, _ONCE, _ALL, "supports_divergent_local_hybrid_hits prefer_cross_layer_blocks", is_property=True),
        _rows(_B, _ONCE, _ANY, "requires_kv_delivery", is_property=True),
        # Worker, once.
        _rows(_W, _ONCE, _ROUTED, "get_mem_pool_context get_handshake_metadata"),
        _rows(_W, _ONCE, _EACH, "register_kv_caches register_cross_layers_kv_cache"),
        _rows(_W, _ONCE, _ROUTED, "set_host_xfer_buffer_ops"),
        _rows(_W, _ONCE, _EACH, "unregister_kv_caches restore_kv_caches reset_capture_state"),
        # Worker, in the order of a step.
        _rows(_W, _STEP, _ROUTED, "handle_preemptions bind_connector_metadata"),
        _rows(_W, _STEP, _EACH, "start_load_kv"),
        _rows(_W, _LAYER, _EACH, "wait_for_layer_load save_kv_layer"),
        _rows(_W, _STEP, _EACH, "finish_forward wait_for_save"),
        _rows(_W, _STEP, _ROUTED, "get_transfer_results get_finished get_block_ids_with_load_errors"),
        _rows(_B, _STEP, _ROUTED, "get_kv_connector_stats"),
        _rows(_W, _STEP, _ROUTED, "get_kv_connector_kv_cache_events build_connector_worker_meta"),
        _rows(_W, _STEP, _ROUTED, "clear_connector_metadata"),
        # Scheduler, once.
        _rows(_S, _ONCE, _EACH, "bind_kv_cache_manager bind_gpu_block_pool"),
        _rows(_S, _ONCE, _ROUTED, "get_finished_count"),
        _rows(_S, _ONCE, _ROUTED, "set_xfer_handshake_metadata set_xfer_handshake_metadata_pp_aware"),
        # Scheduler, per request.
        _rows(_S, _REQUEST, _ROUTED, "on_new_request get_num_new_matched_tokens get_loaded_kv_cache_group_ids"),
        _rows(_S, _REQUEST, _ROUTED, "update_state_after_alloc get_external_cache_hit_sources"),
        # Of a vLLM after 0.33.
        _rows(_S, _REQUEST, _ROUTED, "can_load_prefix_replay_checkpoint consume_prefix_replay_checkpoint"),
        _rows(_S, _REQUEST, _ROUTED, "register_finished_partial_tail request_finished request_finished_all_groups"),
        # Scheduler, in the order of a step.
        _rows(_S, _STEP, _ROUTED, "build_connector_meta update_connector_output"),
        _rows(_S, _STEP, _CHAIN, "take_events"),
        _rows(_S, _STEP, _ANY, "has_pending_block_frees has_pending_push_work"),
        _rows(_S, _ONCE, _ROUTED, "reset_cache"),
        _rows(_B, _ONCE, _GUARDED, "shutdown"),
    )
    for hook in rows
}

SCHEDULER_HOOKS = tuple(
    hook.name for hook in HOOKS.values() if hook.side is Side.SCHEDULER and hook.cadence is not Cadence.ONCE
)
"""Hooks that are called within the engine's loop, again and again."""

INHERITED: dict[str, str] = {
    "role": "a fact about the wrapper itself, set by the base class's constructor",
    "has_connector_metadata": "asks whether the wrapper's own metadata is bound, which bind_connector_metadata does",
}


_DOES_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "POP_TOP", "RETURN_VALUE", "RETURN_CONST"}


def is_empty(call: Callable[..., Any]) -> bool:
    """Return whether ``call`` is a plain Python method whose whole body returns a constant."""
    function = getattr(call, "__func__", None)
    if not inspect.isfunction(function) or function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE):
        return False
    return _does_nothing(function.__code__)


@cache
def _does_nothing(code: CodeType) -> bool:
    return all(instruction.opname in _DOES_NOTHING for instruction in dis.get_instructions(code))
