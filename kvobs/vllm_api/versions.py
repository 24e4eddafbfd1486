"""Hold all differences between vLLM 0.27 and 0.33: a new release of vLLM is checked, and added, here.

Importing this module needs no vLLM: functions import it when they are called. What is needed in every step is resolved
once, by the module that uses it. The table of hooks also has the hooks of only some versions.
"""

import dataclasses
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, create_model

from kvobs.vllm_api.hooks import HOOKS, INHERITED
from kvobs.vllm_api.proc import stat

# Hooks


def hooks() -> set[str]:
    """Return the public hooks of this vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    return {name for cls in (KVConnectorBase_V1, SupportsHMA) for name in vars(cls) if not name.startswith("_")}


def unknown_hooks() -> list[str]:
    """Return the hooks of this vLLM that are not in the table of hooks."""
    return sorted(hooks() - set(HOOKS) - set(INHERITED))


def ignores_answers() -> bool:
    """Return whether vLLM asks about requests that read no cache, and ignores the answers, as 0.33; 0.30 loads."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "skip_reading_prefix_cache" in Scheduler.schedule.__code__.co_names


# Results of a worker's transfers

READ_RESULTS = frozenset({"finished_sending", "finished_recving", "failed_recving"})
"""The fields of ``KVConnectorTransferResults`` that the router reads."""

RESULT_FIELDS = READ_RESULTS | {"prefix_replay_checkpoints"}
"""The fields of ``KVConnectorTransferResults``, 0.30 to 0.33; the last one is newer."""


def transfer_results() -> Any:
    """Return ``KVConnectorTransferResults``, the answer of ``get_transfer_results``; None before 0.30.

    There workers answer ``get_finished``, and a failed load is reported as bad blocks, or not at all.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    return getattr(base, "KVConnectorTransferResults", None)


def further_results() -> tuple[str, ...]:
    """Return the fields of transfer results that the router passes on without reading them."""
    results = transfer_results()
    return () if results is None else tuple(_fields(results) - READ_RESULTS)


# The workers' output of a step, and its aggregation

OUTPUT_FIELDS = frozenset(
    {
        *("finished_sending", "finished_recving", "kv_connector_stats", "kv_cache_events", "kv_connector_worker_meta"),
        *("invalid_block_ids", "expected_finished_count"),
        "failed_recving",  # since 0.30
        "prefix_replay_checkpoints",  # after 0.33
    }
)
"""The fields of ``KVConnectorOutput``, 0.27 to 0.33; the last one is newer."""

AGGREGATOR_MEMBERS = frozenset({"from_connector", "aggregate", "ft_defer_kv_connector_outputs"})
"""The public members of vLLM's ``KVOutputAggregator``, 0.27 to 0.33; the last one since 0.33."""


def output_fields() -> frozenset[str]:
    """Return the fields of this vLLM's ``KVConnectorOutput``."""
    from vllm.v1.outputs import KVConnectorOutput

    return _fields(KVConnectorOutput)


def failed_loads() -> Callable[[Any], Collection[str]]:
    """Return the function that reads an output's failed loads; before 0.30 an output has none."""
    return attrgetter("failed_recving") if "failed_recving" in output_fields() else lambda _: ()


def unknown_output_fields() -> list[str]:
    """Return the fields of this vLLM's ``KVConnectorOutput`` that kvobs does not know, and would lose."""
    return sorted(output_fields() - OUTPUT_FIELDS)


def unknown_aggregator_members(stock: type) -> list[str]:
    """Return public members of vLLM's aggregator that kvobs's would inherit: they read state that it does not keep."""
    on_class = {name for cls in stock.__mro__[:-1] for name in vars(cls)}
    on_instance = set(vars(stock(1)))
    return sorted(
        name for name in on_class | on_instance if not name.startswith("_") and name not in AGGREGATOR_MEMBERS
    )


def unknown_aggregator_parameters(stock: type, ours: type) -> list[str]:
    """Return arguments that vLLM's executors may pass to its aggregator and ours does not accept."""
    return [
        f"{name}({parameter})"
        for name in sorted({"__init__", *AGGREGATOR_MEMBERS} & set(vars(stock)))
        for parameter in inspect.signature(getattr(stock, name)).parameters
        if parameter not in inspect.signature(getattr(ours, name)).parameters
    ]


# Stats


def stats_reader() -> Callable[[Any], dict[str, Any]]:
    """Return the function that makes a plain dict of a stats object or payload.

    Up to 0.29 vLLM sent the dataclass itself, ``{"data": {...}}``; newer versions send ``to_dict()``.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

    def as_dict(stats: Any) -> dict[str, Any]:
        if isinstance(stats, KVConnectorStats):
            to_dict = getattr(stats, "to_dict", None)
            stats = to_dict() if to_dict is not None else stats.data
        if isinstance(stats, dict | Mapping):  # to ask a Mapping takes far longer
            if len(stats) == 1 and isinstance(stats.get("data"), Mapping):
                stats = stats["data"]
            return dict(stats)
        return {"value": stats}

    return as_dict


def hit_sources() -> frozenset[str]:
    """Return the tiers by which vLLM counts the tokens of external hits, since 0.32; before, none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return frozenset()
    return frozenset(CacheHitSource)


# The front end

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def has_rust_frontend() -> bool:
    """Return whether the answers of this engine go to vLLM's Rust front end.

    It is asked for by a variable, as vLLM reads it since 0.28, or has started this process.
    """
    with suppress(ValueError):  # vLLM refuses it
        if int(os.environ.get(RUST_FRONTEND, "0")):
            return True
    return "vllm-rs" in _ancestors()


def _ancestors() -> Iterator[str]:
    """Yield the names of the processes that started this one."""
    pid = os.getppid()
    with suppress(OSError, ValueError):
        while pid > 1:
            name, (_state, parent, *_) = stat(pid)
            yield name
            pid = int(parent)


MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


def has_multiprocess_metrics() -> bool:
    """Return whether vLLM's API server shows metrics from prometheus_client's files: it then asks no collector."""
    return os.environ.get(MULTIPROCESS) is not None


# The scheduler's output


def block_state(output: Any) -> Any:
    """Return the block state of a ``SchedulerOutput``, which vLLM 0.28 does not have and 0.30 does."""
    return getattr(output, "kv_connector_block_state", None)


# The KV cache

CACHE_SHAPE = (1, 1, 16, 2)
"""One block of a layer's cache in the only layout since 0.30: blocks, heads, tokens, K next to V."""
MLA_CACHE_SHAPE = (1, 16, 1)
"""The same with MLA, which has one latent for all heads."""


def cache_shape(attn_backends: Any, *, is_mla: bool) -> tuple[int, ...]:
    """Return the shape of one block of a layer's cache, as the first backend has it; since 0.30 none states it."""
    backends = attn_backends if isinstance(attn_backends, Sequence) else [attn_backends]
    first: Any = backends[0] if backends else None
    if not hasattr(first, "get_kv_cache_shape"):
        return MLA_CACHE_SHAPE if is_mla else CACHE_SHAPE
    return tuple(first.get_kv_cache_shape(num_blocks=1, block_size=16, num_kv_heads=1, head_size=1))


def required_cache_layout(stock: Callable[..., str | None], vllm_config: Any | None) -> str | None:
    """Return the answer of vLLM's ``get_kv_connector_cache_layout``; without a need that is "NHD" before 0.30.

    Before 0.30 that function takes no argument: its configuration is always the current one of the process.
    """
    from vllm.config import set_current_vllm_config

    if vllm_config is None:
        return stock()
    if inspect.signature(stock).parameters:
        return stock(vllm_config)
    with set_current_vllm_config(vllm_config):
        return stock()


def chunks_of(offloading_spec: Any) -> int:
    """Return how many chunks vLLM's ``CPUOffloadingSpec`` keeps in host memory; before 0.29 they were called blocks."""
    spec = offloading_spec
    return int(spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks)


# The configuration


class TransferConfig(BaseModel):
    """The keys of vLLM's ``KVTransferConfig``, 0.27 to 0.33, used if vLLM is not installed."""

    model_config = ConfigDict(extra="forbid")

    kv_connector: str | None = None
    kv_connector_module_path: str | None = None
    engine_id: str | None = None
    kv_role: Literal["kv_producer", "kv_both", "kv_consumer"] | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    kv_buffer_device: str = ""
    kv_buffer_size: float = 1e9
    kv_rank: int | None = None
    kv_parallel_size: int = 1
    kv_ip: str = ""
    kv_port: int = 14579
    enable_permute_local_kv: bool = False
    kv_connector_extra_config: dict[str, Any] = {}


def transfer_config_with(keys: Collection[str]) -> type[BaseModel]:
    """Return ``TransferConfig`` with the keys of one vLLM; keys unknown to kvobs may have any value."""
    known = TransferConfig.model_fields
    fields: dict[str, Any] = {
        key: (known[key].annotation, known[key]) if key in known else (Any, None) for key in sorted(keys)
    }
    return create_model("TransferConfig", __config__=ConfigDict(extra="forbid"), **fields)


RETIRED = ("kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip")
"""The keys that vLLM has before 0.31 only."""


def model_name(vllm_config: Any) -> str:
    """Return the name under which an engine serves its model, the first of several."""
    served = vllm_config.model_config.served_model_name
    return str(served[0] if isinstance(served, list | tuple) else served)


class EnginePosition(NamedTuple):
    """The numbers of an engine: in its data-parallel group, and among the engines of this machine."""

    number: int
    on_host: int


def has_v2_runner(vllm_config: Any) -> bool:
    """Return whether workers use vLLM's V2 model runner, which is the default on GPUs since 0.30."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def engine_position(vllm_config: Any) -> EnginePosition:
    """Return an engine's numbers; with an external launcher each worker has an engine."""
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    if index is None:
        index = parallel.data_parallel_rank
    local = parallel.data_parallel_rank_local
    on_host = index if local is None else local
    if parallel.distributed_executor_backend == "external_launcher":
        on_host = parallel.rank
    return EnginePosition(int(index), int(on_host))


def has_core(vllm_config: Any) -> bool | None:
    """Return whether EngineCore is on this worker's host; None if only Ray, or an executor of others, knows that."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray" or isinstance(parallel.distributed_executor_backend, type):
        return None
    return getattr(parallel, "node_rank_within_dp", 0) == 0  # not before 0.28


def _fields(cls: Any) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(cls))
