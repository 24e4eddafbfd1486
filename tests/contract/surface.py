"""Compare kvobs's public surface with that of the vLLM on the path: members, and answers to the same questions."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector as stock
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

import kvobs
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
            )
        },
        "connectors": _report(_connectors()),
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


def _connectors() -> Iterator[tuple[str, Answers, Answers]]:
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
    """Ask one router's class and its instances of both roles everything that vLLM asks about what connectors can do."""
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
    answers["connectors"] = [type(sub_connector).__name__ for sub_connector in connector._connectors]
    answers["has sub_connectors"] = getattr(connector, "sub_connectors", None) == connector._connectors
    answers["_all_support_hma"] = connector._all_support_hma
    return answers
