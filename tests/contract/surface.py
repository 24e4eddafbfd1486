"""Compare kvobs's public surface with that of the vLLM on the path: members, and answers to the same questions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import kvobs
from kvobs import topology
from kvobs.aggregation import aggregator
from kvobs.export import prometheus
from kvobs.routing import metadata
from kvobs.telemetry.payload import stats
from kvobs.testing import cache_config, engine_config

from . import members

OURS = {
    "MultiConnector": kvobs.MultiConnector,
    "MultiKVConnectorMetadata": metadata.MultiKVConnectorMetadata,
    "MultiKVConnectorWorkerMetadata": metadata.MultiKVConnectorWorkerMetadata,
    "MultiKVConnectorStats": stats.MultiKVConnectorStats,
    "MultiKVConnectorPromMetrics": prometheus.MultiKVConnectorPromMetrics,
}
"""Name in vLLM's module of its MultiConnector -> kvobs's class."""

Answers = dict[str, Any]
Sizes = tuple[int, int, int, int, int, bool]


def compared() -> dict[str, Any]:
    """Return where kvobs's public surface is not that of the vLLM on the path."""
    return {
        "not subclasses": [name for name, ours in OURS.items() if not issubclass(ours, getattr(stock, name))],
        "members": {
            ours.__name__: _compared(theirs, ours)
            for theirs, ours in (
                (stock.MultiConnector, kvobs.MultiConnector),
                (stock.MultiKVConnectorPromMetrics, prometheus.MultiKVConnectorPromMetrics),
                (utils.KVOutputAggregator, aggregator.KVOutputAggregator),
                (utils.TransferTopology, topology.TransferTopology),
            )
        },
        "children": _report(_children()),
        "topology": _report(_topologies()),
        "aggregator": aggregator.obstacle(),
    }


def _compared(theirs: type, ours: type) -> dict[str, list[str]]:
    """Return the public members that only one of the classes has."""
    their_names, our_names = ({n for n in dir(cls) if not n.startswith("_")} for cls in (theirs, ours))
    return {"missing": sorted(their_names - our_names), "more": sorted(our_names - their_names)}


def _report(cases: Iterator[tuple[str, Answers, Answers]]) -> dict[str, Any]:
    """Return how many answers were compared, and those that differ."""
    compared, differ = 0, []
    for case, theirs, ours in cases:
        compared += len(theirs)
        differ += [
            f"{case}: {what} is {theirs.get(what)!r} in vLLM and {ours.get(what)!r} in kvobs"
            for what in sorted(theirs.keys() | ours.keys())
            if theirs.get(what) != ours.get(what)
        ]
    return {"compared": compared, "differ": differ}


def _answer(ask: Callable[[], Any]) -> Any:
    """Return an answer, or the kind of error in its place."""
    try:
        return ask()
    except Exception as error:
        # What does not fit is an AssertionError in vLLM and a ValueError in kvobs.
        return "refused" if isinstance(error, AssertionError | ValueError) else type(error).__name__


# --- MultiConnector around children of all kinds, each of which answers one question in its own way

_NEEDED = dict.fromkeys(KVConnectorBase_V1.__abstractmethods__, lambda *_, **__: None)

NoHma: Any = type("NoHma", (KVConnectorBase_V1,), _NEEDED)
"""Says what vLLM's base class says, and doesn't support the hybrid memory allocator."""

Plain: Any = type("Plain", (NoHma, SupportsHMA), {"request_finished_all_groups": lambda *_: (False, None)})
"""The same with support for it."""

Divergent: Any = type("Divergent", (Plain,), {"supports_divergent_local_hybrid_hits": property(lambda _: True)})
CrossLayer: Any = type("CrossLayer", (Plain,), {"prefer_cross_layer_blocks": property(lambda _: True)})
BestEffort: Any = type("BestEffort", (Plain,), {"requires_kv_delivery": property(lambda _: False)})
Hnd: Any = type("Hnd", (Plain,), {"get_required_kvcache_layout": classmethod(lambda *_: "HND")})


class Piecewise(Plain):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("piecewise", True))


class Sleeper(Plain):
    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return kv_transfer_config.kv_role == "kv_both" and kv_transfer_config.engine_id is not None


class Nhd(Plain):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return "NHD" if vllm_config.kv_transfer_config.kv_connector == "Nhd" else None


KINDS = ("Plain", "Divergent", "CrossLayer", "BestEffort", "Piecewise", "Sleeper", "Hnd", "Nhd", "NoHma")


def _children() -> Iterator[tuple[str, Answers, Answers]]:
    for names in itertools.chain(itertools.product(KINDS), itertools.product(KINDS, repeat=2)):
        connectors = [
            {
                "kv_connector": name,
                "kv_connector_module_path": __name__,
                "kv_role": "kv_consumer" if name == "BestEffort" else "kv_both",
                "kv_connector_extra_config": {"piecewise": i == 0},
            }
            for i, name in enumerate(names)
        ]
        theirs, ours = (_of_router(module, connectors) for module in (stock.__name__, "kvobs"))
        yield " + ".join(names), theirs, ours


def _of_router(module: str, connectors: list[dict[str, Any]]) -> Answers:
    """Ask one router's class and its instances of both roles everything that vLLM asks about what children can do."""
    router = {"kv_connector": "MultiConnector", "kv_connector_module_path": module, "kv_role": "kv_both"}
    transfer = KVTransferConfig(**router, engine_id="engine", kv_connector_extra_config={"connectors": connectors})
    config = engine_config(transfer)
    cls = KVConnectorFactory.get_connector_class(transfer)
    answers: Answers = {
        "supports_hma_config": _answer(lambda: KVConnectorFactory.supports_hma_config(transfer)),
        "all_children_support_hma": _answer(lambda: cls.all_children_support_hma(transfer)),
        "the layout that the helper says": _answer(lambda: _layout(config, module)),
    }
    questions: dict[str, tuple[Any, ...]] = {
        "requires_piecewise_for_cudagraph": (transfer.kv_connector_extra_config,),
        "supports_sleep_mode": (transfer,),
        "get_required_kvcache_layout": (config,),
    }
    for name, arguments in questions.items():
        if hasattr(cls, name):
            answers[name] = _answer(lambda name=name, arguments=arguments: getattr(cls, name)(*arguments))  # type: ignore[misc]
    config.scheduler_config.disable_hybrid_kv_cache_manager = not answers["all_children_support_hma"]
    for role in KVConnectorRole:
        answers |= {f"{role.name} {what}": answer for what, answer in _of_instance(cls, config, role).items()}
    return answers


def _layout(config: Any, module: str) -> Any:
    helper = kvobs.get_kv_connector_cache_layout if module == "kvobs" else utils.get_kv_connector_cache_layout
    with set_current_vllm_config(config):
        return helper()


def _of_instance(cls: Any, config: Any, role: KVConnectorRole) -> Answers:
    connector = cls(config, role, cache_config())
    properties = [name for name, hook in members.hooks().items() if hook["kind"] == "property" and name != "role"]
    answers = {name: _answer(lambda name=name: getattr(connector, name)) for name in properties}  # type: ignore[misc]
    answers["children"] = [type(child).__name__ for child in connector._connectors]
    answers["has sub_connectors"] = getattr(connector, "sub_connectors", None) == connector._connectors
    answers["_all_support_hma"] = connector._all_support_hma
    return answers


# --- TransferTopology


def _topologies() -> Iterator[tuple[str, Answers, Answers]]:
    for tp, remote_tp, heads, dcp, remote_dcp, is_mla in itertools.product(
        (1, 2, 3, 4, 8), (1, 2, 3, 4, 8), (1, 2, 8), (1, 2, 4), (1, 2, 4), (False, True)
    ):
        if (dcp, remote_dcp) != (1, 1) and not (is_mla and dcp in (1, tp) and remote_dcp in (1, remote_tp)):
            continue
        if (dcp, remote_dcp) != (1, 1) and "dcp_size" not in utils.TransferTopology.__dataclass_fields__:
            continue
        for rank in range(tp):
            sizes = (tp, remote_tp, heads, dcp, remote_dcp, is_mla)
            theirs, ours = (
                _of_topology(cls, rank, sizes) for cls in (utils.TransferTopology, topology.TransferTopology)
            )
            yield f"rank {rank} of {sizes}", theirs, {what: ours[what] for what in ours if what in theirs}


class _Backend:
    """An attention backend as vLLM 0.28 has them: it says its cache's shape, blocks first."""

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size


def _of_topology(cls: Any, rank: int, sizes: Sizes) -> Answers:
    tp, remote_tp, heads, dcp, remote_dcp, is_mla = sizes
    shared = {"dcp_size": dcp} if dcp > 1 else {}
    fixed = {"block_size": 32, "engine_id": "local", "is_mamba": False, "attn_backends": [_Backend]}
    made = cls(tp_rank=rank, tp_size=tp, is_mla=is_mla, total_num_kv_heads=heads, **fixed, **shared)
    remote = {"remote_pp_rank": 1, "remote_block_len": 64, "remote_block_size": 16}
    far = SimpleNamespace(remote_tp_size=remote_tp, remote_dcp_size=remote_dcp, **remote)
    with_dcp = (remote_tp, remote_dcp) if hasattr(made, "dcp_rank") else (remote_tp,)
    calls: dict[str, Callable[[], Any]] = {
        "register_remote_engine": lambda: made.register_remote_engine("far", far) is far,
        "register_remote_engine, the local one": lambda: made.register_remote_engine("local", far),
        "get_engine_info": lambda: made.get_engine_info("far", 1) is far,
        "get_engine_info, another stage": lambda: made.get_engine_info("far", 0),
        "tp_ratio": lambda: made.tp_ratio(remote_tp),
        "block_size_ratio": lambda: made.block_size_ratio(16),
        "block_size_ratio, too large": lambda: made.block_size_ratio(64),
        "is_kv_replicated": lambda: made.is_kv_replicated("far", 1),
        "replicates_kv_cache": lambda: made.replicates_kv_cache("far", 1),
        "local_replicates_kv_cache": lambda: made.local_replicates_kv_cache,
        "local_physical_heads": lambda: made.local_physical_heads,
        "handshake_target_ranks": lambda: made.handshake_target_ranks(*with_dcp),
        "target_remote_ranks": lambda: made.target_remote_ranks("far", 1),
        "describe": lambda: f"remote_tp={remote_tp}" in made.describe("far", 1),
        "unregister_remote_engine": lambda: made.unregister_remote_engine("far"),
        "get_engine_info, gone": lambda: made.get_engine_info("far", 1),
    }
    for name in ("dcp_rank", "cross_layers_blocks", "virtually_split_kv_in_blocks"):
        if hasattr(utils.TransferTopology, name):
            calls[name] = lambda name=name: getattr(made, name)  # type: ignore[misc]
    for name in ("dcp_source_ranks", "dcp_consumer_count"):
        if hasattr(utils.TransferTopology, name):
            calls[name] = lambda name=name: getattr(made, name)(remote_tp, remote_dcp)  # type: ignore[misc]
    return {what: _answer(call) for what, call in calls.items()}
