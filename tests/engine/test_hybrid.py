"""A real server whose model has sliding windows: the bytes of loads are those that the connector moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvobs.demo.model import LAYERS
from kvobs.demo.run import host_memory, multi_connector
from tests.engine.metered import BYTES_PER_TOKEN
from tests.engine.readings import Growth
from tests.engine.serving import ask_all, prompt, serve

pytestmark = pytest.mark.engine

WINDOW = 64
TYPES = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]


def test_loads_of_a_hybrid_model_have_the_bytes_that_its_connector_moved(model: Path, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), names=["cpu"])
    overrides = json.dumps({"layer_types": TYPES, "sliding_window": WINDOW})
    with serve(model, tmp_path, config, "--hf-overrides", overrides, "--no-disable-hybrid-kv-cache-manager") as server:
        texts = [prompt("hybrid", i) for i in range(12)]
        computed = ask_all(server, texts)
        server.reset_prefix_cache()
        with Growth(server, connector="cpu") as grown:
            assert ask_all(server, texts) == computed
        assert grown("kvobs_loads_total", outcome="ok") == len(texts)
        tokens, moved = grown("kvobs_load_tokens_total"), grown("vllm:kv_offload_load_bytes_total")
        assert grown("kvobs_load_bytes_total") == moved
        assert moved < 0.7 * tokens * BYTES_PER_TOKEN, "windows are a part of the prompts"
