"""What the load policies make of the same requests: the time to first token of a real server.

Three connectors keep every prompt, and load real blocks after a time that the request sets (see ``steering``): one is
quick and offers little, one starts slowly and offers most, one is quick or very slow by turns. Times are shares of what
computing 1,800 tokens takes on this machine. One server serves the requests under all policies in turns (see
``switched``), and under fixed choices, of which the best is known in hindsight: only one of the connectors offers
anything, or none. Always the quick one is what the policy ``first`` does here.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from docs import pages
from kvobs.demo.model import make_model
from kvobs.demo.run import multi_connector
from kvobs.demo.server import Server
from tests.bench.endtoend import Say, ask, in_turn
from tests.bench.report import Budget, Line, Part
from tests.engine.serving import importing_tests, of_tests

ROUNDS = 2
POLICIES = ("first", "longest", "fastest")
CHILDREN = ("quick", "large", "flapping")
FIXED = {"always large": "large", "always flapping": "flapping", "never": ""}
"""Choice -> the only connector that offers."""
REFERENCE_TOKENS = 1800
BLOCK = 32
PROMPTS = 8
"""Prompts of a workload; each is asked many times, and vLLM's own cache is emptied before."""


class Steady(NamedTuple):
    """A connector's load times as shares of the reference: of any load, and more of one of the reference's size."""

    start: float
    whole: float

    def share(self, tokens: int) -> float:
        return self.start + self.whole * tokens / REFERENCE_TOKENS


QUICK, LARGE, FLAPPING = Steady(0.04, 0.02), Steady(0.4, 0.1), Steady(0.1, 0.1)
DOWN_SHARE, TURN = 3.0, 60
"""What any load of the flapping one takes while it is down, and for how many requests it is."""


class Workload(NamedTuple):
    """Requests: lengths of prompts, of these the share that each connector holds, and how many are asked at once.

    Of several at once each has a prompt of its own: vLLM's own cache can't be emptied in between.
    """

    lengths: tuple[int, int]
    held: Mapping[str, float]
    at_most: Mapping[str, int]
    at_once: int = 1
    requests: int = 180

    def prompts(self, choice: str = "") -> list[str]:
        dice = random.Random(repr(self.lengths))
        lengths = [dice.randint(*self.lengths) for _ in range(PROMPTS if self.at_once == 1 else self.requests)]
        if self.at_once > 1:
            dice = random.Random(f"{choice} {time.monotonic_ns()}")
        return ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz ", k=length)) for length in lengths]

    def offers(self, number: int, tokens: int, reference_s: float) -> dict[str, dict[str, Any]]:
        """Return each connector's orders for a request."""
        is_down = number // TURN % 2 == 1
        orders = {}
        for name, times in (("quick", QUICK), ("large", LARGE), ("flapping", FLAPPING)):
            offer = min(int(tokens * self.held[name]), self.at_most.get(name, tokens)) // BLOCK * BLOCK
            share = DOWN_SHARE if name == "flapping" and is_down else times.share(offer)
            orders[name] = {"offer": offer, "async": True, "load_ms": 1000 * share * reference_s}
        return orders


SMALL = {"quick": 256}
WORKLOADS = {
    "short prompts": Workload((280, 480), {"quick": 0.9, "large": 0.95, "flapping": 0.9}, SMALL),
    "long prompts": Workload((1500, 1900), {"quick": 0.9, "large": 0.95, "flapping": 0.8}, SMALL),
    "the flapping one holds most": Workload((1000, 1900), {"quick": 0.1, "large": 0.5, "flapping": 0.95}, SMALL),
    "three at once": Workload((800, 1900), {"quick": 0.9, "large": 0.95, "flapping": 0.5}, SMALL, at_once=3),
}
TURNS_SLOW_AT, TURNS_SLOW_FOR, SLOWER = 60, 60, 10
"""In the last workload the quick connector is slower by this factor from a request on."""

Orders = dict[str, dict[str, Any]]


def measure(rounds: int, say: Say) -> Part:
    seconds: dict[tuple[str, str], list[list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as name:
        folder = Path(name)
        with Server(make_model(folder / "model"), folder / "log", config(), env=importing_tests()) as server:
            prime(server)
            reference_s = time_of_computing(server)
            say(f"computing {REFERENCE_TOKENS} tokens takes {1000 * reference_s:.0f} ms")
            for number in range(rounds):
                for title, workload in WORKLOADS.items():
                    say(f"round {number + 1} of {rounds}: {title}")
                    for choice, taken in serve_in_turns(server, workload, reference_s).items():
                        seconds.setdefault((title, choice), []).append(taken)
                        numbers = [f"{what} {1000 * of(taken):.0f} ms" for what, of in STATISTICS.items()]
                        say(f"{choice}: {', '.join(numbers)}")
            slow_until = turn_slow(server, reference_s)
    pages.write(pages.FOLDER / "policies.md", "run", "policies", table(seconds))
    left = Line("requests until a connector that turned slow is left", "", [slow_until], (), Budget(20))
    return Part("Load policies on a real server", [left])


def config() -> dict[str, Any]:
    children = [
        {**of_tests("SwitchedChild", tag=name), "kv_connector_module_path": "tests.bench.switched"} for name in CHILDREN
    ]
    config = multi_connector(*children, names=CHILDREN)
    config["kv_connector_extra_config"]["kvobs"]["load_policy"] = "fastest"
    return config


def prime(server: Server) -> None:
    """Have every prompt computed, and kept by all connectors; and a few of other lengths, so that costs are known."""
    for workload in WORKLOADS.values():
        for text in workload.prompts() if workload.at_once == 1 else ():
            first_token(server, text, {})
    for i in range(40):
        first_token(server, "".join(random.Random(i).choices("abcdef", k=20 + 47 * i)), {})


def time_of_computing(server: Server) -> float:
    return statistics.median(
        first_token(server, "".join(random.Random(i).choices("ghijkl", k=REFERENCE_TOKENS)), {}) for i in range(8)
    )


def serve_in_turns(server: Server, workload: Workload, reference_s: float) -> dict[str, list[float]]:
    """Have the requests served by each policy and each fixed choice; return the seconds to each first token."""
    taken: dict[str, list[float]] = {choice: [] for choice in (*POLICIES, *FIXED)}
    for begin in range(0, workload.requests, TURN):
        for choice in in_turn(list(taken), begin // TURN):
            texts = workload.prompts(choice)

            def serve(number: int, choice: str = choice, texts: Sequence[str] = texts) -> float:
                text = texts[number % len(texts)]
                orders = workload.offers(number, len(text), reference_s)
                if choice in FIXED:
                    orders = {name: order for name, order in orders.items() if name == FIXED[choice]}
                if workload.at_once == 1:
                    server.reset_prefix_cache()
                return first_token(server, text, orders, "first" if choice in FIXED else choice)

            with ThreadPoolExecutor(workload.at_once) as pool:
                taken[choice] += pool.map(serve, range(begin, begin + TURN))
    return taken


def turn_slow(server: Server, reference_s: float) -> float:
    """Let the quick connector turn slow; return after how many requests times are again those of the next best."""
    workload = WORKLOADS["short prompts"]
    texts, taken = workload.prompts(), []
    for number in range(TURNS_SLOW_AT + TURNS_SLOW_FOR):
        text = texts[number % len(texts)]
        orders = workload.offers(0, len(text), reference_s)
        if number >= TURNS_SLOW_AT:
            orders["quick"]["load_ms"] = SLOWER * reference_s * 1000
        server.reset_prefix_cache()
        taken.append(first_token(server, text, orders))
    slow = [i + 1 for i, s in enumerate(taken[TURNS_SLOW_AT:]) if s > SLOWER / 2 * reference_s]
    return float(next((n for n in slow if n + 1 not in slow and n + 2 not in slow), 0))


def first_token(server: Server, text: str, orders: Orders, policy: str = "fastest") -> float:
    """Have a prompt completed by one token; return the seconds to it."""
    return ask(server, text, 1, kv_transfer_params={"steer": orders, "policy": policy})


TITLES = {"first": "`first`, always quick", "longest": "`longest`", "fastest": "`fastest`"}
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda seconds: statistics.quantiles(seconds, n=20)[9],
    "p95": lambda seconds: statistics.quantiles(seconds, n=20)[18],
}


def table(seconds: Mapping[tuple[str, str], Sequence[Sequence[float]]]) -> str:
    """Return the table of the page: the median of the rounds of each p50, p95 and mean, in ms."""
    choices = list(dict.fromkeys(choice for _, choice in seconds))
    rows = []
    for name in WORKLOADS:
        for what, of in {**STATISTICS, "mean": statistics.fmean}.items():
            values = [1000 * statistics.median(map(of, seconds[name, choice])) for choice in choices]
            rows.append([name, what, *(f"{value:.0f}" for value in values)])
    return pages.table(["workload", "ms", *(TITLES.get(choice, choice) for choice in choices)], rows)
