"""What comparing loaded blocks costs: on the scheduler's side by prompt, on a rank by step, where a CPU reads them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kvobs.probe.recorder import Recorder
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.transfers import NO_RESULT
from kvobs.telemetry.verify.fingerprints import Fingerprints
from kvobs.telemetry.verify.sample import BlockSample
from kvobs.telemetry.verify.verifier import Verifier
from tests.bench.calls import slowness
from tests.bench.report import Budget, Line, Part
from tests.bench.reuse import BLOCK, BLOCKS, PROMPTS, ROUNDS, _request
from tests.support.layers import layers_of

SHARES = (0.01, 1.0)
PAGES, PAGE = 600, (2, BLOCK, 8, 128)  # of a layer; K and V, heads, head size: 64 KiB in bfloat16
LAYERS = 32


def measure() -> Part:
    lines = [
        Line(f"scheduler, a prompt of {BLOCKS:,} blocks, share {share:g}", "us", _prompts(share), budget=budget)
        for share, budget in zip(SHARES, (Budget(60), None), strict=True)
    ]
    rank = _rank()
    for share in SHARES:
        blocks = _computed(share)
        title = f"rank, the step that computes these, share {share:g}: {len(blocks)} blocks"
        lines.append(Line(title, "us", _timed(partial(rank, share, blocks), 1)))
    lines.append(Line("rank, a step without sampled blocks", "us", _timed(partial(rank, 1.0, ()), 1000)))
    return Part("Verified blocks: a 32-layer model, 2 MiB a block, read by a CPU", lines)


def _prompts(share: float) -> list[float]:
    sample = BlockSample(share, CacheLayout((BLOCK,)), BLOCK)
    number = iter(range(10**9))

    def one() -> None:
        for request in [_request(f"{next(number)}", []) for _ in range(PROMPTS)]:
            begin = time.thread_time_ns()
            sample.allocated(request, NO_RESULT, None, 0)
            sample.orders_of(_output(request))
            sample.request_ended(request)
            spent.append(time.thread_time_ns() - begin)

    timings = []
    for _ in range(ROUNDS):
        spent: list[int] = []
        one()
        timings.append(sum(spent) / 1e3 / PROMPTS / slowness())
    return timings


def _output(request: Any) -> Any:
    new = SimpleNamespace(req_id=request.request_id, block_ids=[list(range(1, BLOCKS + 2))], num_computed_tokens=0)
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    scheduled = {request.request_id: request.num_prompt_tokens}
    return SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=nothing, num_scheduled_tokens=scheduled)


def _computed(share: float) -> Any:
    """Return the orders of a step that computes half of a prompt, 8,000 tokens."""
    sample, request = BlockSample(share, CacheLayout((BLOCK,)), BLOCK), _request("a", [])
    request.num_prompt_tokens = BLOCK * BLOCKS // 2
    sample.allocated(request, NO_RESULT, None, 0)
    orders = sample.orders_of(_output(request))
    return orders.noted if orders is not None else ()


def _rank() -> Callable[[float, Any], None]:
    caches = [torch.randn((PAGES, *PAGE)).to(torch.bfloat16)] * LAYERS
    layers = layers_of(*caches, blocks=PAGES)
    ranks = {share: Verifier(["one"], 0, Recorder(1), Fingerprints(layers, reads_all=share >= 1)) for share in SHARES}

    def step(share: float, blocks: Any) -> None:
        orders = SimpleNamespace(noted=blocks, loads=()) if blocks else None
        ranks[share].step_begun(orders)  # type: ignore[arg-type]
        ranks[share].step_ended()

    return step


def _timed(call: Callable[[], None], times: int) -> list[float]:
    timings = []
    for _ in range(5):
        begin = time.thread_time_ns()
        for _ in range(times):
            call()
        timings.append((time.thread_time_ns() - begin) / 1e3 / times / slowness())
    return timings
