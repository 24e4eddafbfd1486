"""What kvobs costs a user: tokens/s and the time to the first token of real servers.

Servers stay up and get the same load in turns: kvobs, the same with verified loads, vLLM's own MultiConnector, the same
once more, and one without a connector. How far the two that are the same come out apart is the noise of this machine,
and the budget.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.model import NAME, make_model
from kvobs.testing.server import HOST, Server, ServerError, cores, group_members
from kvobs.vllm_api.proc import stat
from tests.bench.report import Budget, Line, Part
from tests.engine.serving import importing_tests
from tests.support.affinity import keeping_off, set_affinity

ROUNDS = 12
WARM_UP = 2
"""Rounds before those that count: what they ask is what the first of those finds again."""

CONNECTORS = [host_memory(2**28), host_memory(2**28)]
STOCK = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": CONNECTORS},
}
KVOBS = multi_connector(*CONNECTORS, names=["near", "far"])


def verifying(share: float) -> dict[str, Any]:
    extra = KVOBS["kv_connector_extra_config"]
    return KVOBS | {
        "kv_connector_extra_config": extra | {"kvobs": extra["kvobs"] | {"verify": {"sample_ratio": share}}}
    }


VERIFY = "verify 0.01 against kvobs"
CONFIGS = {
    "kvobs": KVOBS,
    VERIFY: verifying(0.01),
    "verify 1 against kvobs": verifying(1.0),
    "stock": STOCK,
    "stock again": STOCK,
    "no connector": None,
}

ALONE, TOGETHER = 36, 60
"""Requests of a turn: one after the other for the time to the first token, then several at once for tokens/s."""
AT_ONCE = 6
PROMPT_TOKENS, ANSWER_TOKENS = 240, 24
SPIN_S = 1.2
"""A vLLM worker spins for a second after its last step; only then is the core free for the next server's."""

MORE_IS_BETTER = "tok/s"
METRICS = {
    "tokens_per_s": ("tokens/s", MORE_IS_BETTER),
    "first_p50": ("first token, p50", "ms"),
    "first_p95": ("first token, p95", "ms"),
}
"""What a turn measures: title and unit."""

Say = Callable[[str], None]


class Turn(NamedTuple):
    """What one server did in one turn."""

    tokens_per_s: float
    first_p50: float
    first_p95: float
    """Milliseconds to the first token."""


def measure(rounds: int, say: Say) -> Part:
    """Load all servers in turns, and compare each with stock round by round."""
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder, running(Path(folder), CONFIGS, say) as servers:
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        begin = time.monotonic()
        for number in range(WARM_UP + rounds):
            for name in in_turn(list(servers), number):
                turns[name].append(take_turn(servers[name], number))
            if number == WARM_UP:
                seconds = (time.monotonic() - begin) / (number + 1) * (rounds - 1)
                say(f"{rounds} rounds, about {seconds:.0f} s more")
        check_hits(servers)
    return Part(
        "Real servers, two OffloadingConnectors; baseline: vLLM's MultiConnector",
        lines({name: all_turns[WARM_UP:] for name, all_turns in turns.items()}),
    )


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: every name is at every place once, and next to others on the way back."""
    shift = number // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


@contextmanager
def running(
    folder: Path, configs: Mapping[str, dict[str, Any] | None], say: Say, args: Sequence[str] = ()
) -> Iterator[dict[str, Server]]:
    """Run all servers, started at once; the workers share one core, all other processes and we have the others."""
    model = make_model(folder / "model")
    servers = {}
    for name, config in configs.items():
        env = {**importing_tests(), "OTEL_SERVICE_NAME": name}
        servers[name] = Server(model, folder / f"{name}.log", config, args=args, env=env)
    say(f"{len(servers)} servers start, a minute or two")
    # A server ends with the thread that started it: the pool outlives the servers.
    with ThreadPoolExecutor(len(servers)) as starters, ExitStack() as stack:
        list(starters.map(stack.enter_context, servers.values()))
        stack.enter_context(keeping_off(cores(1)[0]))
        for server in servers.values():
            keep_off_too(server)
        yield servers


def keep_off_too(server: Server) -> None:
    """Keep a server, but its worker, where we are: off the worker's core."""
    assert server.process
    for pid in group_members(server.process.pid):
        if "Worker" not in stat(pid)[0]:
            set_affinity(pid, os.sched_getaffinity(0))


def check_hits(servers: dict[str, Server]) -> None:
    """Raise `ServerError` unless every server with a connector has loaded about two prompts in three."""
    for name, server in servers.items():
        values = {sample.name: sample.value for sample in server.metrics()}
        queries, hits = (values.get(f"vllm:external_prefix_cache_{what}_total", 0) for what in ("queries", "hits"))
        if CONFIGS[name] and hits < queries / 3:
            raise ServerError(f"{name}: {hits:.0f} of {queries:.0f} tokens were hits; loads were hardly measured.")


def take_turn(server: Server, number: int) -> Turn:
    """Empty vLLM's own cache, so that prompts of earlier turns are loaded from the connectors; load the server."""
    time.sleep(SPIN_S)
    server.reset_prefix_cache()
    for text in prompts("wake", number, 3):
        ask(server, text, 1)
    first = [ask(server, text, 1) for text in prompts("alone", number, ALONE)]
    lengths = [random.Random(i).randint(ANSWER_TOKENS // 2, ANSWER_TOKENS * 3 // 2) for i in range(TOGETHER)]
    texts = prompts("together", number, TOGETHER)
    begin = time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, [server] * TOGETHER, texts, lengths))
    seconds = time.perf_counter() - begin
    twentieths = statistics.quantiles(first, n=20)
    return Turn(sum(lengths) / seconds, twentieths[9] * 1000, twentieths[18] * 1000)


def prompts(use: str, number: int, count: int) -> list[str]:
    """Return a turn's prompts, mixed: a third is new, the others were new in the two turns before."""
    texts = [prompt(use, number - age, i) for age in range(3) for i in range(count // 3)]
    random.Random(number).shuffle(texts)
    return texts


def prompt(*parts: object) -> str:
    """Return a text that depends on the parts; each character is a token."""
    return "".join(random.Random(repr(parts)).choices("abcdefghijklmnopqrstuvwxyz ", k=PROMPT_TOKENS))


def ask(server: Server, text: str, tokens: int, **more: Any) -> float:
    """Have a prompt completed; return the seconds to the first token."""
    begin = time.perf_counter()
    with completing(server, text, tokens, **more) as answer:
        first = answer.readline()
        seconds = time.perf_counter() - begin
        check_end(first + answer.read())
    return seconds


@contextmanager
def completing(
    server: Server, text: str, tokens: int, headers: Mapping[str, str] | None = None, **more: Any
) -> Iterator[HTTPResponse]:
    """Have a prompt completed, as a stream."""
    body = {"model": NAME, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json", **(headers or {})}
    with closing(HTTPConnection(HOST, server.port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body | more), headers)
        yield connection.getresponse()


def check_end(answer: bytes) -> None:
    if not answer.rstrip().endswith(b"[DONE]"):
        raise ServerError(f"A completion was not finished: {answer[:500]!r}")


def lines(turns: dict[str, list[Turn]]) -> list[Line]:
    compared = []
    for metric, (title, unit) in METRICS.items():
        values = {name: [getattr(turn, metric) for turn in turns[name]] for name in turns}
        # They may differ by nothing but the noise.
        compared += compare(title, unit, values, {"kvobs": 1.0, VERIFY: 1.0})
    return compared


def compare(title: str, unit: str, values: dict[str, list[float]], limits: Mapping[str, float]) -> list[Line]:
    """Compare each server's values of a metric with those of vLLM's own router, or the named one, round by round.

    One server is "stock", and one the same "again". The limits say which servers have a budget, and by which factor
    they may be worse; more if the noise is more.
    """
    compared = {
        name: Line(f"{title}, {name}", unit, each, values[name.partition(" against ")[2] or "stock"])
        for name, each in values.items()
        if name != "stock"
    }
    allowed = {name: max(limit, noise(compared["stock again"].samples)) for name, limit in limits.items()}
    more_is_better = unit == MORE_IS_BETTER
    budgets = {name: Budget(1 / by if more_is_better else by, at_least=more_is_better) for name, by in allowed.items()}
    return [replace(line, budget=budgets.get(name)) for name, line in compared.items()]


def noise(ratios: Sequence[float]) -> float:
    """Return the factor, up or down, within which three of four ratios of like to like are."""
    apart = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    return statistics.quantiles(apart, n=4, method="inclusive")[2]
