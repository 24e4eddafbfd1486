"""Real engines with two steered connectors whose lookups are recorded, to be replayed under other settings."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvobs.cli.timeline import recordings
from kvobs.cli.whatif.comparison import Comparison, compare
from kvobs.cli.whatif.history import History, histories
from kvobs.cli.whatif.replay import Settings
from kvobs.demo.run import multi_connector
from kvobs.demo.server import Server
from kvobs.options import Options
from tests.engine.serving import of_tests, serve

NEAR, FAR = "near", "far"
BLOCK, TOKENS = 32, 4
WARM_UP, REQUESTS = 30, 60
LEAST, MOST = 300, 1900
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Other:
    """Settings to predict, and then to run with: options of kvobs, and the order of the connectors."""

    options: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = (NEAR, FAR)


OTHERS = {
    "policy longest": Other({"load_policy": "longest"}),
    "far before near": Other(order=(FAR, NEAR)),
    "far only": Other(order=(FAR,)),
    "lookup timeout 10 ms": Other({"lookup_timeout_ms": 10.0}),
    "minimum of near 300": Other({"min_tokens": {NEAR: 300}}),
    "policy fastest": Other({"load_policy": "fastest"}),
}


def steered(i: int, tokens: int) -> dict[str, Any]:
    """Return what both connectors offer for a request: few tokens soon, or many later; some answer late, or nothing."""
    near = 0 if i % 3 == 0 else 256
    far = 0 if i % 4 == 0 else tokens * 3 // 4 // BLOCK * BLOCK
    return {
        NEAR: {"offer": near, "async": True, "load_ms": 8 + 0.01 * near, "not_yet_ms": 30 if i % 6 == 1 else 0},
        FAR: {"offer": far, "async": True, "load_ms": 15 + 0.04 * far},
    }


def prompt(use: str, i: int) -> str:
    rng = random.Random(f"{use} {i}")
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=rng.randint(LEAST, MOST)))


def record(model: Path, folder: Path, other: Other, at_once: int) -> History:
    """Run an engine under these settings, and return what it recorded of the requests after the first ones."""
    folder.mkdir()
    children = {name: of_tests("SteeredChild", tag=name) for name in (NEAR, FAR)}
    config = multi_connector(*(children[name] for name in other.order), names=other.order)
    config["kv_connector_extra_config"]["kvobs"] |= {"timeline": {"dir": str(folder / "rings")}, **other.options}
    with serve(model, folder, config) as server:
        for i in range(WARM_UP):
            server.complete(prompt("warm-up", i), TOKENS)
        begin_ns = time.time_ns()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda i: _ask(server, i), range(REQUESTS)))
    (history,) = histories(recordings.load(folder / "rings"))
    return replace(history, lookups=[one for one in history.lookups if one.began_ns >= begin_ns])


def _ask(server: Server, i: int) -> None:
    text = prompt("whatif", i)
    server.complete(text, TOKENS, kv_transfer_params={"steer": steered(i, len(text))})


def compared(history: History, other: Other) -> Comparison:
    """Compare a recorded run with what it would have been under these settings."""
    return compare([history], [Settings(other.order, Options(**{**history.settings, **other.options}))])
