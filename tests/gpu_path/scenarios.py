"""What the engines of the cells serve: the same requests in each, by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvobs.testing.model import FIRST_BYTE, VOCAB


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        abort_at: The number of tokens after which it is aborted, if at all; with 0 it may be loading.
        is_streamed: Whether it gets its tokens as they come, not all at its end.
        priority: Where vLLM has a policy for it; the lowest comes first.
    """

    name: str
    prompt: Sequence[int]
    tokens: int
    abort_at: int | None = None
    is_streamed: bool = False
    priority: int = 0


@dataclass(frozen=True)
class Scenario:
    """Prompts that are asked in rounds, vLLM's own cache emptied before each.

    Attributes:
        prompts: How many.
        shared: The tokens of each that others begin with, too.
        tokens: The length of the answers.
        longer: By how much every second to fifth of them is longer than the one before.
        rounds: In the first they are computed and stored, after it loaded.
        aborts: After how many tokens the first requests of each round but the first are aborted.
        fails: The connector of which every second load fails after the first round: see `stores.Faults`.
        is_raised: Whether it raises then.
    """

    prompts: int
    shared: int
    tokens: int
    longer: int = 0
    rounds: int = 2
    aborts: tuple[int, ...] = ()
    fails: str = ""
    is_raised: bool = False
    is_streamed: bool = False

    def round(self, name: str, number: int) -> list[Asked]:
        """Return the requests of one round, in an order by chance."""
        rng = random.Random(name)
        stems = [_tokens(rng, self.shared) for _ in range(3)]
        prompts = [stems[i % 3] + _tokens(rng, rng.randrange(20, 60)) for i in range(self.prompts)]
        aborts = dict(enumerate(self.aborts)) if number else {}
        asked = [
            Asked(
                f"{name}-{number}-{i}", prompt, self.tokens + self.longer * (i % 5), aborts.get(i), self.is_streamed, -i
            )
            for i, prompt in enumerate(prompts)
        ]
        random.Random(number).shuffle(asked)
        return asked

    def aborted(self, name: str) -> set[str]:
        """Return the requests of all rounds that are aborted."""
        asked = [one for number in range(self.rounds) for one in self.round(name, number)]
        return {one.name for one in asked if one.abort_at is not None}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_BYTE, VOCAB) for _ in range(count)]


SCENARIOS = {
    "reuse": Scenario(prompts=12, shared=128, tokens=6, rounds=3, aborts=(0, 0, 1, 3)),
    "streams": Scenario(prompts=6, shared=64, tokens=12, aborts=(5,), is_streamed=True),
    "preemptions": Scenario(prompts=24, shared=32, tokens=12, longer=7, aborts=(0, 12)),
    "async failures": Scenario(prompts=16, shared=96, tokens=4, fails="host"),
    "sync failures": Scenario(prompts=16, shared=96, tokens=4, fails="disk"),
    "raised": Scenario(prompts=16, shared=96, tokens=4, fails="disk", is_raised=True),
}
