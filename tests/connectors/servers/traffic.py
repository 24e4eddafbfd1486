"""Requests to an engine with a store: few documents asked about again and again, some hung up on; and their times."""

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Any

from kvobs.testing.server import Server, ServerError
from tests.engine.serving import hang_up, prompt

CLIENTS = 4
TOKENS = 8
DOCUMENTS = 24
REQUESTS = 200
ABORTS = 40
SMALL_CACHE = ("--max-model-len", "1024", "--num-gpu-blocks-override", "72", "--max-num-batched-tokens", "256",
               "--enable-chunked-prefill")  # fmt: skip
"""An engine's own cache that holds a sixth of the documents, so that the others come from the stores, and prompts that
are computed in chunks."""

Answers = dict[str, tuple[int, ...]]


def document(number: int) -> str:
    """Return 400 tokens, about; every other document begins with the text of the one before it."""
    return prompt("store", number // 2) + prompt("end", number)


PROMPTS = [document(i) for i in range(DOCUMENTS)]
LONG = [PROMPTS[i] + PROMPTS[i + end] for i in range(0, DOCUMENTS, 4) for end in (1, 3)]
"""Prompts of 800 tokens, about; two after each other begin with the same 400. SpoolCache keeps no shorter ones."""


@dataclass(frozen=True)
class Asked:
    """One request that was answered, or not."""

    prompt: str
    begin: float
    end: float
    tokens: tuple[int, ...]
    error: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def order(requests: int, seed: object, prompts: Sequence[str] = PROMPTS) -> list[str]:
    """Return so many prompts, each of them as often as any other, in random order."""
    rng = random.Random(repr(seed))
    found: list[str] = []
    while len(found) < requests:
        found += rng.sample(prompts, len(prompts))
    return found[:requests]


def ask(server: Server, text: str) -> Asked:
    """Ask once; an error is part of the answer."""
    begin, tokens, problem = time.monotonic(), tuple[int, ...](), ""
    try:
        tokens = server.complete(text, TOKENS).tokens
    except ServerError as error:
        problem = str(error)
    return Asked(text, begin, time.monotonic(), tokens, problem)


def ask_all(server: Server, prompts: Sequence[str]) -> list[Asked]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda text: ask(server, text), prompts))


def ask_and_abort(
    server: Server, requests: int = REQUESTS, aborts: int = ABORTS, seed: object = 0, prompts: Sequence[str] = PROMPTS
) -> list[Asked]:
    """Ask so many requests while others are hung up on, before or after their first token."""
    rng = random.Random(repr(("aborts", seed)))
    mixed: list[Callable[[], Asked | None]] = [partial(ask, server, text) for text in order(requests, seed, prompts)]
    delays = [0, 0.005, 0.02, 0.08, 0.3]
    mixed += [partial(leave, server, rng.choice(prompts), rng.choice(delays)) for _ in range(aborts)]
    rng.shuffle(mixed)
    with ThreadPoolExecutor(CLIENTS) as pool:
        return [answer for answer in pool.map(lambda send: send(), mixed) if answer is not None]


def leave(server: Server, text: str, after_s: float, **more: Any) -> None:
    """Ask for a long answer, and close the connection so many seconds later."""
    with suppress(OSError, HTTPException):
        hang_up(server, after_s, text, max_tokens=400, **more)


@dataclass
class Load:
    """Requests that go on until they are ended, and the answers so far."""

    server: Server
    asked: list[Asked] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self, number: int) -> None:
        for turn in itertools.count():
            for text in order(DOCUMENTS, (number, turn)):
                if self.over.is_set():
                    return
                self.asked.append(ask(self.server, text))

    def between(self, begin: float, end: float) -> list[Asked]:
        """Return the requests that were answered between these times, and those that began then and were not."""
        return [one for one in list(self.asked) if begin <= one.end <= end]


@contextmanager
def asking(server: Server) -> Iterator[Load]:
    """Keep four clients asking inside the ``with`` block; at its end wait for their last answers."""
    load = Load(server)
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(load.client, number) for number in range(CLIENTS)]
        try:
            yield load
        finally:
            load.over.set()
    for client in running:
        client.result()


def wrong(asked: Sequence[Asked], expected: Answers) -> list[str]:
    """Return a line for each answer that is not the expected one, or that is an error."""
    return [
        f"{one.prompt[:30]!r}: {one.error or one.tokens}, expected {expected[one.prompt]}"
        for one in asked
        if one.error or one.tokens != expected[one.prompt]
    ]


def p95(asked: Sequence[Asked]) -> float:
    assert asked, "nothing was answered"
    times = sorted(one.seconds for one in asked)
    return times[math.ceil(0.95 * len(times)) - 1]
