"""Real vLLM servers on the CPU: kvobs answers what stock answers, in every shape, and survives what ends stock."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.testing.server import Server, ServerError
from tests.engine.metered import counting_entry
from tests.engine.serving import TOKENS, ServedEngine, ask_all, eventually, hang_up, hit, of_tests, prompt, stock, total

pytestmark = pytest.mark.engine


def shared(document: int, question: int) -> str:
    """Return a prompt that shares its first part with those of the same document."""
    text = prompt("document", document) + prompt("question", question)[:70]
    return text + "." if len(text) % 32 == 1 else text  # ExampleConnector never finds such a prompt again


def abort_some(server: Server, prompts: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: hang_up(server, random.uniform(0.01, 0.15), text), prompts))


def run_plan(server: Server) -> dict[str, tuple[int, ...]]:
    """Send a few hundred requests: fresh prompts, hits from both connectors, aborts; return the answers by prompt.

    Which connector serves is decided by what is emptied: vLLM's own cache before each round; with the connectors'
    caches only the file connector, which has no such hook, still knows the prompts.
    """
    answers: dict[str, tuple[int, ...]] = {}
    rounds = (([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([0, 1, 2, 3], True), ([4, 5, 6, 7], False))
    for questions, empties_connectors in rounds:
        server.reset_prefix_cache(external=empties_connectors)
        prompts = [shared(document, question) for question in questions for document in range(15)]
        half = len(prompts) // 2
        for n, part in enumerate((prompts[:half], prompts[half:])):
            for text, tokens in ask_all(server, part).items():
                assert answers.setdefault(text, tokens) == tokens, "a load changed what is answered"
            abort_some(server, [prompt("abort", n, i) for i in range(6)] + part[:6])
    return answers


def test_answers_match_those_of_stock_and_of_no_connector(served_engine: ServedEngine, tmp_path: Path) -> None:
    """Greedy, float32, 240 answered requests and 96 aborts at concurrency 8, hits from both connectors."""
    config = multi_connector(host_memory(), files(tmp_path / "kvobs"), names=["cpu", "disk"])
    with served_engine(None) as server:
        expected = run_plan(server)
    with served_engine(stock(multi_connector(host_memory(), files(tmp_path / "stock")))) as server:
        by_stock = run_plan(server)
    with served_engine(config) as server:
        by_kvobs = run_plan(server)
        loaded = {name: total(server, "kvobs_load_tokens_total", connector=name) for name in ("cpu", "disk")}
        assert total(server, "kvobs_unexpected_reports_total") == 0
        assert eventually(lambda: total(server, "vllm:num_requests_running") == 0)
        generated = total(server, "vllm:generation_tokens_total")
        assert generated < 240 * TOKENS + 96 * 1500 / 4, "long answers were not cut short"
    assert len(expected) == 120
    assert by_stock == expected
    assert by_kvobs == expected
    assert min(loaded.values()) > 1000, loaded


def test_connectors_that_crash_stock_run_here_with_their_series(served_engine: ServedEngine, tmp_path: Path) -> None:
    """A connector by module path that returns stats, one with stats and no metrics, and two OffloadingConnectors."""
    entries = (counting_entry(tmp_path), of_tests("SilentStatsConnector", counts=str(tmp_path)))
    config = multi_connector(host_memory(), host_memory(), *entries, names=["near", "far"])
    with served_engine(config) as server:
        ask_all(server, [prompt("stats", i) for i in range(20)])
        assert hit(server) > 0
        for name in ("near", "far"):
            assert total(server, "vllm:kv_offload_store_bytes_total", connector=name) > 0
        assert total(server, "vllm:kv_offload_load_bytes_total", connector="near") > 0
        assert total(server, "vllm:kv_offload_load_bytes_total", connector="far") == 0
        call = "scheduler.request_finished_all_groups"
        assert total(server, "vllm:stats_connector_calls_total", connector="CountingConnector", call=call) == 22
        connectors = {s.labels["connector"] for s in server.metrics() if s.name == "kvobs_lookups_total"}
        assert connectors == {"near", "far", "CountingConnector", "SilentStatsConnector"}


def test_reports_of_two_ranks_are_counted_as_connectors_state(served_engine: ServedEngine) -> None:
    """Tensor parallel 2. W11: saves reported on rank 0 only. W20: an abort during a load beside a promised save."""
    config = multi_connector(
        of_tests("SteeredConnector", tag="loader"),
        of_tests("SteeredConnector", tag="saver", finished_count=1),
        host_memory(),
        names=["loader", "saver", "cpu"],
    )
    with served_engine(config, ranks=2) as server:

        def ask(text: str, **steer: Any) -> tuple[int, ...]:
            return server.complete(text, TOKENS, kv_transfer_params={"steer": steer}).tokens

        def idle() -> bool:
            # Empties vLLM's cache only when no block is held for anybody.
            try:
                server.reset_prefix_cache(timeout=0.1)
            except ServerError:
                return False
            return True

        one_rank = {"promise": True, "save_ms": {"0": 50}}
        text = prompt("w11")
        expected = ask(text)
        for i in range(5):
            assert ask(text, saver=one_rank) == expected, i
        assert eventually(idle), "blocks are held for a save that rank 0 has reported"
        assert eventually(lambda: total(server, "kvobs_saves_total", connector="saver", outcome="ok") == 5)

        for order in ({"load_ms": 300, "save": 600}, {"load_ms": 600, "save": 300}):
            saver = {"promise": True, "save_ms": {"0": order["save"]}}
            loader = {"offer": 64, "async": True, "load_ms": order["load_ms"]}
            steer = {"steer": {"loader": loader, "saver": saver}}
            hang_up(server, 0.1, prompt("w20", order), kv_transfer_params=steer)
        assert eventually(lambda: total(server, "kvobs_loads_total", connector="loader", outcome="aborted") == 2)
        assert eventually(idle), "blocks are held for an aborted request"
        assert ask(text) == expected

        slow_rank = {"offer": "stored", "async": True, "load_ms": {"0": 5, "1": 200}}
        stored = prompt("stored")
        first = ask(stored)
        assert eventually(idle)
        assert ask(stored, loader=slow_rank) == first
        assert eventually(lambda: total(server, "kvobs_loads_total", connector="loader", outcome="ok") == 1)
        lies = {"stray": "load", "stray_ms": 0}
        assert ask(prompt("lie"), saver=lies, loader={"offer": 0})
        assert eventually(lambda: total(server, "kvobs_unexpected_reports_total", connector="saver", kind="load") > 0)
        assert ask(text) == expected


def test_the_plugin_needs_no_key_at_all(served_engine: ServedEngine, tmp_path: Path) -> None:
    config = stock(multi_connector(host_memory(), files(tmp_path / "kv")))
    with served_engine(config, env={"KVOBS_ENABLE": "1"}) as server:
        assert hit(server) > 0


def test_nor_does_a_single_connector_need_one(served_engine: ServedEngine) -> None:
    """It stores and loads as many bytes as alone."""

    def ask_twice(server: Server) -> tuple[Any, ...]:
        text = prompt("single")
        first = server.complete(text, TOKENS).tokens
        assert eventually(lambda: total(server, "vllm:kv_offload_store_bytes_total") > 0)
        server.reset_prefix_cache()
        assert server.complete(text, TOKENS).tokens == first
        assert eventually(lambda: total(server, "vllm:kv_offload_load_bytes_total") > 0)
        return first, *(total(server, f"vllm:kv_offload_{way}_bytes_total") for way in ("store", "load"))

    with served_engine(host_memory()) as server:
        alone = ask_twice(server)
    with served_engine(host_memory(), env={"KVOBS_ENABLE": "1"}) as server:
        assert ask_twice(server) == alone
        assert eventually(
            lambda: total(server, "kvobs_loads_total", connector="OffloadingConnector", outcome="ok") == 1
        )
        assert "kvobs routes to OffloadingConnector, the only connector" in server.log.read_text()


def test_a_mistake_in_the_options_ends_the_start_with_its_path(served_engine: ServedEngine, tmp_path: Path) -> None:
    config = multi_connector(host_memory(), files(tmp_path / "kv"))
    config["kv_connector_extra_config"]["kvobs"] = {"load_policy": "best"}
    message = "kv_connector_extra_config.kvobs.load_policy: found 'best', allowed: 'first' or 'longest'"
    with pytest.raises(ServerError, match=re.escape(message)), served_engine(config, folder=tmp_path):
        pass
    assert message in (tmp_path / "server.log").read_text()
