"""An engine over two hosts with different clocks: answers, numbers and spans are right, and both hosts are watched."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import host_memory
from kvobs.testing.collector import Collector
from tests.engine import metered
from tests.engine.exported import Exported
from tests.engine.hosts import AHEAD_S, TwoHosts, on_two_hosts
from tests.engine.readings import Growth, assert_every_call_is_counted, calls_shown
from tests.engine.serving import TOKENS, eventually, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TRACE = "7b" * 16
ASYNC = {**metered.ASYNC, "load_ms": {"0": 100, "1": 10}}
OF_THE_FIRST_HOST = {f"kvobs_{name}_total" for name in ("lookups", "loads", "offered_tokens", "slowest_rank")}


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TwoHosts, Collector, Path]]:
    folder = tmp_path_factory.mktemp("hosts")
    config = metered.configuration(metered.counting_entry(folder), host_memory(), names=["steered", "cpu"])
    with Collector() as collector:
        spans = ("--otlp-traces-endpoint", collector.endpoint)
        with on_two_hosts(model, folder, config, *spans, **collector.env) as hosts:
            for port in hosts.ports:
                Exported(hosts.server, port).until_up()
            yield hosts, collector, folder


@pytest.fixture(scope="module")
def server(engine: tuple[TwoHosts, Collector, Path]) -> Any:
    """Return the server, and kvobs's numbers from the exporters on both hosts."""
    hosts, *_ = engine
    return Exported(hosts.server, *hosts.ports)


def test_blocks_come_back_unchanged_and_each_call_is_counted(server: Any, engine: Any) -> None:
    texts = [prompt("two hosts", i) for i in range(8)]
    params = {"steer": {"steered": {"offer": "stored", "async": True}}}

    def answers() -> list[tuple[int, ...]]:
        return [server.complete(text, TOKENS, kv_transfer_params=params).tokens for text in texts]

    computed = answers()
    server.reset_prefix_cache()
    with Growth(server, connector="steered") as grown:
        assert answers() == computed
    assert grown("kvobs_loads_total", outcome="ok") == len(texts)
    assert_every_call_is_counted(server, engine[2] / "counts", "steered", ranks=2)


def test_the_slowest_rank_loaded_longest_by_its_own_clock(server: Any) -> None:
    """By the clocks of both hosts it would be the other one."""
    with Growth(server, connector="steered") as grown:
        metered.ask(server, prompt("slowest"), ASYNC)
    assert grown("kvobs_slowest_rank_total", rank="0") == grown("kvobs_slowest_rank_total") == 1
    assert 0 < grown("kvobs_rank_skew_seconds_sum", kind="load") < AHEAD_S / 2


def test_a_ranks_span_has_its_clocks_length_at_its_hosts_time(server: Any, engine: Any) -> None:
    headers = {"traceparent": f"00-{TRACE}-{'cd' * 8}-01"}
    server.complete(prompt("traced"), TOKENS, headers=headers, kv_transfer_params={"steer": {"steered": ASYNC}})

    def ranks() -> dict[int, Any]:
        spans = [span for span in engine[1].trace(TRACE) if span.name == "kv.load.rank"]
        return {span.attributes["kv_transfer.rank"]: span for span in spans}

    assert eventually(lambda: ranks().keys() == {0, 1}), engine[1].trace(TRACE)
    first, other = ranks()[0], ranks()[1]
    assert AHEAD_S / 2 < (other.start_ns - first.start_ns) / 1e9 < AHEAD_S * 3 / 2
    assert 0.09 < (first.end_ns - first.start_ns) / 1e9 < AHEAD_S / 2
    assert 0.005 < (other.end_ns - other.start_ns) / 1e9 < AHEAD_S / 2


def test_each_host_shows_its_processes_and_their_numbers(engine: Any) -> None:
    hosts, *_ = engine
    here, there = (Exported(hosts.server, port) for port in hosts.ports)
    assert here.health()["processes"]["rank 1"] == "not seen"
    assert there.health()["processes"].keys() == {"rank 1"}
    assert there.health()["processes"]["rank 1"] == here.health()["processes"]["rank 0"]

    def shown(host: Exported) -> set[str]:
        return {line.split("{")[0] for line in host.get("/metrics").splitlines() if not line.startswith("#")}

    assert shown(here) >= OF_THE_FIRST_HOST
    assert not shown(there) & OF_THE_FIRST_HOST
    hooks = {name: calls_shown(host, "steered").keys() for name, host in (("here", here), ("there", there))}  # type: ignore[arg-type]
    assert "start_load_kv" in hooks["there"]
    assert "on_new_request" in hooks["here"] - hooks["there"]
    assert hooks["there"] < hooks["here"]


def test_ranks_that_vllm_stops_have_not_ended_unexpectedly(engine: Any) -> None:
    """The last test: vLLM kills the ranks there when it is asked to stop them, after nine seconds."""
    hosts, *_ = engine
    there = Exported(hosts.server, hosts.ports[1])
    hosts.other.stop()
    assert eventually(lambda: there.health()["state"] == "gone")
    time.sleep(3)  # until it has looked why
    assert not [sample for sample in there.get("/metrics").splitlines() if sample.startswith("kvobs_engine_ended")]
