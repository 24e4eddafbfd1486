"""Connectors with known load times, requests that arrive in time, and what each load policy makes of them.

A simulation of decisions only: no vLLM, no clock but its own. Requests do not slow each other down.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles

from kvobs.prediction.load_choice import EXPLORED, Candidate, LoadChoice
from kvobs.state.offers import Decision

COMPUTE_S, COMPUTE_TOKEN_S = 5e-3, 50e-6


def computing(tokens: int) -> float:
    """Return the seconds that a prefill takes."""
    return COMPUTE_S + tokens * COMPUTE_TOKEN_S


@dataclass(frozen=True)
class Connector:
    """What a connector holds of the nth request's prompt, and how long a load of that request takes."""

    holds: Callable[[int, int], int]  # (number, tokens of the prompt) -> tokens
    seconds: Callable[[int, int], float]  # (number, tokens of the load) -> seconds


@dataclass(frozen=True)
class Workload:
    """Requests of some lengths, one after the other in time."""

    prompt: tuple[int, int]
    requests: int = 600
    every_s: float = 0.05
    seed: int = 1


@dataclass
class Race:
    """The times to first token under one policy, and its decisions."""

    seconds: list[float]
    decisions: list[Decision | None]

    @property
    def p50(self) -> float:
        return quantiles(self.seconds, n=20)[9]

    @property
    def p95(self) -> float:
        return quantiles(self.seconds, n=20)[18]

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    def trials(self) -> int:
        return sum(decision is not None and decision.reason == EXPLORED for decision in self.decisions)


class Policy:
    """Chooses among offers (child, tokens); this one in the same way at any time."""

    decision: Decision | None = None

    def __init__(self, pick: Callable[[Sequence[tuple[int, int]]], int | None]) -> None:
        self.pick = pick

    def choose(self, offers: Sequence[tuple[int, int]], prompt: int, now: float) -> int | None:
        return self.pick(offers) if offers else None

    def began(self, number: int, child: int, tokens: int, now: float) -> None:
        pass

    def ended(self, number: int, child: int, tokens: int, began: float, now: float) -> None:
        pass


FIRST = Policy(lambda offers: offers[0][0])
LONGEST = Policy(lambda offers: max(offers, key=lambda offer: offer[1])[0])


def always(child: int | None) -> Policy:
    """Return one fixed choice, where it offers."""
    return Policy(lambda offers: child if child in dict(offers) else None)


class Fastest(Policy):
    def __init__(self, children: int) -> None:
        self.choice = LoadChoice(children)
        self.open: list[dict[int, tuple[int, float]]] = [{} for _ in range(children)]

    def choose(self, offers: Sequence[tuple[int, int]], prompt: int, now: float) -> int | None:
        self.decision = None
        if not offers:
            return None
        candidates = [
            Candidate(
                child,
                tokens,
                computing(prompt - tokens),
                [(of, now - since) for of, since in self.open[child].values()],
            )
            for child, tokens in offers
        ]
        self.decision = self.choice.decide(candidates, computing(prompt))
        self.choice.taken(self.decision)
        return self.decision.child

    def began(self, number: int, child: int, tokens: int, now: float) -> None:
        self.open[child][number] = tokens, now

    def ended(self, number: int, child: int, tokens: int, began: float, now: float) -> None:
        self.choice.observe(child, tokens, now - began)
        self.open[child] = {other: load for other, load in self.open[child].items() if load[1] > began}


def race(policy: Policy, connectors: Sequence[Connector], workload: Workload) -> Race:
    """Serve the requests under a policy."""
    dice = random.Random(workload.seed)
    result = Race([], [])
    ends: list[tuple[float, int, int, int, float]] = []
    for number in range(workload.requests):
        now = number * workload.every_s
        while ends and ends[0][0] <= now:
            ended, request, child, tokens, began = heapq.heappop(ends)
            policy.ended(request, child, tokens, began, ended)
        prompt = dice.randint(*workload.prompt)
        noise = max(0.5, dice.gauss(1, 0.1))
        held = [connector.holds(number, prompt) for connector in connectors]
        offers = [(child, min(tokens, prompt - 1)) for child, tokens in enumerate(held) if tokens > 0]
        chosen = policy.choose(offers, prompt, now)
        result.decisions.append(policy.decision)
        if chosen is None:
            result.seconds.append(computing(prompt))
            continue
        tokens = dict(offers)[chosen]
        spent = connectors[chosen].seconds(number, tokens) * noise
        policy.began(number, chosen, tokens, now)
        heapq.heappush(ends, (now + spent, number, chosen, tokens, now))
        result.seconds.append(spent + computing(prompt - tokens))
    return result
