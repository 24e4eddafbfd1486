"""Servers on vLLM's default path on GPUs, what they are asked, and what must be true of them at the end."""

import json
import os
import random
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvobs.testing.model import NAME
from kvobs.testing.server import Server
from tests.connectors.packages import importing
from tests.connectors.servers.served import blocks_are_free
from tests.engine.serving import TOKENS, ServedEngine, eventually, prompt, total
from tests.gpu_path.cells import PUBLISH
from tests.gpu_path.environment import Counted, counted, gpu_path
from tests.support.published import write_row

CLIENTS = 4
LONG = 60
"""Tokens that an aborted request asked for: more than are made until it is aborted."""
PROMPTS = [prompt("gpu path", i // 3) + prompt("end", i)[:90] for i in range(12)]
"""Some 300 tokens each; three after each other begin with the same 200."""
ARGS = ("--max-model-len", "1024", "--num-gpu-blocks-override", "72")
"""A cache of the engine's own for a few of the prompts."""
METRICS = ("kvobs_lookups_total", "kvobs_loads_total", "kvobs_admitted_tokens_total")
"""In the order of `Counted`."""

OPEN = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvobs_in_flight")
RESULTS = Path(__file__).parent / "results.json"

Answers = dict[str, tuple[int, ...]]
Answer = tuple[str, tuple[int, ...]]
"""A prompt, and the tokens that came for it."""


@dataclass(frozen=True)
class Served:
    """A server, and the connectors behind its kvobs: their names, each with its class's.

    ``counts`` is the file for what they are asked.
    """

    server: Server
    counts: Path
    connectors: dict[str, str]

    def lines(self, call: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.counts.read_text().splitlines()) if line["call"] == call]

    def counted(self) -> dict[str, Counted]:
        return counted(self.counts)

    def by_kvobs(self) -> dict[str, Counted]:
        """Return what kvobs's metrics say of the connectors, by their class."""
        classes = {
            cls: [name for name, its in self.connectors.items() if its == cls] for cls in self.connectors.values()
        }
        return {
            cls: Counted(*(round(sum(total(self.server, metric, connector=n) for n in names)) for metric in METRICS))
            for cls, names in classes.items()
        }

    def promises(self, name: str) -> int:
        """Return for how many requests a connector has promised a save."""
        cls = self.connectors[name]
        return len({line["request"] for line in self.lines("promise") if line["connector"] == cls})


@contextmanager
def serving(
    served_engine: ServedEngine,
    folder: Path,
    config: dict[str, Any],
    *args: str,
    packages: Sequence[str] = (),
    **more: Any,
) -> Iterator[Served]:
    """Run a server on the GPU's path, with these packages beside vLLM; AssertionError if it took another path."""
    counts = folder / "counts"
    env = gpu_path(counts=counts)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *importing(*packages)])
    env |= more.pop("env", {})
    extra = config["kv_connector_extra_config"]
    classes = [each["kv_connector"] for each in extra["connectors"]]
    config = {**config, "kv_load_failure_policy": "recompute"}
    with served_engine(config, *ARGS, *args, env=env, is_spawned=True, **more) as server:
        served = Served(server, counts, dict(zip(extra["kvobs"]["names"], classes, strict=True)))
        assert len(served.lines("scheduler")) == 1, "without async scheduling"
        assert "Using V2 Model Runner" in server.log.read_text()
        yield served


@dataclass(frozen=True)
class Asked:
    """One request: whether its answer is streamed, and after how many tokens its client leaves, if it does."""

    prompt: str
    is_streamed: bool = False
    leaves_at: int | None = None

    def send(self, server: Server) -> tuple[int, ...] | None:
        """Return the answer, or nothing if the client left."""
        if self.leaves_at is not None:
            stream(server, self.prompt, LONG, self.leaves_at)
            return None
        if self.is_streamed:
            return stream(server, self.prompt, TOKENS)
        return server.complete(self.prompt, TOKENS).tokens


def stream(server: Server, text: str, tokens: int, leaves_at: int | None = None, **more: Any) -> tuple[int, ...]:
    """Return the tokens of a streamed answer; close the connection as soon as there are ``leaves_at``."""
    body = {"model": NAME, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "return_token_ids": True, **more}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"content-type": "application/json"})
    found: list[int] = []
    with closing(urllib.request.urlopen(request, timeout=300)) as answer:
        while leaves_at is None or len(found) < leaves_at:
            line = answer.readline().decode()
            if not line or line.startswith("data: [DONE]"):
                break
            if line.startswith("data: "):
                found += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or ()
    return tuple(found)


def round_of(number: int, prompts: Sequence[str] = PROMPTS, aborts: Sequence[int] = (0, 0, 1, 3)) -> list[Asked]:
    """Return a request for each prompt, every other one streamed, and in all rounds but the first some aborted ones."""
    asked = [Asked(text, is_streamed=bool((i + number) % 2)) for i, text in enumerate(prompts)]
    rng = random.Random(number)
    asked += [Asked(rng.choice(prompts), leaves_at=tokens) for tokens in aborts if number]
    rng.shuffle(asked)
    return asked


def ask(server: Server, asked: Sequence[Asked]) -> list[Answer]:
    """Send requests, a few at a time; return the prompts and answers of those whose clients stayed."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda one: one.send(server), asked))
    return [(one.prompt, answer) for one, answer in zip(asked, answers, strict=True) if answer is not None]


@dataclass(frozen=True)
class Seen:
    """What came of a server.

    Attributes:
        right: Answers that were the expected ones, of ``answered``; the clients of all other requests left.
        counts: Lookups, loads and loaded tokens of all connectors, as these were asked.
        equal: Whether kvobs counted the same of each connector.
        left: What was open or held at the end.
    """

    right: int
    answered: int
    requests: int
    counts: list[int]
    equal: bool
    left: list[str]


def look_back(
    title: str,
    served: Served,
    asked: Sequence[Asked],
    answers: Sequence[tuple[str, tuple[int, ...]]],
    expected: Answers,
) -> None:
    """Write what came of a server, if it is to be published; AssertionError if anything is wrong or left."""
    wrong = [(text[:20], tokens) for text, tokens in answers if tokens != expected[text]]
    eventually(lambda: not open_ones(served.server))
    left = open_ones(served.server) + ([] if blocks_are_free(served.server) else ["blocks"])
    equal = eventually(lambda: served.by_kvobs() == served.counted())
    counts = [sum(column) for column in zip(*served.counted().values(), strict=True)]
    if os.environ.get(PUBLISH):
        seen = Seen(len(answers) - len(wrong), len(answers), len(asked), counts, equal, left)
        write_row(RESULTS, title, asdict(seen))
    assert (wrong, left) == ([], [])
    assert served.by_kvobs() == served.counted()
    assert total(served.server, "kvobs_internal_errors_total") == 0
    assert total(served.server, "kvobs_unexpected_reports_total") == 0


def open_ones(server: Server) -> list[str]:
    return [name for name in OPEN if total(server, name)]
