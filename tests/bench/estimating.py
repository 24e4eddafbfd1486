"""What a step pays for the estimate of what computing costs: noting its work and its time, and learning from it."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

from kvobs.routing.gains import Gains, StepLimits
from kvobs.state.transfer_listener import TransferListener
from kvobs.telemetry.recording.recorder import Recorder, wall_ns
from tests.bench.calls import timer
from tests.bench.report import Line, Part
from tests.bench.yardstick import scaled

ROUNDS = 15
STEPS = 1000
LIMIT_US = 5
PROMPT = 512

CASES = {"1 decode": (1, 0), "16 decodes": (16, 0), "16 decodes and a prefill": (16, 1), "256 decodes": (256, 0)}
"""Requests in a step: how many decode, and how many compute their prompt."""


def measure() -> Part:
    lines = []
    for title, (decodes, prefills) in CASES.items():
        gains = Gains(Recorder(1), TransferListener(), StepLimits(2048, 1))
        timed = timer(
            "begun(output, now(), loads=False); ended()",
            begun=gains.step_begun,
            ended=gains.step_ended,
            now=wall_ns,
            output=scheduled(decodes, prefills),
        )
        times = tuple(timed.timeit(STEPS) / STEPS / 1e3 for _ in range(ROUNDS))
        lines.append(Line(title, "us", statistics.median(times), times, budget=scaled(LIMIT_US)))
    return Part("The estimate of what computing costs, CPU time a step", lines)


def scheduled(decodes: int, prefills: int) -> Any:
    """Return what the estimate reads of a scheduler's output."""
    decoding, new = [f"d{i}" for i in range(decodes)], [f"n{i}" for i in range(prefills)]
    tokens = dict.fromkeys(decoding, 1) | dict.fromkeys(new, PROMPT)
    return SimpleNamespace(
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_encoder_inputs={},
        scheduled_new_reqs=[SimpleNamespace(req_id=request, num_computed_tokens=0) for request in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=decoding, num_computed_tokens=[*range(1000, 1000 + decodes)], num_output_tokens=[5] * decodes
        ),
    )
