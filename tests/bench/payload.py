"""What it costs to ship the numbers: the payload's size, its merging over ranks, its way into Prometheus.

Times are as on the reference machine.
"""

from __future__ import annotations

import copy
import pickle
import random
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvobs.probe.recorder import Recorder
from kvobs.schema.config import RESERVED_NAME
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats
from kvobs.testing import Script
from tests.bench.calls import CHILDREN, slowness
from tests.bench.report import Budget, Line, Part
from tests.support.front import Front
from tests.support.rig import child_config

RANKS = 8
ROUNDS = 200
STEPS = 200  # of 5 ms, between two flushes
LAYERS = 80
HOOKS = (
    "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_layer_load", "save_kv_layer",
    "wait_for_save", "get_transfer_results", "get_block_ids_with_load_errors", "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip

NAMES = tuple(f"Connector-{i}" for i in range(CHILDREN))
CLASS = "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector:NixlConnector"

T = TypeVar("T")


def recorded(seed: int) -> Recorder:
    """Return a worker's recorder after the steps between two flushes: 12 hooks of 3 children, times as they scatter."""
    rng = random.Random(seed)
    recorder = Recorder(CHILDREN)
    for child in range(CHILDREN):
        for hook in HOOKS:
            calls = STEPS * (LAYERS if hook in ("wait_for_layer_load", "save_kv_layer") else 1)
            for _ in range(calls):
                recorder.add_call(child, hook, 0, int(rng.lognormvariate(9, 0.6)))  # 8 us, and 32 us at p99
    return recorder


def payload(seed: int) -> MultiKVConnectorStats:
    taken = recorded(seed).take()
    return MultiKVConnectorStats(data={RESERVED_NAME: KvobsStats.of(dict.fromkeys(NAMES, CLASS), taken)})


def measure(rounds: int = ROUNDS) -> Part:
    """Measure all of it; CPU time, medians over the rounds."""
    ranks = [payload(seed) for seed in range(RANKS)]
    sizes = [len(pickle.dumps(stats)) for stats in ranks]
    merged = copy.deepcopy(ranks[0])
    for other in ranks[1:]:
        merged.aggregate(other)
    wire = msgspec.msgpack.encode(merged.to_dict())
    front = Front(*(child_config(Script(f"bench{i}")) for i in range(CHILDREN)), names=list(NAMES))

    def merge(parts: list[MultiKVConnectorStats]) -> None:
        for other in parts[1:]:
            parts[0].aggregate(other)
        parts[0].to_dict()

    return Part(
        "Shipping a second of numbers: 3 connectors x 12 hooks",
        [
            Line("one worker's payload, pickled", "bytes", sizes, budget=Budget(1024)),
            _timed("taking it in a worker", rounds, lambda recorder: recorder.take(), lambda: recorded(1), None),
            _timed(f"merging {RANKS} ranks", rounds, merge, lambda: copy.deepcopy(ranks), Budget(60)),
            _timed("applying it in the API server", rounds, front.metrics.observe,
                   lambda: msgspec.msgpack.decode(wire), Budget(100)),
        ],
    )  # fmt: skip


def _timed(
    title: str, rounds: int, call: Callable[[T], object], prepare: Callable[[], T], budget: Budget | None
) -> Line:
    times = []
    for _ in range(rounds):
        argument = prepare()
        begin = time.thread_time_ns()
        call(argument)
        times.append((time.thread_time_ns() - begin) / 1e3 / slowness())
    return Line(title, "us", times, budget=budget)
