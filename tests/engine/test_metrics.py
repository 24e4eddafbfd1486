"""Metrics of a real server with two ranks, against the orders given, a connector's counts and vLLM's own metrics."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import kvobs
from kvobs.demo.run import host_memory
from kvobs.testing.server import Server
from tests.engine import metered
from tests.engine.readings import (
    Growth,
    assert_each_scrape_is_right,
    assert_every_call_is_counted,
    assert_right_while_a_call_hangs,
    kvobs_samples,
)
from tests.engine.serving import TOKENS, ServedEngine, ask_all, eventually, hang_up, prompt, resident, total

pytestmark = pytest.mark.engine

HANGS_MS = 8_000


@pytest.fixture(scope="module")
def server(served_engine: ServedEngine, folder: Path) -> Iterator[Server]:
    config = metered.configuration(metered.counting_entry(folder), host_memory(), names=["steered", "cpu"])
    with served_engine(config, ranks=2) as server:
        metered.ask(server, prompt("warm"))
        yield server


def test_an_async_load_lasts_until_its_slowest_rank_has_it(server: Server) -> None:
    with Growth(server, connector="steered") as grown:
        metered.ask(server, prompt("async"), {**metered.ASYNC, "load_ms": {"0": 5, "1": 300}})
    assert grown("kvobs_loads_total", mode="async", outcome="ok") == grown("kvobs_loads_total") == 1
    assert grown("kvobs_load_duration_seconds_count", mode="async") == 1
    assert 0.3 <= grown("kvobs_load_duration_seconds_sum", mode="async") < 2
    assert grown("kvobs_rank_skew_seconds_count", kind="load") == grown("kvobs_rank_skew_seconds_count") == 1
    assert 0.2 < grown("kvobs_rank_skew_seconds_sum", kind="load") < 2
    assert grown("kvobs_slowest_rank_total", rank="1") == grown("kvobs_slowest_rank_total") == 1
    assert grown("kvobs_offered_tokens_total") == grown("kvobs_admitted_tokens_total") == 64
    assert grown("kvobs_load_tokens_total") == 64
    assert grown("kvobs_load_bytes_total") == 64 * metered.BYTES_PER_TOKEN
    assert grown("vllm:external_prefix_cache_hits_total") == 64


def test_a_sync_load_stalls_its_step(server: Server) -> None:
    with Growth(server, connector="steered") as grown:
        metered.ask(
            server, prompt("sync"), {**metered.SYNC, "sleep_in": "start_load_kv", "sleep_ms": {"1": 300}}, tokens=1
        )
    assert grown("kvobs_loads_total", mode="sync", outcome="ok") == grown("kvobs_loads_total") == 1
    assert grown("kvobs_load_duration_seconds_count", mode="sync") == 1
    assert 0.3 <= grown("kvobs_load_duration_seconds_sum", mode="sync") < 2
    assert grown("kvobs_load_stall_seconds_count") > 0
    assert 0.3 <= grown("kvobs_load_stall_seconds_sum") < 2
    assert grown("kvobs_load_bytes_total") == 64 * metered.BYTES_PER_TOKEN


def test_loads_of_a_real_connector_are_those_it_counts_itself(server: Server) -> None:
    texts = [prompt("cpu", i) for i in range(12)]
    stored = sum(len(text) // 32 * 32 for text in texts)
    computed = ask_all(server, texts)
    server.reset_prefix_cache()
    with Growth(server, connector="cpu") as grown:
        assert ask_all(server, texts) == computed
    assert grown("kvobs_lookups_total", outcome="hit") == grown("kvobs_loads_total", outcome="ok") == len(texts)
    assert grown("kvobs_load_tokens_total") == grown("vllm:external_prefix_cache_hits_total") == stored
    own = grown("vllm:kv_offload_load_bytes_total", connector="cpu")
    assert grown("kvobs_load_bytes_total") == own == stored * metered.BYTES_PER_TOKEN


def test_nothing_of_a_burst_is_missing(server: Server) -> None:
    prompted = sum(len(prompt("in turn", "0", i)) for i in range(200))
    with Growth(server, connector="steered") as grown:
        metered.ask_in_turn(server, 200)
    metered.assert_counted_in_turn(grown, 200)
    assert grown("vllm:external_prefix_cache_hits_total") == 100 * 64
    assert grown("vllm:prompt_tokens_total") == prompted
    assert grown("vllm:request_success_total") == 200
    metered.assert_nothing_in_flight(server)


def test_every_call_is_counted(server: Server, folder: Path) -> None:
    assert_every_call_is_counted(server, folder / "counts", "steered", ranks=2)
    labels = {
        s.labels["hook"] for s in kvobs_samples(server) if s.labels.get("connector") == "cpu" and "hook" in s.labels
    }
    assert {"start_load_kv", "build_connector_meta"} <= labels
    assert not {"wait_for_layer_load", "save_kv_layer"} & labels, "empty in OffloadingConnector: not called"


def test_a_scrape_in_the_middle_of_a_burst_is_right(server: Server, folder: Path) -> None:
    burst = partial(metered.ask_in_turn, server, 200, about="burst")
    assert assert_each_scrape_is_right(server, folder / "counts", "steered", burst, in_progress=2) > 2


def test_a_scrape_during_a_hang_is_right_to_the_last_call(server: Server, folder: Path) -> None:
    hangs = {"sleep_in": "wait_for_save", "sleep_ms": {"1": HANGS_MS}}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(metered.ask, server, prompt("hangs"), hangs, 1)
        assert_right_while_a_call_hangs(server, folder / "counts", "steered", "wait_for_save")
        asked.result()


def test_configuration_and_versions_are_metrics(server: Server) -> None:
    infos = {s.labels["connector"]: s for s in kvobs_samples(server) if s.name == "kvobs_connector_info"}
    about = ("index", "class", "role", "load_policy", "failure_policy")
    noted = {name: [s.labels[k] for k in about] for name, s in infos.items()}
    assert noted == {
        "steered": ["0", "CountingConnector", "kv_both", "first", "recompute"],
        "cpu": ["1", "OffloadingConnector", "kv_both", "first", "recompute"],
    }
    assert {s.value for s in infos.values()} == {1}
    (build,) = [s for s in kvobs_samples(server) if s.name == "kvobs_build_info"]
    assert (build.value, build.labels["version"]) == (1, kvobs.__version__)
    assert build.labels["vllm_version"].startswith("0.32")
    assert total(server, "kvobs_internal_errors_total") == 0
    assert total(server, "kvobs_overhead_seconds_total", stage="record") > 0


def test_no_label_holds_an_id_and_there_are_not_too_many_series(server: Server, folder: Path) -> None:
    samples = kvobs_samples(server)
    assert 0 < len(samples) <= metered.SERIES_AT_MOST
    ids = {json.loads(line)["request"] for line in (folder / "journal").read_text().splitlines()}
    assert len(ids) > 200
    values = {value for s in samples for value in s.labels.values()}
    assert not [value for value in values if any(part in value for part in ids)]
    metered.assert_promtool_finds_no_fault(server)


HALF_REPORTED = 60


def test_unreported_transfer_is_named_and_keeps_only_its_blocks(server: Server, folder: Path) -> None:
    """Must be the last: vLLM holds the blocks of these for ever."""
    never = {"0": 5}
    text = prompt("beside the stuck")
    alone = server.complete(text, TOKENS).tokens

    def allocations() -> int:
        return (folder / "journal").read_text().count('"event": "alloc"')

    def began_after(before: int) -> bool:
        return allocations() > before

    def get_stuck(first: int, last: int) -> None:
        for i in range(first, last):
            orders = {**metered.ASYNC, "load_ms": never}
            has_begun = partial(began_after, allocations())
            hang_up(server, has_begun, prompt("stuck load", i), kv_transfer_params={"steer": {"steered": orders}})
            metered.ask(server, prompt("stuck save", i)[:32], {"promise": True, "save_ms": never}, tokens=1)

    def held() -> list[float]:
        return [total(server, "kvobs_in_flight", connector="steered", kind=kind) for kind in ("load", "save")]

    with Growth(server, connector="steered") as grown:
        get_stuck(0, HALF_REPORTED // 2)
        before = resident(server, "EngineCor")
        get_stuck(HALF_REPORTED // 2, HALF_REPORTED)
        assert eventually(lambda: held() == [HALF_REPORTED, HALF_REPORTED]), held()
        after = resident(server, "EngineCor")
        wanted = 2 * HALF_REPORTED
        assert eventually(lambda: total(server, "kvobs_stuck_transfers_total", connector="steered", rank="1") >= wanted)
    assert grown("kvobs_stuck_transfers_total", rank="1") == grown("kvobs_stuck_transfers_total") == wanted
    assert after - before < 8 << 20
    assert server.complete(text, TOKENS).tokens == alone
    noted = "".join(line for line in server.log.read_text().splitlines() if "stuck: 1.5 s" in line)
    for kind in ("load", "save"):
        assert re.search(
            rf"connector 'steered': {kind} of \d+ requests? \(.*\) is stuck: 1.5 s .*no report from rank 1\.", noted
        )
