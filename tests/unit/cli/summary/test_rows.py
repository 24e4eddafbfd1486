"""The numbers of a run are those that were counted in it, of all engines and modes, and no others."""

from dataclasses import asdict
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvobs.cli.scrapes import parse, parse_vllm
from kvobs.cli.summary.rows import (
    MEASURES,
    NAMES,
    ConnectorSums,
    PromptTokens,
    connector_sums,
    prompt_tokens,
    server_sums,
    shown,
    since_start,
)
from kvobs.export.numbers import Numbers, Scrape
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import LOAD_DURATION
from tests.support.top_engines import Engines, count
from tests.support.top_rows import ERRORS, RANKS, busy

BEFORE = """
kvobs_start_time_seconds{engine="0",model_name="tiny"} 1000.0
kvobs_lookups_total{connector="cpu",engine="0",model_name="tiny",outcome="hit"} 1.0
kvobs_lookups_total{connector="cpu",engine="0",model_name="tiny",outcome="miss"} 2.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 100.0
"""

AFTER = """
kvobs_start_time_seconds{engine="0",model_name="tiny"} 1000.0
kvobs_connector_info{connector="disk",class="B",engine="0",index="1",model_name="tiny"} 1.0
kvobs_connector_info{connector="cpu",class="A",engine="0",index="0",model_name="tiny"} 1.0
kvobs_build_info{engine="0",model_name="tiny",version="0.2.0",vllm_version="0.32.0"} 1.0
kvobs_lookups_total{connector="cpu",engine="0",model_name="tiny",outcome="hit"} 11.0
kvobs_lookups_total{connector="cpu",engine="1",model_name="tiny",outcome="hit"} 5.0
kvobs_lookups_total{connector="cpu",engine="0",model_name="tiny",outcome="miss"} 6.0
kvobs_lookups_total{connector="cpu",engine="0",model_name="tiny",outcome="timeout"} 1.0
kvobs_lookups_total{connector="disk",engine="0",model_name="tiny",outcome="pending"} 54321.0
kvobs_offered_tokens_total{connector="cpu",engine="0",model_name="tiny"} 4096.0
kvobs_offered_tokens_total{connector="disk",engine="0",model_name="tiny"} 2048.0
kvobs_unused_hit_tokens_total{connector="disk",engine="0",model_name="tiny",reason="other_chosen"} 64.0
kvobs_unused_hit_tokens_total{connector="disk",engine="0",model_name="tiny",reason="aborted"} 54321.0
kvobs_loads_total{connector="cpu",engine="0",mode="async",model_name="tiny",outcome="ok"} 3.0
kvobs_loads_total{connector="cpu",engine="0",mode="sync",model_name="tiny",outcome="ok"} 1.0
kvobs_loads_total{connector="cpu",engine="0",mode="async",model_name="tiny",outcome="aborted"} 2.0
kvobs_loads_total{connector="cpu",engine="0",mode="async",model_name="tiny",outcome="failed"} 3.0
kvobs_call_errors_total{connector="cpu",engine="0",hook="start_load_kv",error_type="OSError",model_name="tiny"} 2.0
kvobs_corrupt_blocks_total{connector="cpu",engine="0",model_name="tiny",rank="0"} 5.0
kvobs_corrupt_blocks_total{connector="cpu",engine="0",model_name="tiny",rank="1"} 2.0
kvobs_load_tokens_total{connector="cpu",engine="0",model_name="tiny"} 3968.0
kvobs_load_bytes_total{connector="cpu",engine="0",model_name="tiny"} 1.6e+09
kvobs_load_duration_seconds_sum{connector="cpu",engine="0",mode="async",model_name="tiny"} 0.06
kvobs_load_duration_seconds_sum{connector="cpu",engine="0",mode="sync",model_name="tiny"} 0.02
kvobs_load_duration_seconds_count{connector="cpu",engine="0",mode="async",model_name="tiny"} 3.0
kvobs_load_duration_seconds_count{connector="cpu",engine="0",mode="sync",model_name="tiny"} 1.0
kvobs_load_stall_seconds_sum{connector="cpu",engine="0",model_name="tiny"} 0.5
kvobs_save_stall_seconds_sum{connector="cpu",engine="0",model_name="tiny"} 0.25
kvobs_save_stall_seconds_sum{connector="disk",engine="0",model_name="tiny"} 54.321
kvobs_prefill_saved_seconds_total{connector="cpu",engine="0",model_name="tiny"} 0.9
kvobs_load_waited_seconds_total{connector="cpu",engine="0",model_name="tiny"} 0.4
kvobs_estimated_loads_total{connector="cpu",engine="0",model_name="tiny"} 3.0
kvobs_missed_tokens_total{connector="cpu",engine="0",model_name="tiny",reason="evicted"} 192.0
kvobs_missed_tokens_total{connector="cpu",engine="0",model_name="tiny",reason="never_seen"} 64.0
kvobs_estimate_prefills_total{engine="0",model_name="tiny"} 5.0
kvobs_call_duration_seconds_sum{connector="cpu",engine="0",hook="get_num_new_matched_tokens",model_name="tiny"} 0.125
kvobs_call_duration_seconds_sum{connector="cpu",engine="0",hook="start_load_kv",model_name="tiny"} 54321.0
kvobs_load_tokens_created{connector="cpu",engine="0",model_name="tiny"} 1.7e+09
vllm:kv_offload_load_bytes_total{connector="cpu",engine="0",model_name="tiny"} 99.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 350.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 500.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 250.0
"""


def scrape(text: str) -> Scrape:
    return Scrape(0.0, parse(text), parse_vllm(text))


def test_each_connectors_growth_is_summed_over_engines_and_modes() -> None:
    server = server_sums("here", [(scrape(BEFORE), scrape(AFTER))], 60)
    assert (server.server, server.model, server.seconds, server.restarted) == ("here", "tiny", 60, False)
    assert (server.vllm_version, server.kvobs_version, server.prefills_seen) == ("0.32.0", "0.2.0", 5)
    cpu, disk = server.connectors
    assert asdict(cpu) == {
        "connector": "cpu", "lookups": 20, "hits": 15, "hit_share": 0.75, "pending": 0, "timeouts": 1, "not_read": 0,
        "offered_tokens": 4096, "lost_tokens": 0, "loads": 4, "failed_loads": 3, "aborted_loads": 2, "exceptions": 2,
        "loaded_tokens": 3968, "loaded_bytes": 1_600_000_000, "bytes_per_s": pytest.approx(2e10),
        "load_p50_s": None, "load_p99_s": None, "load_mean_s": pytest.approx(0.02), "load_stall_s": 0.5,
        "save_stall_s": 0.25, "estimated_loads": 3, "saved_s": 0.9, "waited_s": 0.4, "scheduler_s": 0.125,
        "missed_tokens": {"never_seen": 64, "evicted": 192}, "corrupt_blocks": 7,
    }  # fmt: skip
    assert (disk.connector, disk.lookups, disk.hit_share, disk.pending) == ("disk", 0, None, 54321)
    assert (disk.offered_tokens, disk.lost_tokens, disk.save_stall_s, disk.saved_s) == (2048, 64, 54.321, None)
    assert server.prompt_tokens == PromptTokens(250, 500, {"cpu": 250})
    assert server.prompt_tokens.all == 1000


def test_without_a_text_before_all_is_since_the_start() -> None:
    server = server_sums("here", [(None, scrape(AFTER))], None)
    assert [row.lookups for row in server.connectors] == [23, 0]
    assert server.prompt_tokens == PromptTokens(350, 500, {"cpu": 250})
    assert (since_start(scrape(AFTER)) or 0) > 1e9
    assert since_start(scrape('kvobs_loads_total{connector="a"} 1\n')) is None


def test_a_restarted_engine_counts_anew_even_if_no_counter_fell() -> None:
    later = AFTER.replace("1000.0", "2000.0")
    server = server_sums("here", [(scrape(BEFORE), scrape(later))], 60)
    assert (server.restarted, server.connectors[0].lookups) == (True, 23)
    assert server.prompt_tokens == PromptTokens(350, 500, {"cpu": 250})


def test_an_ended_engine_is_named_with_the_call_it_died_in() -> None:
    ended = 'kvobs_engine_ended{connector="cpu",engine="0",hook="start_load_kv",reason="SIGKILL"} 1.0\n'
    pair = scrape(BEFORE), scrape(AFTER + ended)
    server = server_sums("here", [pair], 60)
    assert (server.ended, server.connectors[0].lookups) == (
        "its engine has ended in start_load_kv of connector cpu: SIGKILL", 20
    )  # fmt: skip
    assert server_sums("here", [pair, pair], 60).ended == "", "others go on"
    assert server_sums("here", [(None, scrape(AFTER))], 60).ended == ""


def test_several_processes_with_the_same_labels_are_added_up() -> None:
    pair = scrape(BEFORE), scrape(AFTER)
    server = server_sums("here", [pair, pair, (None, scrape(AFTER))], 60)
    assert [row.connector for row in server.connectors] == ["cpu", "disk"]
    assert server.connectors[0].lookups == 20 + 20 + 23
    assert server.prompt_tokens == PromptTokens(250 + 250 + 350, 1500, {"cpu": 750})


@pytest.mark.parametrize(("before", "after"), [(BEFORE, ""), ("", AFTER)])
def test_prompt_tokens_need_two_readings_of_vllms_metrics(before: str, after: str) -> None:
    first, last = scrape(BEFORE), scrape(AFTER)
    pair = Scrape(0, first.values, parse_vllm(before)), Scrape(0, last.values, parse_vllm(after))
    assert server_sums("here", [pair], 60).prompt_tokens is None


def sums(**more: Any) -> ConnectorSums:
    return connector_sums(more.pop("connector", "cpu"), Numbers()).__class__(
        **asdict(connector_sums("cpu", Numbers())) | more
    )


@given(st.lists(st.integers(0, 10**9), max_size=5), st.integers(0, 10**9))
def test_what_was_loaded_is_split_up_without_a_rest(loaded: list[int], external: int) -> None:
    rows = [sums(connector=f"c{i}", loaded_tokens=n) for i, n in enumerate(loaded)]
    series = ("vllm:prompt_tokens_by_source_total", frozenset({("source", "external_kv_transfer")}))
    found = prompt_tokens(Numbers.of([(series, external)]), rows)
    assert found is not None
    assert sum(found.loaded.values()) == found.all == external
    if external == sum(loaded):
        assert found.loaded == {row.connector: row.loaded_tokens for row in rows if row.loaded_tokens}
    assert all(n > 0 for n in found.loaded.values())


def test_numbers_are_exact_and_percentiles_within_a_tenth() -> None:
    """Against an independent count of the same durations."""
    engines = Engines("cpu", "disk", engines=2)
    engines.send(busy, opened=[*RANKS, *ERRORS])
    before = engines.scrape()
    durations = [3_000_000 * (i + 1) for i in range(200)]

    def load(recorder: Recorder) -> None:
        for ns in durations:
            recorder.observe(0, LOAD_DURATION, ns, "async")
        count(recorder, 0, signals.LOADS, len(durations), "async", "ok")
        count(recorder, 0, signals.LOAD_BYTES, 10**9)

    for engine in (0, 1):
        engines.send(load, engine=engine)
    cpu, disk = server_sums("here", [(before, engines.scrape())], 1).connectors
    assert (cpu.loads, cpu.loaded_bytes, disk.loads, cpu.exceptions) == (400, 2 * 10**9, 0, 0)
    assert cpu.load_mean_s == pytest.approx(sum(durations) / len(durations) / 1e9)
    assert cpu.load_p50_s == pytest.approx(durations[99] / 1e9, rel=0.1)
    assert cpu.load_p99_s == pytest.approx(durations[197] / 1e9, rel=0.1)
    assert cpu.bytes_per_s == pytest.approx(2e9 / (2 * sum(durations) / 1e9))


def test_each_field_has_one_measure_and_empty_ones_are_left_out() -> None:
    assert [measure.field for measure in MEASURES] == sorted(
        asdict(sums()).keys() - {"connector", "missed_tokens"}, key=[measure.field for measure in MEASURES].index
    )
    assert len({measure.title for measure in MEASURES}) == len(MEASURES)
    quiet = [measure.field for measure in shown([sums()])]
    assert quiet == [
        "lookups", "hit_share", "offered_tokens", "loaded_tokens", "loads", "failed_loads", "scheduler_s"
    ]  # fmt: skip
    assert "exceptions" in [measure.field for measure in shown([sums(), sums(exceptions=1)])]


def test_all_metrics_that_are_read_are_asked_of_a_prometheus() -> None:
    """With only these in a text the numbers are the same."""
    lines = [line for line in AFTER.splitlines() if line.partition("{")[0] in NAMES or line.startswith("vllm")]
    assert len(lines) < len(AFTER.splitlines())
    whole, part = (server_sums("", [(None, scrape(text))], 1) for text in (AFTER, "\n".join(lines) + "\n"))
    assert whole == part
