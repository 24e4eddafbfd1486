"""Servers with two ranks, as pipeline stages and as shares of each layer: streams, clients that leave, counts."""

from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import files, host_memory, multi_connector
from tests.engine.serving import BOTH_RANKS_ON_ONE_CORE, ServedEngine, total
from tests.gpu_path.servers.served import Answers, ask, look_back, round_of, serving

pytestmark = pytest.mark.timeout(900)  # engines are started within it

EMPTIES_CONNECTORS = (False, False, True)
"""Of each round; then only ExampleConnector, which has no such hook, still knows the prompts."""


@pytest.mark.parametrize("connectors", ["host, disk", "host"], ids=["pipeline", "tensor"])
def test_answers_and_counts_of_two_ranks_are_right(
    connectors: str, served_engine: ServedEngine, expected: Answers, tmp_path: Path
) -> None:
    is_pipeline = connectors == "host, disk"  # ranks that share layers would overwrite each other's files of them
    entries = [host_memory(), files(tmp_path / "disk")][: 1 + is_pipeline]
    more: dict[str, Any] = {} if is_pipeline else {"ranks": 2}
    args = ("--pipeline-parallel-size", "2") if is_pipeline else ()
    config = multi_connector(*entries, names=["near", "far"][: len(entries)])
    with serving(served_engine, tmp_path, config, *args, env=BOTH_RANKS_ON_ONE_CORE, **more) as served:
        asked, answers = [], []
        for number, empties_connectors in enumerate(EMPTIES_CONNECTORS):
            served.server.reset_prefix_cache(external=empties_connectors)
            asked += (sent := round_of(number))
            answers += ask(served.server, sent)
        look_back(f"{connectors}; {'PP' if is_pipeline else 'TP'} 2", served, asked, answers, expected)
        loads = total(served.server, "kvobs_loads_total", outcome="ok")
        assert total(served.server, "kvobs_rank_skew_seconds_count", kind="load") == loads, "both ranks report each"
        assert min(counts.loads for counts in served.counted().values()) > 0
