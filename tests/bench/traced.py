"""What tracing costs a user: real servers whose clients trace every request, with kvobs's spans and without.

Four servers that differ in kvobs's option ``tracing.level`` only get the same load in turns: off, off once more,
requests, calls. All send vLLM's own spans to one collector, a process of its own. Every request loads from a child, so
that it is three of kvobs's spans, and they come at a pace that makes 200 a second. The loads are synchronous: while an
asynchronous one is pending vLLM spins, and on two cores that is all one would measure.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.demo.run import multi_connector
from kvobs.demo.server import Server, ServerError
from tests.bench.endtoend import (
    MORE_IS_BETTER,
    SPIN_S,
    Say,
    ask,
    check_end,
    compare,
    completing,
    in_turn,
    prompt,
    running,
)
from tests.bench.receiver import Received, receiving
from tests.bench.report import Line, Part
from tests.engine.serving import of_tests

ROUNDS = 10
WARM_UP = 1
"""Rounds before those that count: what they ask is saved, and then loaded in each of those."""

REQUESTS = 150
PACE_S = 0.015
"""From one request to the next, however long they take."""
AT_ONCE = 8
ANSWER_TOKENS = 4
SENT_AFTER_S = 3.0
"""Until all spans have arrived: a batch goes out after a second."""

METRICS = {
    "tokens_per_s": ("tokens/s", MORE_IS_BETTER),
    "completion_p50": ("completion, p50", "ms"),
    "completion_p95": ("completion, p95", "ms"),
    "token": ("between tokens, mean", "ms"),
}
"""What a turn measures: title and unit."""

LIMITS: dict[str, dict[str, float]] = {"completion_p95": {"requests": 1.05}}
"""By which factor which server may be worse than the one that is off; more where the noise is more."""


def config(level: str) -> dict[str, Any]:
    made = multi_connector(of_tests("SteeredChild", plan={"offer": 64}), of_tests("IdleChild"), names=["near", "far"])
    made["kv_connector_extra_config"]["kvobs"]["tracing"] = {"level": level}
    return made


CONFIGS = {"off": config("off"), "off again": config("off"), "requests": config("requests"), "calls": config("calls")}
TRACED = {"requests", "calls"}


class Turn(NamedTuple):
    """What one server did in one turn."""

    tokens_per_s: float
    completion_p50: float
    completion_p95: float
    token: float
    """Milliseconds; the last from one token of a request to the next, by the engine's clock: a step. On two cores the
    client can't see it: its tokens arrive in clusters, whenever the API server gets the core that the engine spins on.
    """
    begin_ns: int
    end_ns: int


def measure(rounds: int, say: Say) -> Part:
    """Load all servers in turns, and compare each with the one that is off, round by round."""
    with (
        tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder,
        receiving() as receiver,
        running(Path(folder), CONFIGS, say, ["--otlp-traces-endpoint", receiver.endpoint]) as servers,
    ):
        turns: dict[str, list[Turn]] = {name: [] for name in servers}
        begin = time.monotonic()
        for number in range(WARM_UP + rounds):
            for name in in_turn(list(servers), number):
                turns[name].append(take_turn(servers[name]))
            if number == WARM_UP:
                seconds = (time.monotonic() - begin) / (number + 1) * (rounds - 1)
                say(f"{rounds} rounds, about {seconds:.0f} s more")
        time.sleep(SENT_AFTER_S)
        received = receiver.take()
        dropped = {name: sum(dropped_by(server).values()) for name, server in servers.items()}
    counted = {name: all_turns[WARM_UP:] for name, all_turns in turns.items()}
    return Part(
        "Real servers, every request traced; baseline: kvobs with tracing off",
        [*lines(counted), *arrivals(counted, received, dropped)],
    )


# --- load


def take_turn(server: Server) -> Turn:
    """Empty vLLM's own cache, so that all prompts are loaded from a child; load the server."""
    time.sleep(SPIN_S)
    server.reset_prefix_cache()
    for i in range(3):
        ask(server, prompt("wake", i), 1)
    texts = [prompt("traced", i) for i in range(REQUESTS)]
    before = between_tokens(server)
    begin_ns, begin = time.time_ns(), time.perf_counter()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = []
        for i, text in enumerate(texts):
            time.sleep(max(0, begin + i * PACE_S - time.perf_counter()))
            asked.append(pool.submit(complete, server, text))
        completions = [answer.result() for answer in asked]
    seconds = time.perf_counter() - begin
    end_ns = time.time_ns()
    total, tokens = (now - then for now, then in zip(between_tokens(server), before, strict=True))
    return Turn(
        REQUESTS * ANSWER_TOKENS / seconds,
        twentieth(completions, 10) * 1000,
        twentieth(completions, 19) * 1000,
        total / tokens * 1000,
        begin_ns,
        end_ns,
    )


def complete(server: Server, text: str) -> float:
    """Have a prompt completed for a client who traces it; return the seconds it took."""
    headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"}
    begin = time.perf_counter()
    with completing(server, text, ANSWER_TOKENS, headers) as answer:
        check_end(answer.read())
    return time.perf_counter() - begin


def between_tokens(server: Server) -> tuple[float, float]:
    """Return the seconds between all tokens so far, and how often that was."""
    values = {sample.name: sample.value for sample in server.metrics()}
    name = "vllm:inter_token_latency_seconds"
    return values.get(f"{name}_sum", 0.0), values.get(f"{name}_count", 0.0)


def twentieth(values: Sequence[float], number: int) -> float:
    return statistics.quantiles(values, n=20)[number - 1]


# --- result


def lines(turns: Mapping[str, Sequence[Turn]]) -> list[Line]:
    return [
        line
        for metric, (title, unit) in METRICS.items()
        for line in compare(
            title,
            unit,
            {name: [getattr(turn, metric) for turn in all_turns] for name, all_turns in turns.items()},
            baseline="off",
            limits=LIMITS.get(metric, {}),
        )
    ]


def arrivals(
    turns: Mapping[str, Sequence[Turn]], received: Iterable[Received], dropped: Mapping[str, int]
) -> list[Line]:
    """Say how many of kvobs's spans came from each server while it was measured, turn by turn.

    Raises:
        ServerError: none came from a server that traces, or one from a server that does not.
    """
    ends: dict[str, list[int]] = {name: [] for name in turns}
    for span in received:
        ends[span.server].append(span.end_ns)
    found = []
    for name, all_turns in turns.items():
        if (name in TRACED) is not bool(ends[name]):
            raise ServerError(f"{name}: {len(ends[name])} of kvobs's spans arrived; tracing was not measured.")
        if not ends[name]:
            continue
        rates = tuple(per_second(ends[name], turn) for turn in all_turns)
        title = f"spans that arrived, {name} ({dropped[name]:,} others dropped)"
        found.append(Line(title, "spans/s", statistics.median(rates), rates))
    return found


def per_second(ends: Iterable[int], turn: Turn) -> float:
    """Return how many of the spans with these ends were made in a second of the turn."""
    return sum(turn.begin_ns <= end < turn.end_ns for end in ends) / ((turn.end_ns - turn.begin_ns) / 1e9)


def dropped_by(server: Server) -> dict[str, int]:
    """Return how many spans a server has dropped, by place."""
    return {
        sample.labels["where"]: int(sample.value)
        for sample in server.metrics()
        if sample.name == "kvobs_spans_dropped_total"
    }
