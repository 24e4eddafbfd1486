"""What loads count, from the event that causes it to the number that Prometheus reads: see ``test_observed``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from kvobs.connectors.specs import STATED_BYTES
from kvobs.routing.isolation import GIVE_UP_NS
from kvobs.testing import BLOCK, Rig, Script, entry_of
from kvobs.testing.rig import cache_config
from tests.support.observed import BYTES_PER_TOKEN, KV, NAMES, STEP_S, SYNC, Observed, S
from tests.support.rig import assert_nothing_is_left, entry_for, forget_unused


def test_an_async_load(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Allocated in step 1, received by rank 0 in step 2, by rank 1 in step 4; its request goes on in step 5."""
    a.offers["r"] = KV
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r")
    engine.step()
    assert engine.value("kvobs_in_flight", kind="load") == 1
    engine.now_ns += S  # no step runs
    assert engine.value("kvobs_oldest_in_flight_seconds", kind="load") == pytest.approx(1)
    engine.now_ns -= S
    assert engine.value("kvobs_held_tokens", kind="load") == 2 * BLOCK
    a.say(0, received="r")
    engine.step(2)
    assert engine.value("kvobs_load_duration_seconds_count", mode="async") == 0
    assert engine.value("kvobs_in_flight", kind="load") == 1
    a.say(1, received="r")
    engine.step()
    assert engine.value("kvobs_loads_total", mode="async", outcome="ok") == 1
    assert engine.value("kvobs_in_flight", kind="load") == 0
    assert engine.value("kvobs_in_flight", kind="awaiting_schedule") == 1
    assert engine.value("kvobs_load_resume_delay_seconds_count") == 0
    engine.step()
    assert engine.value("kvobs_in_flight", kind="awaiting_schedule") == 0
    assert engine.value("kvobs_load_tokens_total") == 2 * BLOCK
    assert engine.value("kvobs_load_bytes_total") == 2 * BLOCK * BYTES_PER_TOKEN * 2
    assert engine.value("kvobs_load_duration_seconds_count", mode="async") == 1
    assert engine.value("kvobs_load_duration_seconds_sum", mode="async") == pytest.approx(3 * STEP_S)
    assert engine.value("kvobs_rank_skew_seconds_sum", kind="load") == pytest.approx(2 * STEP_S)
    assert engine.series("kvobs_slowest_rank_total") == {("one", "1"): 1}
    assert engine.value("kvobs_in_flight", kind="load") == 0
    assert engine.value("kvobs_held_tokens", kind="load") == 0
    assert engine.value("kvobs_oldest_in_flight_seconds", kind="load") == 0
    assert engine.value("kvobs_load_resume_delay_seconds_count") == 1
    assert engine.value("kvobs_load_resume_delay_seconds_sum") == pytest.approx(STEP_S)
    assert {index for index, *_ in engine.series("kvobs_load_duration_seconds_count")} == {"one"}


GAUGES = ("in_flight", "oldest_in_flight_seconds", "held_tokens")


def assert_gauges_are_right(engine: Observed, names: Sequence[str] = NAMES) -> dict[str, int]:
    """Compare the gauges with what the router knows; return what is in flight."""
    side, seen = engine.rig.connector._side, dict[str, int]()
    for index, name in enumerate(names):
        for kind, open_now in {"lookup": side.lookups._awaited[index], **side.ledger.in_flight[index]}.items():
            n, age_s = len(open_now), engine.value("kvobs_oldest_in_flight_seconds", name, kind=kind)
            assert engine.value("kvobs_in_flight", name, kind=kind) == n, (name, kind)
            assert age_s == pytest.approx((engine.now_ns - open_now.oldest_ns) / S if n else 0), (name, kind)
            if kind != "lookup":
                assert engine.value("kvobs_held_tokens", name, kind=kind) == open_now.tokens, (name, kind)
            if n:
                seen[f"{name} {kind}"] = n
    return seen


def test_the_gauges_are_right_after_each_event(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Requests wait for a lookup, load, wait to go on, and have their blocks saved; and each is also aborted in that.

    A client leaves between two steps: then a gauge must not wait for the next one.
    """
    engine = Observed(monkeypatch, a, b, lookup_timeout_ms=100_000)
    a.offers |= {name: [(None, False)] * 9 for name in ("asks", "asked")}
    for name in ("loads", "loaded", "resumes"):
        b.offers[name] = KV
    b.promises |= {"asked", "loaded", "saves", "saved"}
    seen = []

    def look() -> None:
        seen.append(assert_gauges_are_right(engine))

    for name in ("asks", "asked"):
        engine.rig.add(name, max_tokens=1)
    engine.step()
    look()
    engine.rig.abort("asks")
    look()
    engine.rig.abort("asked")  # with a promise
    look()
    for rank in (0, 1):
        b.say(rank, saved="asked")
        engine.step()
        look()
    for name in ("loads", "loaded", "resumes"):
        engine.rig.add(name, max_tokens=1)
    engine.step()
    look()
    engine.rig.abort("loads")
    look()
    b.say(0, received="loads loaded resumes")
    engine.step()
    look()
    tokens = engine.rig.scheduler.max_num_scheduled_tokens
    engine.rig.scheduler.max_num_scheduled_tokens = 0
    b.say(1, received="loads loaded resumes")
    engine.step()
    look()
    engine.rig.abort("resumes")
    look()
    engine.rig.abort("loaded")
    look()
    engine.rig.scheduler.max_num_scheduled_tokens = tokens
    for name in ("saves", "saved"):
        engine.rig.add(name, max_tokens=1)
        engine.step()
        look()
    for rank in (0, 1):
        b.say(rank, saved="loaded saves saved")
        engine.step()
        look()
    assert seen == [
        *({"one lookup": 2}, {"one lookup": 1}, {"two save": 1}, {"two save": 1}, {}),
        *(
            {"two load": 3},
            {"two load": 3},
            {"two load": 3},
            {"two awaiting_schedule": 2},
            {"two awaiting_schedule": 1},
            {"two save": 1},
        ),
        *({"two save": 2}, {"two save": 3}, {"two save": 3}, {}),
    ]
    assert_nothing_is_left(engine.rig)


def test_gauges_are_right_in_a_quarantine_and_after_giving_up(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    monkeypatch.setattr("tests.support.observed.entry_for", partial(entry_for, cls="BestEffortConnector"))
    engine = Observed(monkeypatch, a, b, best_effort=["two"], lookup_timeout_ms=10**9)
    b.offers |= {"load": KV, "asks": [(None, False)] * 99}
    b.promises.add("save")
    for name in ("load", "asks", "save"):
        engine.rig.add(name, max_tokens=1)
    engine.step()
    assert assert_gauges_are_right(engine) == {"two load": 1, "two lookup": 1, "two save": 1}
    b.raises["on_new_request"] = OSError("gone")
    engine.rig.add("new", max_tokens=1)  # between two steps
    assert engine.series("kvobs_quarantined") == {("two",): 1}
    assert_gauges_are_right(engine)
    b.raises["build_connector_meta"] = OSError("gone")
    engine.step()
    assert_gauges_are_right(engine)
    engine.step(seconds=GIVE_UP_NS / S + 1)
    assert_gauges_are_right(engine)
    engine.step(3)
    assert assert_gauges_are_right(engine) == {}


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_load_that_is_in_and_not_resumed(
    is_aborted: bool, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine waits, and makes empty steps."""
    a.offers["r"] = KV
    engine = Observed(monkeypatch, a, b, ranks=1, stuck_after_s=1)
    engine.rig.add("r")
    engine.step()
    tokens = engine.rig.scheduler.max_num_scheduled_tokens
    engine.rig.scheduler.max_num_scheduled_tokens = 0
    a.say(0, received="r")
    engine.step(2)
    assert engine.value("kvobs_in_flight", kind="awaiting_schedule") == 1
    engine.step(9)
    gauges = {
        kind: tuple(engine.value(f"kvobs_{name}", kind=kind) for name in GAUGES)
        for kind in ("load", "awaiting_schedule", "save")
    }
    assert gauges == {
        "load": (0, 0, 0),
        "awaiting_schedule": (1, pytest.approx(10 * STEP_S), 2 * BLOCK),
        "save": (0, 0, 0),
    }
    if is_aborted:
        engine.rig.abort("r")
    else:
        engine.rig.scheduler.max_num_scheduled_tokens = tokens
    engine.step(2)
    assert [engine.value(f"kvobs_{name}", kind="awaiting_schedule") for name in GAUGES] == [0, 0, 0]
    assert [record.getMessage() for record in caplog.records if "in progress" in record.message] == [
        "connector 'one': scheduling of 1 request (r) in progress for 1 s (32 tokens), waiting for vLLM's scheduler"
    ]


class Hybrid(Rig):
    """An engine whose layers are not all of full attention: eight of a sliding window of two blocks, two of all."""

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        caches = cache_config(blocks)
        (of_all,) = caches.kv_cache_groups
        shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
        names = [[f"layer.{i}" for i in range(first, first + 4)] for first in (2, 6)]
        windows = [KVCacheGroupSpec(of, SlidingWindowSpec(**shape, sliding_window=2 * BLOCK)) for of in names]
        caches.kv_cache_groups = [KVCacheGroupSpec(["layer.0", "layer.1"], of_all.kv_cache_spec), *windows]
        return caches


@pytest.mark.parametrize(("offer", "is_second"), [(16, False), (8, True)])
def test_a_load_of_a_hybrid_model_has_the_bytes_of_its_blocks(
    offer: int, is_second: bool, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """The second one is behind eight blocks that vLLM's own cache has. A window that begins at a block has two."""
    monkeypatch.setattr(Observed, "make_rig", Hybrid)
    monkeypatch.setitem(STATED_BYTES, "ScriptedConnector", {"bytes": True})
    connectors = [entry_of(script, kv_connector_extra_config={"tag": script.tag, "bytes": 9999}) for script in (a, b)]
    engine = Observed(monkeypatch, a, b, connectors=connectors)
    if is_second:
        engine.rig.add("r", tokens=8 * BLOCK + 1, max_tokens=1, prompt_of="r")
        engine.step(3)
    a.offers["r2"] = (offer * BLOCK, True)
    engine.rig.add("r2", tokens=16 * BLOCK + 1, prompt_of="r")
    engine.step()
    for rank in (0, 1):
        a.say(rank, received="r2")
    engine.step(2)
    assert engine.value("kvobs_load_tokens_total") == offer * BLOCK
    assert engine.value("kvobs_load_bytes_total") == (offer * 2 + 2 * 8) * BLOCK * BYTES_PER_TOKEN * 2
    assert not engine.series("kvobs_capacity_tokens"), "a token has no size"


class WindowFirst(Hybrid):
    """The same with its groups in another order."""

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        caches = super()._caches(blocks, groups)
        caches.kv_cache_groups.reverse()
        return caches


def test_tokens_are_stored_once_for_all_groups(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """The last group has all tokens, others those of a window."""
    monkeypatch.setattr(Observed, "make_rig", WindowFirst)
    engine = Observed(monkeypatch, a, b)
    b.answers["take_events"] = [
        BlockStored([i], None, [1] * BLOCK * n, BLOCK * n, None, "CPU", None, group_idx=group)
        for i, (group, n) in enumerate(((0, 1), (1, 1), (2, 3)))
    ]
    engine.step()
    b.answers.clear()
    engine.step(2)
    assert engine.series("kvobs_save_tokens_total") == {("two", "cpu"): 3 * BLOCK}


def test_evicted_blocks_that_a_prompt_asks_for_again_are_counted(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """Connector two evicts the end of a prompt; the next prompt has a part of that."""
    engine = Observed(monkeypatch, a, b)
    hashes = list(engine.rig.add("r", [7] * (4 * BLOCK + 1), max_tokens=1).block_hashes)
    engine.step(3)
    b.answers["take_events"] = [BlockRemoved([maybe_convert_block_hash(each) for each in hashes[1:]], "CPU")]
    engine.step()
    b.answers.clear()
    forget_unused(engine.rig)
    b.offers["s"] = (BLOCK, True)
    engine.rig.add("s", [7] * (3 * BLOCK + 1), max_tokens=1)
    engine.step(3)
    assert engine.series("kvobs_evicted_followed_tokens_total") == {("two", "cpu"): 3 * BLOCK}
    assert engine.series("kvobs_evicted_reused_tokens_total") == {("two", "cpu"): 2 * BLOCK}
    assert engine.series("kvobs_missed_tokens_total") == {
        **{(name, "never_seen"): 4 * BLOCK for name in ("one", "two")},
        **{(name, "no_full_block"): 2 for name in ("one", "two")},
        ("one", "other_connector"): BLOCK,
        ("one", "not_stored"): 2 * BLOCK,
        ("two", "evicted"): 2 * BLOCK,  # it offers the first block
    }


class Indexed(Rig):
    """An engine with layers that differ, of which vLLM gives its scheduler one."""

    def _caches(self, blocks: int, groups: int) -> KVCacheConfig:
        caches = cache_config(blocks)
        (group,) = caches.kv_cache_groups
        small: Any = replace(group.kv_cache_spec, head_size=16, head_size_v=16)
        specs = {"layer.0": group.kv_cache_spec, "layer.1": small}
        group.layer_names, group.kv_cache_spec = list(specs), UniformTypeKVCacheSpecs(BLOCK, kv_cache_specs=specs)
        return caches


def test_layers_that_differ_have_their_own_sizes(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    monkeypatch.setattr(Observed, "make_rig", Indexed)
    monkeypatch.setitem(STATED_BYTES, "ScriptedConnector", {"bytes": True})
    both = BYTES_PER_TOKEN * 5 // 4
    connectors = [entry_of(each, kv_connector_extra_config={"tag": each.tag, "bytes": 99 * both}) for each in (a, b)]
    a.offers["r"] = SYNC
    engine = Observed(monkeypatch, a, b, connectors=connectors)
    engine.rig.add("r")
    engine.step(2)
    assert engine.value("kvobs_load_bytes_total") == 2 * BLOCK * both * 2
    assert engine.series("kvobs_capacity_tokens") == {("one",): 99, ("two",): 99}


class Staged(Rig):
    """An engine of two pipeline stages: rank 0 has one layer, rank 1 three; the scheduler has rank 0's groups."""

    def _configure(self, config: Any) -> None:
        config.parallel_config.pipeline_parallel_size = 2

    def _build_worker(self, cls: Any, config: Any, caches: KVCacheConfig) -> Any:
        if config.parallel_config.rank == 1:
            caches = cache_config()
            caches.kv_cache_groups[0].layer_names = ["layer.1", "layer.2", "layer.3"]
        return super()._build_worker(cls, config, caches)


def test_pipeline_stages_have_their_own_layers(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    monkeypatch.setattr(Observed, "make_rig", Staged)
    a.offers["r"] = SYNC
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r")
    engine.step(2)
    assert engine.value("kvobs_load_bytes_total") == 2 * BLOCK * BYTES_PER_TOKEN * (1 + 3)


def test_a_sync_load_takes_what_the_slowest_rank_took(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    b.offers["r"] = SYNC
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r", max_tokens=1)
    engine.step()
    took = [worker._side._load_ns[1] / 1e9 for worker in engine.rig.workers]
    assert engine.value("kvobs_loads_total", "two", mode="sync", outcome="ok") == 1
    assert engine.value("kvobs_load_duration_seconds_sum", "two", mode="sync") == pytest.approx(max(took))
    assert engine.value("kvobs_rank_skew_seconds_sum", "two", kind="load") == pytest.approx(max(took) - min(took))
    assert engine.series("kvobs_slowest_rank_total") == {("two", str(took.index(max(took)))): 1}
    calls = sum(
        engine.value("kvobs_call_duration_seconds_sum", "two", hook=hook)
        for hook in ("start_load_kv", "wait_for_layer_load")
    )
    assert sum(took) == pytest.approx(calls)


def test_loads_saved_and_waited_seconds(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """Each token is computed in 5 ms: 32 tokens in 160 ms. The first load takes two steps, the second none."""
    engine = Observed(monkeypatch, a, b, ranks=1)
    engine.token_s = 0.005
    for i in range(40):
        engine.rig.add(f"cold{i}", tokens=20 + 7 * i % 90, max_tokens=1)
        engine.step()
    assert engine.value("kvobs_step_seconds_total", None) > 0
    a.offers["slow"], b.offers["quick"] = KV, SYNC
    for request in ("slow", "quick"):
        engine.rig.add(request)
        engine.step()
    a.say(0, received="slow")
    engine.step(4)
    for index in NAMES:
        assert engine.value("kvobs_prefill_saved_seconds_total", index) == pytest.approx(0.16, rel=0.05), index
    loaded = engine.value("kvobs_load_duration_seconds_sum", mode="async")
    resumed = loaded + engine.value("kvobs_load_resume_delay_seconds_sum")
    assert engine.value("kvobs_load_waited_seconds_total") == pytest.approx(resumed, abs=3 * engine.token_s)
    quick = engine.value("kvobs_load_duration_seconds_sum", "two", mode="sync")
    assert engine.value("kvobs_load_waited_seconds_total", "two") == pytest.approx(quick)
    assert engine.series("kvobs_loads_slower_than_computing_total") == {("one",): 1}


def test_stalls_are_what_the_steps_calls_took(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = [SYNC, (0, False)]
    engine = Observed(monkeypatch, a, b, ranks=1)
    engine.rig.add("r", max_tokens=3)
    engine.step()
    first = engine.value("kvobs_call_duration_seconds_sum", "two", hook="start_load_kv")
    engine.step(2)

    def spent(connector: str, *hooks: str) -> float:
        return sum(engine.value("kvobs_call_duration_seconds_sum", connector, hook=hook) for hook in hooks)

    # The sync load's step waits for start_load_kv of both connectors; later steps call it after the forward's launch.
    for connector in NAMES:
        assert engine.value("kvobs_load_stall_seconds_count", connector) == 3
        assert engine.value("kvobs_save_stall_seconds_count", connector) == 3
        saved = spent(connector, "save_kv_layer", "wait_for_save")
        assert engine.value("kvobs_save_stall_seconds_sum", connector) == pytest.approx(saved)
    waited = spent("two", "wait_for_layer_load") + first
    assert engine.value("kvobs_load_stall_seconds_sum", "two") == pytest.approx(waited)


def test_steps_without_a_forward_have_no_load_stall(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    engine = Observed(monkeypatch, a, b, ranks=1)
    engine.step(3)
    assert engine.value("kvobs_load_stall_seconds_count") == 0
    assert engine.value("kvobs_save_stall_seconds_count") == 0, "wait_for_save is called, and nothing waits for it"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load(policy: str, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = [KV, (0, False)]
    engine = Observed(monkeypatch, a, b, policy=policy)
    engine.rig.add("r")
    engine.step()
    a.say(0, failed="r")
    a.say(1, received="r")
    engine.step(2)
    assert engine.value("kvobs_loads_total", mode="async", outcome="failed") == 1
    assert engine.value("kvobs_recomputed_tokens_total") == 2 * BLOCK
    assert engine.value("kvobs_load_tokens_total") == engine.value("kvobs_load_bytes_total") == 0
    assert engine.value("kvobs_load_duration_seconds_count", mode="async") == 0
    assert engine.value("kvobs_in_flight", kind="load") == 0


def test_a_load_with_a_hole(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """What vLLM computes again is what kvobs says."""
    a.offers["r"] = (3 * BLOCK, True)
    engine = Observed(monkeypatch, a, b, ranks=1)
    request = engine.rig.add("r")
    engine.step()
    a.bad_blocks[0] = {a.called("update_state_after_alloc")[0][2][0][1]}
    a.say(0, received="r")
    engine.step()
    assert engine.value("kvobs_recomputed_tokens_total") == 3 * BLOCK - request.num_computed_tokens == 2 * BLOCK


def test_sync_loads_that_fail_in_one_step(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"], a.offers["q"] = [SYNC, (0, False)], [SYNC, (0, False)]
    engine = Observed(monkeypatch, a, b, ranks=1)
    requests = [engine.rig.add(request) for request in ("r", "q")]
    schedule = engine.rig.scheduler.schedule

    def spoiling() -> Any:
        scheduled = schedule()
        a.bad_blocks[0] = {blocks[0][1] for _, tokens, blocks in a.called("update_state_after_alloc") if tokens}
        return scheduled

    engine.rig.scheduler.schedule = spoiling
    engine.step()
    lost = sum(2 * BLOCK - request.num_computed_tokens for request in requests)
    assert engine.value("kvobs_recomputed_tokens_total") == lost == 2 * BLOCK
    assert engine.value("kvobs_loads_total", mode="sync", outcome="failed") == 2
    assert engine.value("kvobs_failed_sync_loads_total") == 2


def test_a_load_failed_on_one_rank_is_recomputed_whole(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    a.offers["r"] = [(3 * BLOCK, True), (0, False)]
    engine = Observed(monkeypatch, a, b)
    request = engine.rig.add("r")
    engine.step()
    a.bad_blocks[0] = {a.called("update_state_after_alloc")[0][2][0][2]}
    a.say(0, received="r")
    a.say(1, failed="r")
    engine.step()
    assert request.num_computed_tokens == 0
    engine.step()
    assert engine.value("kvobs_recomputed_tokens_total") == 3 * BLOCK


def test_a_load_whose_blocks_fail_and_end_its_request(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """With failure policy "fail" vLLM ends the request in the step of the report, before kvobs gets it."""
    a.offers["r"] = (3 * BLOCK, True)
    engine = Observed(monkeypatch, a, b, policy="fail")
    engine.rig.add("r")
    engine.step()
    a.bad_blocks[0] = {a.called("update_state_after_alloc")[0][2][0][1]}
    a.say(0, received="r")
    engine.step()
    a.say(1, received="r")
    engine.step(2)
    assert engine.rig.status("r") == "gone"
    assert engine.series("kvobs_loads_total") == {("one", "async", "failed"): 1}
    assert engine.value("kvobs_recomputed_tokens_total") == 3 * BLOCK
