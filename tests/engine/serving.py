"""What the tests on real servers share: servers that can import the tests' connectors, prompts, and readings."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvobs.demo.model import NAME
from kvobs.demo.run import child
from kvobs.demo.server import HOST, Server, cores

ROOT = Path(__file__).parents[2]
TOKENS = 8

BOTH_RANKS_ON_ONE_CORE = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores(1) * 2)}
"""While a transfer is pending vLLM's workers spin: on all of two cores, the server and the test may get no CPU for
seconds (Linux 6.18), and what is to happen during the transfer happens after it."""


def importing_tests() -> dict[str, str]:
    """Return what lets a server import the tests' connectors."""
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@contextmanager
def serve(model: Path, folder: Path, config: dict[str, Any] | None, *args: str, **more: Any) -> Iterator[Server]:
    """Run a server that can import the tests' connectors."""
    env = {**importing_tests(), **more.pop("env", {})}
    with Server(model, folder / "server.log", config, args=args, env=env, **more) as server:
        yield server


def stock(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration for vLLM's own MultiConnector."""
    extra = {key: value for key, value in config["kv_connector_extra_config"].items() if key != "kvobs"}
    return {
        **{key: value for key, value in config.items() if key != "kv_connector_module_path"},
        "kv_connector_extra_config": extra,
    }


def of_tests(cls: str, **extra: Any) -> dict[str, Any]:
    return {**child(cls, **extra), "kv_connector_module_path": "tests.engine.children"}


def total(server: Server, metric: str, **labels: str) -> float:
    """Add up the samples that carry these labels."""
    return sum(s.value for s in server.metrics() if s.name == metric and labels.items() <= s.labels.items())


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def prompt(*parts: object) -> str:
    """Return some 200 tokens that depend on the parts."""
    rng = random.Random(repr(parts))
    return " ".join("".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(36))


def ask_all(server: Server, prompts: list[str]) -> dict[str, tuple[int, ...]]:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda text: server.complete(text, TOKENS).tokens, prompts)
        return dict(zip(prompts, answers, strict=True))


def hang_up(server: Server, seconds: float, text: str, **body: Any) -> None:
    """Ask for a long answer, and close the connection before it can be there."""
    connection = HTTPConnection(HOST, server.port, timeout=30)
    asked = {"model": NAME, "prompt": text, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, **body}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    time.sleep(seconds)
    connection.close()
