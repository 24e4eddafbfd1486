"""Real servers whose only cache is vLLM's offloading to host memory: it serves what the curve says for its size."""

from __future__ import annotations

import random

import pytest
from prometheus_client.utils import floatToGoString

from kvobs.demo.run import host_memory, multi_connector
from tests.engine.metered import BYTES_PER_TOKEN
from tests.engine.serving import ServedEngine, eventually, total

pytestmark = pytest.mark.engine

REQUESTS, DOCUMENTS = 120, 50
POINTS = 0.03
DISTANCES = "kvobs_reuse_distance_tokens"


def questions() -> list[str]:
    """Return questions about documents, of which some are asked about more often than others."""
    draw = random.Random(7)

    def text(characters: int) -> str:
        return "".join(draw.choices("abcdefgh ", k=characters))

    documents = [text(draw.randrange(150, 600)) for _ in range(DOCUMENTS)]
    weights = [1 / (i + 1) ** 0.8 for i in range(DOCUMENTS)]
    return [document + text(draw.randrange(20, 60)) for document in draw.choices(documents, weights, k=REQUESTS)]


@pytest.mark.parametrize("tokens", [2048, 4096, 8192])
def test_a_connector_serves_what_the_curve_says_for_its_size(tokens: int, served_engine: ServedEngine) -> None:
    config = multi_connector(host_memory(tokens * BYTES_PER_TOKEN), names=["cpu"])
    with served_engine(config, "--no-enable-prefix-caching") as server:
        for question in questions():
            server.complete(question, 1)
        assert total(server, "kvobs_capacity_tokens") == tokens
        prompts = total(server, "vllm:prompt_tokens_total")

        def counted() -> float:
            return total(server, f"{DISTANCES}_count") + total(server, "kvobs_prompt_tail_tokens_total")

        assert eventually(lambda: counted() == prompts), "every token of every prompt is counted once"
        every = total(server, f"{DISTANCES}_count")
        (bound,) = map(floatToGoString, [tokens])
        curve = total(server, f"{DISTANCES}_bucket", le=bound) / every
        served = total(server, "kvobs_load_tokens_total") / every
    print(f"{tokens} tokens: {served:.1%} served, {curve:.1%} by the curve")
    assert 0.05 < curve < 0.8
    assert served == pytest.approx(curve, abs=POINTS)
