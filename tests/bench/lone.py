"""What a lone request pays: the time to the first token of requests that come one by one to an engine at rest.

Three servers get the same prompts in turns: kvobs, vLLM's own MultiConnector, and the same once more, for the noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from kvobs.demo.server import Server
from tests.bench.endtoend import CONFIGS, SPIN_S, Say, ask, compare, in_turn, prompt, running
from tests.bench.report import Part

ROUNDS = 20
PROMPTS = 6
TOKENS = 8
REST_S = 0.15
"""Between two requests: more than kvobs's flushes are apart."""
NAMES = ("kvobs", "stock", "stock again")
WAYS = ("loaded", "in vLLM's own cache")
"""Where a prompt's tokens come from: a child, or nowhere."""


def measure(rounds: int, say: Say) -> Part:
    values: dict[str, dict[str, list[float]]] = {way: {name: [] for name in NAMES} for way in WAYS}
    configs = {name: CONFIGS[name] for name in NAMES}
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder, running(Path(folder), configs, say) as servers:
        for server in servers.values():
            for text in TEXTS:
                ask(server, text, TOKENS)
        for number in range(rounds):
            for name in in_turn(NAMES, number):
                for way, first_ms in zip(WAYS, take_turn(servers[name], number), strict=True):
                    values[way][name].append(first_ms)
    return Part(
        "Real servers, a request at a time to an engine at rest; baseline: vLLM's MultiConnector",
        [line for way in WAYS for line in compare(f"first token, {way}", "ms", values[way])],
    )


TEXTS = [prompt("lone", i) for i in range(PROMPTS)]


def take_turn(server: Server, number: int) -> list[float]:
    """Empty vLLM's own cache and ask for each prompt twice; return the median ms to the first token of both times."""
    time.sleep(SPIN_S)
    server.reset_prefix_cache()
    ask(server, prompt("wake", number), 1)
    medians = []
    for _ in WAYS:
        times = []
        for text in TEXTS:
            time.sleep(REST_S)
            times.append(ask(server, text, TOKENS))
        medians.append(statistics.median(times) * 1000)
    return medians
