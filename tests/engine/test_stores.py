"""Real servers with a store in host memory: what kvobs counts is what a subscriber of vLLM's KV cache events sees."""

from __future__ import annotations

import json

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvobs.demo.run import host_memory, multi_connector
from kvobs.export.connector_rows import server_row
from kvobs.export.numbers import Scrape
from kvobs.schema import signals
from kvobs.schema.verdicts import THRASHING
from tests.engine.metered import BYTES_PER_TOKEN
from tests.engine.published import Subscriber
from tests.engine.serving import ServedEngine, eventually, prompt, total

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 32, 24
ROUNDS, PROMPTS = 2, 20


def test_tokens_stored_and_evicted_are_those_of_the_events(served_engine: ServedEngine) -> None:
    """The subscriber keeps the set of hashes in the store: kvobs keeps numbers only."""
    memory = host_memory(BLOCKS * BLOCK * BYTES_PER_TOKEN)
    memory["kv_connector_extra_config"]["self_describing_kv_events"] = True
    config = multi_connector(memory, names=["cpu"])
    with Subscriber() as published:
        words = ("--kv-events-config", json.dumps(published.options), "--block-size", str(BLOCK))
        with served_engine(config, *words) as server:
            for round_number in range(ROUNDS):
                for i in range(PROMPTS):
                    server.complete(prompt("stores", i), 1)
                server.reset_prefix_cache()  # vLLM's own: the next round asks the store
                print(f"round {round_number}: {len(published.events)} events")

            def agree() -> bool:
                held, evicted = _followed(published)
                return (
                    total(server, "kvobs_stored_tokens", medium="cpu") == BLOCK * len(held)
                    and total(server, "kvobs_evicted_tokens_total", medium="cpu") == BLOCK * evicted
                )

            agreed = eventually(agree, 20)
            held, evicted = _followed(published)
            print(f"{len(held)} blocks held, {evicted} evicted, of {BLOCKS}")
            assert agreed
            assert published.numbers == list(range(len(published.numbers))), "no event was missed"
            assert evicted > BLOCKS, "the store was full, and all of it was replaced"
            assert 0 < len(held) <= BLOCKS
            assert total(server, "kvobs_capacity_tokens") == BLOCKS * BLOCK
            # The prompts are short: every block is a sample. Each block of the second round was evicted before it.
            assert total(server, "kvobs_evicted_followed_tokens_total", medium="cpu") == BLOCK * evicted
            asked = total(server, "kvobs_reuse_distance_tokens_count")
            assert total(server, "kvobs_evicted_reused_tokens_total", medium="cpu") == asked / ROUNDS
            missed = {
                reason: total(server, "kvobs_missed_tokens_total", reason=reason)
                for reason in signals.MISSED_TOKENS.labels["reason"]
            }
            prompts = total(server, "vllm:prompt_tokens_total")
            assert {reason: n for reason, n in missed.items() if n} == {
                "never_seen": asked / ROUNDS,
                "evicted": asked / ROUNDS,
                "no_full_block": prompts - asked,
            }
            # It served none of what it evicted, and all of that was asked for again.
            samples = {(s.name, frozenset(s.labels.items())): s.value for s in server.metrics()}
            (row,) = server_row("here", None, Scrape(0, samples)).connectors
            assert (row.state, row.state_value) == (THRASHING.name, asked / ROUNDS / (BLOCK * evicted))
            server.reset_prefix_cache(external=True)
            assert eventually(lambda: total(server, "kvobs_stored_tokens", medium="cpu") == 0, 20), "a reset empties it"


def _followed(published: Subscriber) -> tuple[set[int | bytes], int]:
    """Return the blocks that the connector's store holds by its events, and how many it has evicted."""
    held: set[int | bytes] = set()
    evicted = 0
    for event in list(published.events):
        if getattr(event, "medium", None) == "CPU":
            if isinstance(event, BlockStored):
                assert event.block_size == BLOCK
                held |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                assert held >= set(event.block_hashes)
                held -= set(event.block_hashes)
                evicted += len(event.block_hashes)
    return held, evicted
