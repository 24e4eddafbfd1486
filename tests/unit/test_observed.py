"""Each metric from the event that causes it to the number that Prometheus reads.

vLLM's real scheduler and aggregator, two ranks, every hop pickled or packed, kvobs's metrics at its end. Time is the
test's: every step lasts 200 ms. After each step every number is right to the last call.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheKVEvents

from kvobs import faults
from kvobs.connectors.specs import STATED_BYTES
from kvobs.probe.recorder import cost_of_recording
from kvobs.schema.signals import TIMED, hook_label
from kvobs.testing import BLOCK, Script, entry_of
from kvobs.vllm_api import versions
from tests.support.observed import KV, NAMES, Observed
from tests.support.rig import assert_nothing_is_left, entry_for, forget_unused

# --- calls


def assert_calls_are_right(engine: Observed) -> None:
    """Compare each count with the calls that the connectors got."""
    counts = engine.series("kvobs_call_duration_seconds_count")
    for name, script in zip(NAMES, engine.scripts, strict=True):
        got = Counter(hook for hook, _ in script.calls if hook in TIMED and hook_label(hook) == hook)
        finished = got.pop("request_finished", 0)  # under which a script notes either of two hooks
        assert counts.get((name, "request_finished_all_groups"), 0) == finished
        assert {hook: counts.get((name, hook), 0) for hook in got} == got
        hooks = ("bind_connector_metadata", "build_connector_worker_meta", "get_kv_connector_stats")
        begun, ended, asked = (counts.get((name, hook), 0) for hook in hooks)
        assert (ended, asked) == (begun, begun + got["build_connector_meta"]), "by each rank, and by the scheduler"


def test_calls(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """After each step, and between two, every count is that of the calls which the connectors got."""
    a.offers["r"] = KV
    engine = Observed(monkeypatch, a, b)
    assert_calls_are_right(engine)
    engine.rig.add("r", max_tokens=3)
    for step in range(6):
        engine.step()
        assert_calls_are_right(engine)
        if step == 1:
            a.say(0, received="r")
            a.say(1, received="r")
        if step == 3:
            engine.rig.add("q", max_tokens=9)
        if step == 4:
            engine.rig.abort("q")
            assert_calls_are_right(engine)
    for name, script in zip(NAMES, (a, b), strict=True):
        for hook in ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "start_load_kv",
                     "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_transfer_results",
                     "handle_preemptions", "bind_connector_metadata", "build_connector_meta"):  # fmt: skip
            count = engine.value("kvobs_call_duration_seconds_count", name, hook=hook)
            assert count == len(script.called(hook)) > 0, hook
            assert engine.value("kvobs_call_duration_seconds_sum", name, hook=hook) > 0
    assert engine.value("kvobs_call_duration_seconds_count", "one", hook="request_finished_all_groups") == 2
    empty = {key[1] for key in engine.series("kvobs_call_duration_seconds_count")} & {"finish_forward", "other"}
    assert empty == {"other"}, "a hook that is empty in all is not called; those called once share a label"


def test_a_scrape_within_a_step_is_right_to_the_last_call(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """As if the engine hung in one: all calls before it are there, and it is not."""
    engine, seen = Observed(monkeypatch, a, b), list[str]()

    def look(hook: str, detail: Any) -> None:
        if hook in ("start_load_kv", "update_state_after_alloc", "wait_for_save"):
            seen.append(hook)
            before = len(b.called(hook)) - 1
            assert engine.value("kvobs_call_duration_seconds_count", "two", hook=hook) == before
            assert engine.value("kvobs_call_duration_seconds_count", "one", hook=hook) == len(a.called(hook))
            assert engine.value("kvobs_lookups_total", "two", outcome="miss") == 1

    b.on_call = look
    engine.rig.add("r")
    engine.step(2)
    assert set(seen) == {"start_load_kv", "update_state_after_alloc", "wait_for_save"}


# --- lookups


def test_offers(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = (BLOCK, True), (3 * BLOCK, True)
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r")
    engine.step(1)
    for metric, one, two in (
        ("kvobs_offered_tokens_total", BLOCK, 3 * BLOCK),
        ("kvobs_admitted_tokens_total", BLOCK, 0),
        ("kvobs_unused_offers_total", 0, 1),
    ):
        assert (engine.value(metric, "one"), engine.value(metric, "two")) == (one, two), metric
    if "get_external_cache_hit_sources" in versions.hooks():
        assert engine.series("kvobs_hit_tokens_total") == {("one", "unspecified"): BLOCK}
    lost = {key: n for key, n in engine.series("kvobs_unused_hit_tokens_total").items() if n}
    assert lost == {("two", "other_chosen"): 2 * BLOCK}


def test_a_save_counts_for_a_request_ended_before_its_lookup(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    b.promises.add("r")
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r")
    engine.rig.abort("r")
    b.say(0, saved="r")
    b.say(1, saved="r")
    engine.step()
    assert engine.value("kvobs_lookups_total", "two") == 0
    assert engine.value("kvobs_saves_total", "two", outcome="ok") == 1
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("kind", ["load", "save"])
def test_a_transfer_that_a_rank_never_reports(
    kind: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank of three is silent; half a second after the others it is named, once."""
    word = "received" if kind == "load" else "saved"
    b.offers["r"] = KV if kind == "load" else (0, False)
    b.promises.add("r")
    engine = Observed(monkeypatch, a, b, ranks=3, stuck_after_s=0.5)
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    b.say(0, **{word: "r"})
    engine.step()
    b.say(2, **{word: "r"})
    engine.step(2)
    assert engine.series("kvobs_stuck_transfers_total") == {}
    engine.step(3)
    assert engine.series("kvobs_stuck_transfers_total") == {("two", "1"): 1}
    (line,) = (record.getMessage() for record in caplog.records if "stuck" in record.getMessage())
    assert line.startswith(
        f"connector 'two': {kind} of 1 request (r) is stuck: 0.5 s after another rank reported it, there is no report "
        "from rank 1."
    )
    assert engine.value("kvobs_in_flight", "two", kind=kind) == 1
    b.say(1, **{word: "r"})
    engine.step(2)
    assert engine.value("kvobs_in_flight", "two", kind=kind) == 0, "late is not lost"


def test_block_copies(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Observed(monkeypatch, a, b)
    for worker in engine.rig.workers:
        worker.set_host_xfer_buffer_ops(copy_kv_blocks)
    cache = {f"layer.{i}": torch.arange(64.0).view(16, 4) + i for i in range(2)}
    buffer = {layer: torch.zeros(8, 4) for layer in cache}
    copies = [worker._connectors[1].copy_blocks for worker in engine.rig.workers]
    for copy in copies:
        copy(cache, buffer, [3, 15], [0, 1], "d2h")
    copies[1](buffer, cache, [0], [9], "h2d")
    assert buffer["layer.1"][1].tolist() == cache["layer.1"][15].tolist() == [61, 62, 63, 64]
    assert cache["layer.0"][9].tolist() == [12, 13, 14, 15]
    engine.rig.add("r")
    engine.step()
    block = 2 * 4 * 4  # layers, numbers, bytes
    for direction, blocks, calls in (("d2h", 4, 2), ("h2d", 1, 1)):
        assert engine.value("kvobs_block_copy_bytes_total", "two", direction=direction) == blocks * block
        assert engine.value("kvobs_block_copy_duration_seconds_count", "two", direction=direction) == calls
        assert engine.value("kvobs_block_copy_bytes_total", "one", direction=direction) == 0


# --- kvobs itself


@pytest.mark.usefixtures("in_production")
def test_faults_and_cost_of_its_own(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Observed(monkeypatch, a, b, ranks=1)
    engine.rig.add("r")
    engine.step()
    try:
        1 // 0  # noqa: B018 - a fault in some process
    except ZeroDivisionError:
        faults.contain("record")
    for _ in range(2):
        assert engine.value("kvobs_internal_errors_total", None, where="record") == 1
    calls = sum(engine.series("kvobs_call_duration_seconds_count").values())
    cost = engine.value("kvobs_overhead_seconds_total", None, stage="record")
    assert cost == pytest.approx(calls * cost_of_recording() / 1e9, rel=1e-3)


def test_lines_of_the_request_log_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    monkeypatch.setattr("kvobs.telemetry.requests.request_log.WAITING_AT_MOST", 2)
    engine = Observed(monkeypatch, a, b, ranks=1, request_log="/dev/full")
    for request in map(str, range(8)):
        engine.rig.add(request, max_tokens=1)
        engine.step(2)
    engine.step()
    engine.rig.connector.shutdown()
    assert 6 <= engine.value("kvobs_request_log_dropped_total", None) <= 8, "two may be in the write that fails"


def test_reuse(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    monkeypatch.setitem(STATED_BYTES, "ScriptedConnector", {"bytes": True})
    connectors = [entry_for(a), entry_of(b, kv_connector_extra_config={"tag": b.tag, "bytes": 1_024_000})]
    engine = Observed(monkeypatch, a, b, ranks=1, connectors=connectors)
    for request in ("r", "r2"):
        engine.rig.add(request, tokens=3 * BLOCK, prompt_of="r")
        engine.step(3)
        forget_unused(engine.rig)
    buckets = engine.series("kvobs_reuse_distance_tokens_bucket")
    assert (buckets[("1024.0",)], buckets[("+Inf",)]) == (2 * BLOCK, 4 * BLOCK), "the last token is always computed"
    assert engine.value("kvobs_prompt_tail_tokens_total", None) == 2 * BLOCK
    assert engine.value("kvobs_loadable_tokens_total", None) == 2 * BLOCK
    assert engine.value("kvobs_local_cache_tokens", None) == 64 * BLOCK
    assert engine.series("kvobs_capacity_tokens") == {("two",): 1000}


def test_saved_tokens_are_counted_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """As LMCache reports them: what all ranks with events have is published. Of the second one only rank 1 has some."""
    engine = Observed(monkeypatch, a, b)

    def publish(script: Script) -> Any:
        def published(output: Any) -> None:
            events = output.kv_cache_events
            script.answers["take_events"] = events.aggregate().get_all_events() if events is not None else ()

        return published

    a.on_output, b.on_output = publish(a), publish(b)
    both, one = (BlockStored([i], None, [1] * BLOCK, BLOCK, None, "STORAGE", None) for i in (1, 2))
    for script, rank, stored in ((a, 0, [both, one]), (a, 1, [both]), (b, 1, [both, one])):
        script.events[rank] = LMCacheKVEvents(num_workers=1)
        script.events[rank].add_events(stored)
    engine.rig.add("r")
    engine.step(3)
    assert engine.series("kvobs_save_tokens_total") == {("one", "storage"): BLOCK, ("two", "storage"): 2 * BLOCK}


# --- nothing is left behind


def test_after_the_last_step_of_a_burst_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """Steps follow each other within 100 ms; vLLM stops stepping once nothing is left to do."""
    b.promises.update(f"r{i}" for i in range(5))
    engine = Observed(monkeypatch, a, b)
    for i in range(5):
        engine.rig.add(f"r{i}", max_tokens=2)
    for _ in range(20):  # as vLLM does: while a request is unfinished, and once more to report the last
        if engine.rig.scheduler.has_requests():
            engine.step(seconds=1e-4)
    assert engine.value("kvobs_lookups_total", outcome="miss") == 5
    assert engine.value("kvobs_call_duration_seconds_count", "two", hook="request_finished_all_groups") == 5
    for rank in (0, 1):
        b.say(rank, saved=" ".join(f"r{i}" for i in range(5)))
    engine.step(seconds=1e-4)  # vLLM steps on while a connector holds blocks
    assert engine.value("kvobs_saves_total", "two", outcome="ok") == 5
    assert engine.value("kvobs_in_flight", "two", kind="save") == 0
