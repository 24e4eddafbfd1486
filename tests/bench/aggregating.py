"""What combining the workers' outputs costs the scheduler's process: kvobs's aggregator and vLLM's own, in turns."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector import utils as stock
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.aggregation.aggregator import KVOutputAggregator
from tests.bench.report import Budget, Line, Part, against_stock

AGGREGATORS: dict[str, type[Any]] = {"stock": stock.KVOutputAggregator, "kvobs": KVOutputAggregator}


class Case(NamedTuple):
    """Steps in which every rank reports the same requests, or half the ranks in each of two steps."""

    ranks: int
    finished: int
    in_halves: bool = False
    budget: Budget | None = None
    repeats: int = 1  # how often in one timing
    rounds: int = 41


CASES = {
    "8 ranks, nothing finished": Case(8, 0, repeats=200),
    "8 ranks, 100 finished": Case(8, 100, repeats=10),
    "8 ranks, 1000 finished": Case(8, 1000, budget=Budget(1.0)),
    "64 ranks, 1000 finished": Case(64, 1000, budget=Budget(1.0), rounds=21),
    "8 ranks, 1000 finished, half the ranks a step later": Case(8, 1000, in_halves=True),
}


def measure() -> Part:
    lines = [_compare(title, case) for title, case in CASES.items()]
    return Part("Combining the workers' outputs of a step, CPU time; baseline: vLLM's own", lines)


def _compare(title: str, case: Case) -> Line:
    steps = _pickled(case)

    def timed(aggregator: Any) -> Callable[[], float]:
        def us() -> float:
            outputs = [[pickle.loads(output) for output in step] for _ in range(case.repeats) for step in steps]
            begin = time.thread_time_ns()
            for step in outputs:
                aggregator.aggregate(step)
            return (time.thread_time_ns() - begin) / 1e3 / case.repeats

        return us

    routers = {name: timed(cls(case.ranks)) for name, cls in AGGREGATORS.items()}
    return against_stock(title, "us", routers, case.rounds, case.budget)


def _pickled(case: Case) -> list[list[bytes]]:
    """Return what each rank says, step by step; pickled on its own, as every worker has its own copies of the ids."""
    requests = {f"chatcmpl-{i:032x}" for i in range(case.finished)}
    half = case.ranks // 2
    speaking = [range(half), range(half, case.ranks)] if case.in_halves else [range(case.ranks)]
    return [[_said(requests if rank in ranks else set()) for rank in range(case.ranks)] for ranks in speaking]


def _said(requests: set[str]) -> bytes:
    output = KVConnectorOutput(finished_recving=set(requests) or None)
    return pickle.dumps(ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output))
