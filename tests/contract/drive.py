"""Build kvobs's MultiConnector as vLLM's factory does, in both roles, and take requests through all of its hooks."""

import copy
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvobs.demo.model import make_model
from kvobs.export import span_export
from kvobs.schema.signals import VLLM_LABELS

from .members import hooks, parameters

MODULE = "kvobs"
SPAN = "cd" * 8  # of the requests' client
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"  # so that requests are traced
METRICS: Any = ({each: each for each in (Counter, Gauge, Histogram)}, [*VLLM_LABELS], {0: ["tiny", "0"]})
BLOCK_SIZE = 16
REQUEST_TOKENS = 100


def recording_children() -> list[dict[str, Any]]:
    return [
        {"kv_connector": name, "kv_connector_module_path": "tests.contract.recording", "kv_role": "kv_both"}
        for name in ("Loader", "Saver")
    ]


def example_children(scratch: Path) -> list[dict[str, Any]]:
    return [
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(scratch / f"store{i}")},
        }
        for i in (0, 1)
    ]


class Pair:
    """A MultiConnector with these children as vLLM's own factory builds it for the scheduler and for one worker."""

    def __init__(self, scratch: Path, connectors: list[dict[str, Any]], hma: bool = True) -> None:
        self.config = EngineArgs(
            model=str(make_model(scratch)),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=512,
            disable_hybrid_kv_cache_manager=not hma,
            kv_transfer_config=KVTransferConfig(
                kv_connector="MultiConnector",
                kv_connector_module_path=MODULE,
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": connectors},
            ),
        ).create_engine_config()
        self.scheduler = KVConnectorFactory.create_connector(self.config, KVConnectorRole.SCHEDULER, caches())
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, caches())
        self.children = (self.scheduler._connectors, self.worker._connectors)


def caches() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    group = KVCacheGroupSpec(layer_names=["layer.0"], kv_cache_spec=spec)
    return KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=[group])


# --- driving it


class Drive:
    """Calls hooks of a pair, and keeps for each call what came back and which children got it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.calls: list[dict[str, Any]] = []
        self.noted: list[Any] = []  # the stats of each step, worker's and scheduler's in one
        self.aggregator: Any = None

    def __call__(self, side: str, hook: str, *args: Any, when_absent: Any = None) -> Any:
        connector = getattr(self.pair, side)
        if not hasattr(connector, hook):
            return when_absent
        children = self.pair.children[0 if side == "scheduler" else 1]
        for child in children:
            vars(child).get("recorded", []).clear()
        answer = getattr(connector, hook)(*args)
        if inspect.isgenerator(answer):
            answer = list(answer)
        recorded = [[call.hook for call in getattr(child, "recorded", ())] for child in children]
        self.calls.append({"side": side, "hook": hook, "answer": _plain(answer), "recorded": recorded})
        return answer

    def arguments(self, side: str, hook: str) -> list[tuple[Any, ...]]:
        """Return what each recording child was given in its last call of ``hook``."""
        children = self.pair.children[0 if side == "scheduler" else 1]
        return [call.args for child in children for call in child.recorded if call.hook == hook]


def drive(pair: Pair) -> dict[str, Any]:
    """Take two requests through a load, a save and their ends; return the calls and what the scheduler would read."""
    call = Drive(pair)
    seen: dict[str, Any] = {"properties": _properties(pair), "class": on_the_class(pair)}
    seen["signatures"] = {side: _signatures(getattr(pair, side)) for side in ("scheduler", "worker")}
    recording = all(hasattr(child, "recorded") for child in pair.children[0])

    # Start.
    layer = torch.zeros(32, 2, BLOCK_SIZE, 64)
    call("worker", "get_mem_pool_context")
    call("worker", "register_kv_caches", {"layer.0": layer})
    if recording:
        call("worker", "register_cross_layers_kv_cache", layer, None)
    call("worker", "set_host_xfer_buffer_ops", print)
    call("worker", "reset_capture_state")
    handshake = call("worker", "get_handshake_metadata")
    for hook, key in (("set_xfer_handshake_metadata", 0), ("set_xfer_handshake_metadata_pp_aware", (0, 0))):
        if recording:
            call("scheduler", hook, {key: handshake})
            seen[hook] = [[part.child for part in given.values()] for (given,) in call.arguments("scheduler", hook)]
    call("scheduler", "get_finished_count")
    call("scheduler", "bind_kv_cache_manager", SimpleNamespace(block_pool=SimpleNamespace()))
    call("scheduler", "bind_gpu_block_pool", SimpleNamespace())

    # A request that is offered tokens and gets blocks for them.
    request = a_request("r1")
    call("scheduler", "on_new_request", request)
    tokens, _ = call("scheduler", "get_num_new_matched_tokens", request, 0)
    blocks = KVCacheBlocks(([KVCacheBlock(block_id=i) for i in range(1, 8)],))
    if tokens:
        call("scheduler", "get_loaded_kv_cache_group_ids", request)
    call("scheduler", "update_state_after_alloc", request, blocks, tokens)
    if recording:
        seen["allocated"] = [given[2] for given in call.arguments("scheduler", "update_state_after_alloc")]
    call("scheduler", "get_external_cache_hit_sources", request, tokens)
    seen["after load"] = step(call, SchedulerOutput.make_empty())

    # Its end, with what a child promises; then the step in which it reaches the workers.
    call("scheduler", "register_finished_partial_tail", request, ([1, 2],), [])
    seen["finished"] = _plain(call("scheduler", "request_finished_all_groups", request, ([1, 2],)))
    last = SchedulerOutput.make_empty()
    last.finished_req_ids.add("r1")
    seen["after save"] = step(call, last)
    call("scheduler", "request_finished", a_request("r2"), [3])

    # What is asked now and then.
    call("worker", "unregister_kv_caches")
    call("worker", "restore_kv_caches")
    call("scheduler", "reset_cache")
    call("scheduler", "shutdown")
    call("worker", "shutdown")
    seen["noted"] = report(pair, [stats for stats in call.noted if stats is not None])
    seen["aggregator"] = type(call.aggregator).__module__
    return {"calls": call.calls, "seen": seen}


def combine(call: Drive, output: KVConnectorOutput) -> KVConnectorOutput:
    """Put the one worker's output through the aggregator that vLLM's executor would build."""
    if call.aggregator is None:
        executor: Any = SimpleNamespace(parallel_config=call.pair.config.parallel_config)
        Executor.init_kv_output_aggregator(executor, call.pair.scheduler)
        call.aggregator = executor.kv_output_aggregator
    theirs = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
    theirs.kv_connector_output = output
    combined: KVConnectorOutput = call.aggregator.aggregate([theirs], 0).kv_connector_output
    return combined


def step(call: Drive, scheduled: Any) -> dict[str, Any]:
    """Run one engine step without a forward; return what the scheduler reads after the connector has seen it."""
    meta = call("scheduler", "build_connector_meta", scheduled)
    call("worker", "handle_preemptions", meta)
    call("worker", "bind_connector_metadata", meta)
    bound = call("worker", "has_connector_metadata")
    call("worker", "start_load_kv", SimpleNamespace(attn_metadata=None))
    call("worker", "wait_for_layer_load", "layer.0")
    call("worker", "save_kv_layer", "layer.0", None, None)
    call("worker", "finish_forward")
    call("worker", "wait_for_save")
    output = KVConnectorOutput()
    results = call("worker", "get_transfer_results", scheduled.finished_req_ids)
    if results is None:  # vLLM before 0.30
        output.finished_sending, output.finished_recving = call("worker", "get_finished", scheduled.finished_req_ids)
    else:
        output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
        call("worker", "get_finished", set())  # still public, no longer called by vLLM
    output.invalid_block_ids = call("worker", "get_block_ids_with_load_errors")
    output.kv_connector_stats = call("worker", "get_kv_connector_stats")
    output.kv_cache_events = call("worker", "get_kv_connector_kv_cache_events")
    output.kv_connector_worker_meta = call("worker", "build_connector_worker_meta")
    call("worker", "clear_connector_metadata")
    output = combine(call, output)
    call("scheduler", "update_connector_output", output)
    stats, more = output.kv_connector_stats, call("scheduler", "get_kv_connector_stats")
    if stats is not None and more is not None and not more.is_empty():
        stats = stats.aggregate(more)
    call.noted.append(stats)
    call("scheduler", "take_events")
    call("scheduler", "has_pending_block_frees")
    call("scheduler", "has_pending_push_work")
    return {
        "bound": bound,
        "received": sorted(output.finished_recving or ()),
        "sent": sorted(output.finished_sending or ()),
        "still bound": call("worker", "has_connector_metadata"),
    }


def report(pair: Pair, noted: list[Any]) -> dict[str, Any]:
    """Send the stats to the API server as this vLLM does; return what its metrics and its log say then."""
    cls, exported = type(pair.scheduler), InMemorySpanExporter()
    span_export.make_exporter = lambda endpoint: exported
    metrics = cls.build_prom_metrics(pair.config, *METRICS)
    logged: Any = None
    for stats in noted:
        sent = stats.to_dict() if hasattr(stats, "to_dict") and hasattr(KVConnectorStats, "to_dict") else stats.data
        packed = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=sent))
        arrived = MsgpackDecoder(SchedulerStats).decode(packed).kv_connector_stats
        metrics.observe(arrived, 0)
        rebuilt = cls.build_kv_connector_stats(arrived)
        logged = rebuilt if logged is None else logged.aggregate(rebuilt)
    metrics._cutter.close()
    spans = exported.get_finished_spans()
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    return {
        "hits": {s.labels["connector"]: s.value for s in samples if s.name == "kvobs_lookups_total"},
        "loaded": {s.labels["connector"]: s.value for s in samples if s.name == "kvobs_load_tokens_total"},
        "calls": {
            s.labels["connector"]: s.value
            for s in samples
            if s.name == "kvobs_call_duration_seconds_count" and s.labels["hook"] == "build_connector_meta"
        },
        "spans": sorted(s.name for s in spans if s.parent and s.parent.span_id == int(SPAN, 16)),
        "log": logged.reduce() if logged is not None else None,
    }


def on_the_class(pair: Pair) -> dict[str, Any]:
    """Return the answers of the hooks that vLLM asks of the class, without an instance."""

    cls, config = type(pair.scheduler), pair.config
    transfer = config.kv_transfer_config
    questions: dict[str, tuple[Any, ...]] = {
        "requires_piecewise_for_cudagraph": (transfer.kv_connector_extra_config,),
        "supports_sleep_mode": (transfer,),
        "get_required_kvcache_layout": (config,),
        "build_kv_connector_stats": (None,),
        "build_prom_metrics": (config, *METRICS),
    }
    known = hooks()
    return {hook: _plain(getattr(cls, hook)(*arguments)) for hook, arguments in questions.items() if hook in known}


def a_request(request_id: str) -> Any:
    """Return vLLM's own request object."""
    headers = {"traceparent": f"00-{'ab' * 16}-{SPAN}-01"}
    return Request(request_id, list(range(REQUEST_TOKENS)), SamplingParams(max_tokens=1), None, trace_headers=headers)


def _properties(pair: Pair) -> dict[str, list[Any]]:
    names = [name for name, hook in hooks().items() if hook["kind"] == "property"]
    return {name: [_plain(getattr(side, name)) for side in (pair.scheduler, pair.worker)] for name in names}


def _signatures(connector: Any) -> dict[str, Any]:
    """Return the parameters that the connector's own hooks take, as seen from outside: on the object, not the class."""
    return {name: parameters(getattr(connector, name)) for name, hook in hooks().items() if hook["kind"] != "property"}


def _plain(value: Any) -> Any:
    """Return what JSON can hold as it is, and the name of its type for the rest."""
    if isinstance(value, tuple | list | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
