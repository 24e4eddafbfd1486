"""Metrics of a server with several API servers; those of several engines are in test_serving and test_exporter."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.demo.run import files, host_memory
from tests.engine.metered import (
    BYTES_PER_TOKEN,
    ask_in_turn,
    assert_counted_in_turn,
    assert_promtool_finds_no_fault,
    configuration,
    counting_child,
    in_flight,
)
from tests.engine.readings import Growth, assert_every_call_is_counted, kvobs_samples
from tests.engine.serving import ask_all, eventually, prompt, serve

pytestmark = pytest.mark.engine


def test_two_api_servers_have_the_same_numbers(model: Path, tmp_path: Path) -> None:
    """Each payload goes to one of them, and each answers for both: numbers add up, and none is there twice."""
    config = configuration(
        counting_child(tmp_path), host_memory(), files(tmp_path / "disk"), names=["steered", "cpu", "disk"]
    )
    texts = [text + "." if len(text) % 32 == 1 else text for text in (prompt("file", i) for i in range(10))]
    with serve(model, tmp_path, config, "--api-server-count", "2", timeout=360) as server:
        with Growth(server, connector="steered") as grown:
            ask_in_turn(server, 60)
        assert_counted_in_turn(grown, 60)
        ask_all(server, texts)
        for loads, external in (("cpu", False), ("disk", True)):
            server.reset_prefix_cache(external=external)
            with Growth(server) as grown:
                ask_all(server, texts)
            assert grown("kvobs_loads_total", outcome="ok", connector=loads) == grown("kvobs_loads_total") == 10
            tokens = grown("kvobs_load_tokens_total", connector=loads)
            assert tokens == grown("vllm:external_prefix_cache_hits_total") > 10 * 64
            assert grown("kvobs_load_bytes_total", connector=loads) == tokens * BYTES_PER_TOKEN
        assert_every_call_is_counted(server, tmp_path / "counts", "steered", ranks=1)

        def is_at_rest() -> bool:
            # The begin and the end of a load may reach two API servers in any order, and the value that came last is
            # shown: that of other loads then.
            if in_flight(server):
                server.reset_prefix_cache()
                ask_in_turn(server, 4, about="once more")
                ask_all(server, texts)
            return not in_flight(server)

        assert eventually(is_at_rest), in_flight(server)
        samples = kvobs_samples(server)
        assert not [s for s in samples if "pid" in s.labels]
        assert len(samples) == len({(s.name, *sorted(s.labels.items())) for s in samples})
        assert not [s for s in samples if s.name.startswith(("kvobs_rank_skew", "kvobs_slowest"))], "there is one rank"
        assert_promtool_finds_no_fault(server)
