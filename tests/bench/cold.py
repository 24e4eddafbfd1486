"""What routing and recording add to a whole step of an engine that has something else in its caches.

vLLM's real scheduler, one worker and what passes between them, without a model; CPU time, vLLM's own MultiConnector and
kvobs in turns. All of it runs once a step, so that the caches are cold: between two steps they are filled with other
things, as a model's Python and its data do.
"""

from __future__ import annotations

import json
import random
import time

from kvobs.testing import BLOCK, Rig
from tests.bench.calls import CHILDREN, busy_rig, slowness
from tests.bench.report import Budget, Line, Part

STEPS = 20
ROUNDS = 30
OTHER_THINGS = json.dumps([{f"key {i} {j}": [i, j / 3, str(j)] for j in range(12)} for i in range(700)])


def measure(rounds: int = ROUNDS) -> Part:
    added: dict[bool, list[float]] = {False: [], True: []}  # whether the step has a flush
    steps = []
    for _ in range(rounds):
        rigs = {router: started(router) for router in ("stock", "kvobs")}
        for _ in range(STEPS):
            spent = {router: step_us(rigs[router]) for router in random.sample(sorted(rigs), len(rigs))}
            output = rigs["kvobs"].output
            assert output is not None
            added[output.kv_connector_stats is not None].append(spent["kvobs"] - spent["stock"])
            steps.append(spent["stock"])
    title = f"added by {CHILDREN} connectors, of which no step hook is empty"
    return Part(
        "A decode step, scheduler and worker, cold caches, as on the reference machine",
        [
            Line("the same with vLLM's own", "us", steps),
            Line(title, "us", added[False], budget=Budget(50)),
            Line("the same with a flush, ten times a second", "us", added[True]),
        ],
    )


def started(router: str) -> Rig:
    """Return an engine with one request, past its prompt."""
    rig = busy_rig(router)
    rig.add("r", tokens=BLOCK, max_tokens=STEPS + 5)
    rig.run(3)
    return rig


def step_us(rig: Rig) -> float:
    json.loads(OTHER_THINGS)
    begin = time.thread_time_ns()
    rig.step()
    return (time.thread_time_ns() - begin) / 1e3 / slowness()
