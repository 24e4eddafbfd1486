"""A real engine of two ranks under Ray, with each of vLLM's executors for it: kvobs counts and traces as ever."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.collector import Collector
from kvobs.testing.server import Server
from tests.connectors.servers.cluster import EXECUTORS, ON_RAY, RANKS, Cluster, cluster
from tests.connectors.servers.served import blocks_are_free
from tests.engine import metered
from tests.engine.readings import Growth, assert_every_call_is_counted
from tests.engine.serving import TOKENS, ServedEngine, eventually, hang_up, prompt

pytestmark = [pytest.mark.connectors, pytest.mark.ray, pytest.mark.timeout(1200)]

TRACE = "5a" * 16
STORED = {"offer": "stored", "async": True}


@dataclass(frozen=True)
class Engine:
    """An engine whose ranks are workers of a cluster, and the collector of its spans."""

    server: Server
    cluster: Cluster
    collector: Collector
    folder: Path


@pytest.fixture(scope="module", params=EXECUTORS)
def engine(
    request: pytest.FixtureRequest, served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp(request.param)
    config = metered.configuration(metered.counting_entry(folder), host_memory(), names=["steered", "cpu"])
    with Collector() as collector, cluster(**EXECUTORS[request.param], **collector.env) as ranks:
        args = (*ON_RAY, "--otlp-traces-endpoint", collector.endpoint)
        with served_engine(config, *args, ranks=RANKS, env=ranks.env, is_spawned=True) as server:
            metered.ask(server, prompt("warm"))
            yield Engine(server, ranks, collector, folder)


def test_the_ranks_are_workers_of_the_cluster(engine: Engine) -> None:
    assert len(engine.cluster.workers()) == RANKS, engine.cluster.processes()


def test_every_call_load_and_save_is_counted(engine: Engine) -> None:
    with Growth(engine.server, connector="steered") as grown:
        metered.ask_in_turn(engine.server, 40)
    metered.assert_counted_in_turn(grown, 40)
    assert_every_call_is_counted(engine.server, engine.folder / "counts", "steered", ranks=RANKS)


def test_blocks_come_back_as_they_were_computed(engine: Engine) -> None:
    texts = [prompt("again", i) for i in range(8)]
    params = {"steer": {"steered": STORED}}

    def answers() -> list[tuple[int, ...]]:
        return [engine.server.complete(text, TOKENS, kv_transfer_params=params).tokens for text in texts]

    computed = answers()
    engine.server.reset_prefix_cache()
    with Growth(engine.server, connector="steered") as grown:
        assert answers() == computed
    assert grown("kvobs_loads_total", outcome="ok") == len(texts)
    assert grown("kvobs_load_tokens_total") == grown("vllm:external_prefix_cache_hits_total") > 100 * len(texts)


def test_a_load_lasts_until_its_slowest_rank_has_it(engine: Engine) -> None:
    with Growth(engine.server, connector="steered") as grown:
        metered.ask(engine.server, prompt("async"), {**metered.ASYNC, "load_ms": {"0": 5, "1": 300}})
    assert grown("kvobs_loads_total", mode="async", outcome="ok") == grown("kvobs_loads_total") == 1
    assert grown("kvobs_slowest_rank_total", rank="1") == grown("kvobs_slowest_rank_total") == 1
    assert grown("kvobs_rank_skew_seconds_sum", kind="load") > 0.2


@pytest.mark.parametrize("fail", ["recv", "blocks"])
def test_tokens_missing_on_one_rank_are_computed(fail: str, engine: Engine) -> None:
    text = prompt("fails", fail)
    expected = engine.server.complete(text, TOKENS).tokens
    engine.server.reset_prefix_cache()
    plan = {"steer": {"steered": {**metered.ASYNC, "fail": fail, "fail_ranks": [1]}}}
    with Growth(engine.server, connector="steered") as grown:
        assert engine.server.complete(text, TOKENS, kv_transfer_params=plan).tokens == expected
    assert grown("kvobs_loads_total", outcome="failed") == grown("kvobs_loads_total") == 1
    assert grown("kvobs_recomputed_tokens_total") == 64


def test_a_request_aborted_while_it_loads_leaves_nothing(engine: Engine) -> None:
    plan = {**metered.ASYNC, "load_ms": {"0": 1000, "1": 8000}, "promise": True}

    def is_loading() -> bool:
        samples = engine.server.metrics()
        return any(s.value for s in samples if s.name == "kvobs_in_flight" and s.labels["kind"] == "load")

    with Growth(engine.server, connector="steered") as grown:
        hang_up(engine.server, is_loading, prompt("aborted"), kv_transfer_params={"steer": {"steered": plan}})
        assert eventually(lambda: not is_loading())
        assert blocks_are_free(engine.server)
    assert grown("kvobs_loads_total", outcome="aborted") == grown("kvobs_loads_total") == 1
    metered.assert_nothing_in_flight(engine.server)


def test_spans_of_scheduler_and_both_ranks_reach_the_collector(engine: Engine) -> None:
    plan = {"steer": {"steered": {**metered.ASYNC, "load_ms": 20}}}
    headers = {"traceparent": f"00-{TRACE}-{'cd' * 8}-01"}
    engine.server.complete(prompt("traced"), TOKENS, headers=headers, kv_transfer_params=plan)

    def named(name: str) -> list[Any]:
        return [span for span in engine.collector.trace(TRACE) if span.name == name]

    assert eventually(lambda: len(named("kv.load.rank")) == RANKS), engine.collector.trace(TRACE)
    (load,) = named("kv.load steered")
    assert {span.parent_id for span in named("kv.load.rank")} == {load.span_id}
    assert {span.attributes["kv_transfer.rank"] for span in named("kv.load.rank")} == set(range(RANKS))


def test_nothing_went_wrong_within_kvobs(engine: Engine) -> None:
    engine.server.check_alive()
    wrong = ("kvobs_internal_errors_total", "kvobs_call_errors_total", "kvobs_unexpected_reports_total")
    assert [s for s in engine.server.metrics() if s.name in wrong and s.value] == []
