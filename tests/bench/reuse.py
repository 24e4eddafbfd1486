"""What looking up how far back a prompt of 1,000 blocks was used costs, as on the reference machine."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

from kvobs.probe.recorder import Recorder
from kvobs.state.transfers import LookupResult, Offer
from kvobs.telemetry.estimates.reuse import PromptReuse
from kvobs.telemetry.events import TelemetryObserver
from tests.bench.calls import slowness
from tests.bench.report import Budget, Line, Part

BLOCK, BLOCKS = 16, 1000
PROMPTS = 60  # in one timing
ROUNDS = 21
TWO_MISSES = LookupResult([Offer(0, 0, True), Offer(1, 0, True)])
SHARED = {"all new": 0, "half shared": 500, "all but the last blocks shared": 990}


def measure() -> Part:
    lines = [Line(title, "us", _timings(shared), budget=Budget(20)) for title, shared in SHARED.items()]
    floor = Line("nothing but a loop over the hashes of a new one", "us", _timings(0, is_observed=False))
    return Part("A prompt of 1,000 blocks in the reuse distances, thinning included", [*lines, floor])


def _timings(shared: int, *, is_observed: bool = True) -> list[float]:
    reuse = PromptReuse(Recorder(2), TelemetryObserver(), BLOCK, 0)
    systems = [[random.randbytes(32) for _ in range(shared)] for _ in range(20)]
    timings = []
    for of_round in range(ROUNDS + 5):  # the first ones fill the samples
        requests = [_request(f"{of_round}-{i}", random.choice(systems)) for i in range(PROMPTS)]
        begin = time.thread_time_ns()
        for request in requests:
            if is_observed:
                reuse.allocated(request, TWO_MISSES, None, 0)
                reuse.request_ended(request)
            else:
                for _ in request.block_hashes:
                    pass
        timings.append((time.thread_time_ns() - begin) / 1e3 / PROMPTS / slowness())
    return timings[5:]


def _request(request_id: str, system: list[bytes]) -> Any:
    """Return the part of vLLM's request that is read."""
    hashes = system + [random.randbytes(32) for _ in range(BLOCKS - len(system))]
    tokens = BLOCK * BLOCKS + 1
    return SimpleNamespace(request_id=request_id, num_prompt_tokens=tokens, num_tokens=tokens, block_hashes=hashes)
