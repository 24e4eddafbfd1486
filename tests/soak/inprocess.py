"""The soak in one process: lives of engines of several shapes, one after the other, checked while they run."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.soak import memory
from tests.soak.engine import SHAPES, Engine, Shape
from tests.soak.report import Result

EVERY = 2_000
"""Requests after which the engine goes idle, the metrics are compared, and memory is looked at."""

MOODS = ("down", "hanging", "up")
"""Of the collector, in turns of as many requests."""


def run(
    requests: int, seed: int, show: Callable[[str], None], shapes: Sequence[Shape] = SHAPES, every: int = EVERY
) -> Result:
    """Serve ``requests`` in equal parts by an engine of each shape.

    Raises:
        AssertionError: metrics and ledger differ, or something is left; nothing after that can be trusted.
    """
    result = Result("In process", budget_mib=5)
    begin = time.monotonic()
    gc.collect()
    gc.freeze()  # what is imported already is neither counted nor looked through again and again
    try:
        for i, shape in enumerate(shapes):
            with pytest.MonkeyPatch.context() as patch:
                engine = Engine(f"life{i}", shape, seed + i, patch)
                _live(engine, requests // len(shapes), every, result, show)
            del engine
    finally:
        gc.unfreeze()
    result.seconds = time.monotonic() - begin
    return result


def _live(engine: Engine, requests: int, every: int, result: Result, show: Callable[[str], None]) -> None:
    shape = str(engine.shape)
    before, samples = result.requests, result.memory.setdefault(shape, [])
    types: Counter[str] | None = None
    engine.pin()
    for n, served in enumerate(range(0, requests, every)):
        if engine.shape.traced:
            engine.turn_collector(MOODS[n % len(MOODS)])
        engine.serve(min(every, requests - served))
        differ = engine.differences()
        assert not differ, f"{shape}, seed {engine.seed}, after {engine.added} requests:\n" + "\n".join(differ)
        engine.export_spans()  # or what is held depends on the collector's mood
        samples.append(memory.sample(before + engine.added))
        if types is None and samples[-1].requests >= before + memory.WARM * requests:
            types = memory.types()
        held = samples[-1].resident / memory.MIB
        show(f"{shape}: {min(served + every, requests):,} of {requests:,} requests, {held:,.0f} MiB")
    result.grown_types[shape] = memory.grown(types or Counter(), memory.types())
    engine.close()
    differ = engine.differences()
    assert not differ, f"{shape}, seed {engine.seed}, at the end:\n" + "\n".join(differ)
    result.take(engine.ledger)
