"""LMCache's own server behind an engine with host memory beside it: clients that leave, also before a lookup."""

from pathlib import Path

import pytest

from kvobs.demo.run import host_memory, multi_connector
from tests.connectors.servers.stores import lmcache_entry, lmcache_server, running
from tests.engine.serving import ServedEngine, total
from tests.gpu_path.servers.served import Answers, ask, look_back, round_of, serving

pytestmark = pytest.mark.timeout(900)  # engines are started within it

FEW = ("--max-num-seqs", "2")
"""Running requests: those of the other clients wait, and some of these leave before any connector is asked."""
ABORTS = (0, 0, 0, 0, 1, 3)


def test_answers_and_counts_are_right(served_engine: ServedEngine, expected: Answers, tmp_path: Path) -> None:
    asked, answers = [], []
    with running(lmcache_server(tmp_path)) as store:
        config = multi_connector(lmcache_entry(store, mq_timeout=60.0), host_memory(), names=["lmcache", "host"])
        with serving(served_engine, tmp_path, config, *FEW, packages=["lmcache"]) as served:
            for number in range(3):
                served.server.reset_prefix_cache()
                asked += (sent := round_of(number, aborts=ABORTS))
                answers += ask(served.server, sent)
            look_back("LMCache MP, host", served, asked, answers, expected)
            assert served.counted()["LMCacheMPConnector"].loads > 0
            saves = total(served.server, "kvobs_saves_total", connector="lmcache", outcome="ok")
            assert saves == served.promises("lmcache") >= len(answers), "it promises one for every request that ends"
