"""A real server whose model has sliding windows: bytes loaded and tokens saved are those that the connector moved."""

from __future__ import annotations

import json

import pytest

from kvobs.demo.run import host_memory, multi_connector
from kvobs.testing.model import LAYERS
from tests.engine.metered import BYTES_PER_TOKEN
from tests.engine.readings import Growth
from tests.engine.serving import ServedEngine, ask_all, prompt, total

pytestmark = pytest.mark.engine

WINDOW, BLOCK = 64, 32
TYPES = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]


def test_a_hybrid_models_numbers_are_what_its_connector_moved(served_engine: ServedEngine) -> None:
    memory = host_memory()
    memory["kv_connector_extra_config"]["self_describing_kv_events"] = True
    args = {
        "--hf-overrides": {"layer_types": TYPES, "sliding_window": WINDOW},
        "--kv-events-config": {"enable_kv_cache_events": True, "publisher": "null"},
    }
    words = [word for option, value in args.items() for word in (option, json.dumps(value))]
    config = multi_connector(memory, names=["cpu"])
    with served_engine(config, *words, "--no-disable-hybrid-kv-cache-manager") as server:
        texts = [prompt("hybrid", i) for i in range(12)]
        full_blocks = sum(len(text) // BLOCK * BLOCK for text in texts)
        with Growth(server, connector="cpu") as grown:
            computed = ask_all(server, texts)
            assert grown.reaches(full_blocks, "kvobs_save_tokens_total", medium="cpu")
        assert total(server, "kvobs_stored_tokens", medium="cpu") == full_blocks, "of the group with all tokens"
        assert total(server, "kvobs_evicted_tokens_total") == total(server, "kvobs_capacity_tokens") == 0
        server.reset_prefix_cache()
        with Growth(server, connector="cpu") as grown:
            assert ask_all(server, texts) == computed
        assert grown("kvobs_loads_total", outcome="ok") == len(texts)
        tokens, moved = grown("kvobs_load_tokens_total"), grown("vllm:kv_offload_load_bytes_total")
        assert grown("kvobs_load_bytes_total") == moved
        print(f"{tokens} tokens: {moved} bytes moved, {tokens * BYTES_PER_TOKEN} as tokens times all layers")
        assert tokens == full_blocks
        assert moved < 0.7 * tokens * BYTES_PER_TOKEN, "windows are a part of the prompts"
