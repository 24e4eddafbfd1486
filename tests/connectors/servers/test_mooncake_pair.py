"""A prefill and a decode engine with MooncakeConnector and host memory behind kvobs on both sides.

Blocks pass over TCP on this machine. 200 requests are handed over, some of them hung up on by the client in the middle.
"""

import json
import random
import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.server import HOST, Server, ServerError, claim_port, cores
from tests.connectors.servers import traffic
from tests.connectors.servers.served import blocks_are_free, is_idle
from tests.connectors.servers.stores import mooncake_entry
from tests.connectors.servers.traffic import PROMPTS, REQUESTS, SMALL_CACHE, TOKENS, Answers
from tests.engine.serving import ServedEngine, eventually, total

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines and stores are started within it

P2P = "p2p"
GIVEN_UP_S = 15
"""How long the prefill engine keeps blocks that nobody fetches: those of requests that are aborted. vLLM: 480."""
BLOCKS = {"kv_producer": "512", "kv_consumer": "128"}
"""The prefill engine also holds those of requests that were hung up on."""


@dataclass(frozen=True)
class Pair:
    prefill: Server
    decode: Server
    address: str
    """Where the prefill engine's workers are asked for."""
    engine_id: str


def one_of(served_engine: ServedEngine, role: str, core: int, port: int) -> AbstractContextManager[Server]:
    end = {**mooncake_entry("MooncakeConnector", mooncake_protocol="tcp"), "kv_role": role}
    config = multi_connector(end, host_memory(), names=[P2P, "host"])
    env = {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(GIVEN_UP_S),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }
    args = (*SMALL_CACHE, "--num-gpu-blocks-override", BLOCKS[role])
    return served_engine(config, *args, packages=["mooncake"], env=env)


@pytest.fixture(scope="module")
def pair(served_engine: ServedEngine) -> Iterator[Pair]:
    one, other = cores(2)
    port, unused = claim_port(0), claim_port(0)
    with (
        one_of(served_engine, "kv_producer", one, port) as prefill,
        one_of(served_engine, "kv_consumer", other, unused) as decode,
    ):
        address = f"http://{HOST}:{port}"
        with urllib.request.urlopen(f"{address}/query", timeout=30) as answer:
            (of_rank_0,) = json.load(answer).values()
        yield Pair(prefill, decode, address, of_rank_0["engine_id"])


def hand_over(pair: Pair, prompt: str, *, at_once: bool, leave_after: float | None = None) -> tuple[int, ...] | None:
    """Have a prompt prefilled by the one and completed by the other, both asked at once or one after the other.

    Returns the answer's tokens, or None if the client was to leave the decode engine after so many seconds.
    """
    name = str(uuid.uuid4())
    headers = {"X-Request-Id": name}
    params: dict[str, Any] = {"transfer_id": f"xfer-{name}"}
    there = params | {"do_remote_decode": True, "do_remote_prefill": False}
    here = params | {"do_remote_decode": False, "do_remote_prefill": True}
    here |= {"remote_bootstrap_addr": pair.address, "remote_engine_id": pair.engine_id}

    def prefill() -> None:
        pair.prefill.complete(prompt, 1, headers=headers, kv_transfer_params=there)

    def decode() -> tuple[int, ...] | None:
        if leave_after is None:
            return pair.decode.complete(prompt, TOKENS, headers=headers, kv_transfer_params=here).tokens
        traffic.leave(pair.decode, prompt, leave_after, kv_transfer_params=here)
        return None

    if not at_once:
        prefill()
        return decode()
    with ThreadPoolExecutor(1) as pool:
        prefilling = pool.submit(prefill)
        tokens = decode()
        prefilling.result()
        return tokens


def test_200_requests_and_aborts(pair: Pair, expected: Answers) -> None:
    rng = random.Random(15)
    asked: list[tuple[str, float | None]] = [(text, None) for text in traffic.order(REQUESTS, "pair")]
    asked += [(rng.choice(PROMPTS), rng.choice([0, 0.01, 0.05, 0.2])) for _ in range(traffic.ABORTS)]
    rng.shuffle(asked)

    def one(item: tuple[int, tuple[str, float | None]]) -> str | None:
        number, (text, leave_after) = item
        try:
            tokens = hand_over(pair, text, at_once=bool(number % 2), leave_after=leave_after)
        except ServerError as error:
            return str(error)
        return None if leave_after is not None or tokens == expected[text] else f"{text[:30]!r}: {tokens}"

    begin = time.monotonic()
    with ThreadPoolExecutor(traffic.CLIENTS) as pool:
        wrong = [line for line in pool.map(one, enumerate(asked)) if line]
    loads = total(pair.decode, "kvobs_loads_total", connector=P2P, outcome="ok")
    print(f"\n{len(asked)} requests in {time.monotonic() - begin:.1f} s, {loads:.0f} loads")
    assert wrong == []
    assert loads >= REQUESTS / 2
    for server in (pair.prefill, pair.decode):
        server.check_alive()
        assert total(server, "kvobs_call_errors_total") == 0
        assert total(server, "kvobs_internal_errors_total") == 0
        assert eventually(partial(is_idle, server), 4 * GIVEN_UP_S), "requests, loads or saves are still open"
        assert blocks_are_free(server)
