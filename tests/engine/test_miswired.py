"""A decode engine wired wrong to its prefill engine or proxy: what its metrics and its log show; and a right one."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvobs.telemetry.transfers.first_requests import FIRST
from kvobs.testing.server import Server, claim_port
from tests.engine.pair import NIXL, Pair, hand_over, pair, routed, side_channel
from tests.engine.readings import Growth
from tests.engine.serving import TOKENS, ServedEngine, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LOGGED = "this engine computes their prompts"


@pytest.fixture(scope="module")
def engines(served_engine: ServedEngine) -> Iterator[Pair]:
    with pair(served_engine, roles=("kv_producer", "kv_consumer")) as engines:
        yield engines


def compute(server: Server, name: str, requests: int = FIRST) -> None:
    """Have an engine answer so many requests without params, as a proxy asks that drops them."""
    for number in range(requests):
        server.complete(prompt(f"{name} {number}"), 1)


def lines_of(server: Server) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if LOGGED in line]


def test_a_pair_that_is_wired_right_logs_nothing(engines: Pair) -> None:
    with Growth(engines.decode, connector="nixl") as grown:
        params, _ = hand_over(engines, prompt("right"))
        compute(engines.decode, "right", FIRST + 1)
    peer = f"{params['remote_host']}:{params['remote_port']}"
    assert grown("kvobs_peer_loads_total", peer=peer, outcome="ok") == grown("kvobs_peer_loads_total") == 1
    assert lines_of(engines.decode) == lines_of(engines.prefill) == []


def test_a_wrong_side_channel_port_fails_each_load_of_that_peer(engines: Pair) -> None:
    """Decode computes, and answers all the same. Another id, since NIXL is connected to the engine of that one."""
    port = claim_port(0)

    def elsewhere(params: dict[str, Any]) -> dict[str, Any]:
        return {**params, "remote_engine_id": "another", "remote_port": port}

    with Growth(engines.decode, connector="nixl") as grown:
        params, answer = hand_over(engines, prompt("wrong port"), change=elsewhere)
    assert len(answer.tokens) == TOKENS
    peer = f"{params['remote_host']}:{port}"
    assert grown("kvobs_peer_loads_total", peer=peer, outcome="failed") == grown("kvobs_peer_loads_total") == 1
    assert grown("kvobs_loads_total", outcome="failed") == grown("kvobs_loads_total") == 1


def test_a_proxy_that_drops_the_params_is_logged_once(served_engine: ServedEngine) -> None:
    with served_engine(routed(NIXL, "kv_consumer"), env=side_channel()) as decode:
        with Growth(decode, connector="nixl") as grown:
            compute(decode, "dropped", FIRST - 1)
            assert lines_of(decode) == []
            compute(decode, "more", 20)
        (line,) = lines_of(decode)
    assert re.search(
        rf"connector 'nixl' only takes KV \(kv_consumer\), and the first {FIRST} requests ask for no", line
    )
    assert grown("kvobs_lookups_total", outcome="miss") == grown("kvobs_lookups_total") == FIRST - 1 + 20
    assert grown("kvobs_peer_loads_total") == 0
