"""Verified loads of every connector that stores: nothing is blamed where all is right, and every fault is found."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvobs.schema import signals
from kvobs.telemetry.verify.sample import BlockSample, LoadedBlocks
from tests.connectors.engine import Engine
from tests.connectors.faults import REUSED, TITLES, Fault, blank, flip, record, shift
from tests.connectors.files import Example
from tests.connectors.lives import PLUGS, SETTINGS, build, live, make, settle
from tests.connectors.memory import BLOCK, LAYERS
from tests.connectors.offloading import Offloading
from tests.connectors.simple_cpu import SimpleCPU
from tests.support.numbers import numbers
from tests.support.rig import forget_unused

LIVES = int(os.environ.get("KVOBS_LIVES", "4"))
"""Of each connector and runner; 200 are 100,000 blocks, and take half an hour."""
SHARE = {"verify": {"sample_ratio": 1.0}}


def outcomes(engine: Engine) -> dict[str, Counter[str]]:
    """Return how many blocks each connector loaded on all ranks, by outcome."""
    counted: dict[str, Counter[str]] = {plug.name: Counter() for plug in engine.plugs}
    for worker in engine.workers:
        counts = numbers(worker._telemetry._recorders.recorder).counts
        for index, plug in enumerate(engine.plugs):
            for outcome in signals.VERIFIED_BLOCKS.labels["outcome"]:
                slot = signals.word(index, signals.slot(signals.VERIFIED_BLOCKS, outcome))
                counted[plug.name][outcome] += counts.get(slot, 0)
    return counted


def blamed(engine: Engine, index: int) -> set[str]:
    """Return the ranks on which a connector's blocks were wrong."""
    opened = [row for worker in engine.workers for row in numbers(worker._telemetry._recorders.recorder).opened]
    return {row[2] for row in opened if row[:2] == [signals.CORRUPT_BLOCKS.name, index]}


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("name", [name for name in PLUGS if name != "decode-bench"])
def test_no_block_of_a_right_connector_is_blamed(name: str, is_v2: bool) -> None:
    settings: dict[str, Any] = {"blocks": 20, **SETTINGS.get(name, {})}
    total: Counter[str] = Counter()
    for seed in range(LIVES):
        with pytest.MonkeyPatch.context() as patch:
            plug = make(name, seed, fail_rate=0.0 if seed % 4 else 0.2)
            engine = build("kvobs", [plug], patch, is_v2=is_v2, kvobs=SHARE, **settings)
            live(engine, seed)
        total += outcomes(engine)[name]
    assert set(total) == {"match"}, total


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("name", ["offloading", "simple-cpu", "lmcache-mp"])
def test_no_block_is_blamed_where_two_connectors_had_a_hit(name: str, is_v2: bool) -> None:
    """Their blocks are compared again after the step that their request begins with."""
    total: Counter[str] = Counter()
    again, begun_in = 0, BlockSample._begun_in

    def counted(sample: BlockSample, output: Any) -> list[LoadedBlocks]:
        nonlocal again
        loads = list(begun_in(sample, output))
        again += sum(len(load.blocks) for load in loads)
        return loads

    for seed in range(LIVES):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockSample, "_begun_in", counted)
            plugs = [make(name, seed, fail_rate=0.0 if seed % 4 else 0.2), make("mooncake-store-async", seed)]
            engine = build("kvobs", plugs, patch, is_v2=is_v2, kvobs=SHARE, blocks=20)
            live(engine, seed)
        total += sum(outcomes(engine).values(), Counter())
    assert set(total) == {"match"}, total
    assert again


def host_pages(plug: Any, rank: int = 0) -> list[Any]:
    """Return the pages of one rank's store in host memory, all layers of a block together, as bytes."""
    if isinstance(plug, Offloading):
        layers = [layer.numpy() for layer in plug.workers[rank].connector_worker.worker.host]
    elif isinstance(plug, SimpleCPU):
        layers = [plug.backends[rank].cpu[layer].numpy() for layer in LAYERS]
    else:
        return [page.view(np.uint8) for page in plug.pages.values()]
    return [[layer[block].view(np.uint8) for layer in layers] for block in range(len(layers[0]))]


def tamper(plug: Any, fault: Fault, rank: int = 0) -> None:
    """Put a fault into a rank's store."""
    if not isinstance(plug, Example):
        fault(host_pages(plug, rank))
        return
    stored, pages = {}, []
    for folder in sorted({path.parent for path in Path(plug.tag).rglob("*.safetensors")}):
        layers = {path: load_file(path)["kv_cache"] for path in sorted(folder.iterdir())}  # (tokens, heads, width)
        stored.update(layers)
        pages += [
            [layer[i : i + BLOCK].view(np.uint8) for layer in layers.values()] for i in range(0, 5 * BLOCK, BLOCK)
        ]
    fault(pages)
    for path, layer in stored.items():
        save_file({"kv_cache": layer}, path)


def ask_twice(engine: Engine, between: Any, prompts: int = 4) -> None:
    """Compute and store prompts, do something to the stores, and load the prompts from them."""
    for turn in ("stored", "loaded"):
        for number in range(prompts):
            engine.add(f"{turn}-{number}", [number * 31 + i for i in range(5 * BLOCK + 2)], 2)
            settle(engine)
        if turn == "stored":
            forget_unused(engine)
            between()


@pytest.mark.parametrize("fault", [flip, shift, blank], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", ["offloading", "simple-cpu", "hf3fs", "example"])
def test_every_wrong_block_is_found_and_no_sibling_blamed(name: str, fault: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make(name), make("lmcache-mp")]
        engine = build("kvobs", plugs, patch, **{"blocks": 70, **SETTINGS.get(name, {})}, kvobs=SHARE)
        ask_twice(engine, lambda: tamper(plugs[0], fault))
    found = outcomes(engine)
    record(plugs[0].connector, TITLES[fault], 20, found[name], ranks=blamed(engine, 0))
    wrong = found[name]["mismatch"] + (found[name]["lossy"] if fault is flip else 0)
    assert (wrong, found[name]["match"], found[name]["unknown"]) == (20, 0, 0)
    assert found["lmcache-mp"].total() == 0
    assert engine.wrong_uses  # as the model saw, too


def test_a_connector_that_overwrites_received_blocks_is_blamed() -> None:
    """It loads in the step after the receipt, although it was not chosen."""
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make("offloading"), make("lmcache-mp")]
        engine = build("kvobs", plugs, patch, blocks=70, kvobs=SHARE)
        (memory,), tick = engine.memories.values(), plugs[1].tick

        def overwrite() -> None:
            tick()
            for request in engine.scheduler.finished_recving_kv_req_ids:
                (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(request)
                memory.array[:, ids[:5]] = memory.array[:, ids[:5][::-1]]

        ask_twice(engine, lambda: patch.setattr(plugs[1], "tick", overwrite))
    assert outcomes(engine) == {"offloading": Counter(match=20), "lmcache-mp": Counter(mismatch=16)}
    assert (blamed(engine, 0), blamed(engine, 1)) == (set(), {"0"})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["offloading", "simple-cpu", "hf3fs"])
def test_a_wrong_load_can_fail_and_its_tokens_are_computed(name: str, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plug, kvobs = make(name), {"verify": {"sample_ratio": 1.0, "on_mismatch": "recompute"}}
        engine = build("kvobs", [plug], patch, blocks=70, ranks=ranks if name == "offloading" else 1, kvobs=kvobs)
        ask_twice(engine, lambda: shift(host_pages(plug, rank=len(engine.workers) - 1)))
    assert outcomes(engine)[name]["mismatch"] == 20
    assert (engine.wrong_uses, engine.is_busy) == ([], False)
    recorder = engine.connector._telemetry._recorders.recorder
    assert numbers(recorder).counts[signals.word(0, signals.slot(signals.LOADS, "async", "failed"))] == 4


def test_the_rank_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plug = make("offloading")
        engine = build("kvobs", [plug], patch, blocks=70, ranks=2, kvobs=SHARE)
        ask_twice(engine, lambda: shift(host_pages(plug, rank=1)))
    found = outcomes(engine)["offloading"]
    record(plug.connector, f"{TITLES[shift]}, on rank 1 of 2", 20, found, ranks=blamed(engine, 0))
    assert found == Counter(match=20, mismatch=20)
    assert blamed(engine, 0) == {"1"}


def test_a_block_that_is_refilled_while_it_is_saved_is_found() -> None:
    """Offloading reads blocks that a sibling's load fills: a fault of vLLM's, in test_stock_faults.py."""
    with pytest.MonkeyPatch.context() as patch:
        plugs: list[Any] = [make("lmcache-mp", 7), make("offloading", 7)]
        plugs[1].is_late = True
        engine = build("kvobs", plugs, patch, blocks=20, kvobs=SHARE)
        live(engine, 7)
    found = outcomes(engine)
    record(plugs[1].connector, REUSED, None, found["offloading"], ranks=blamed(engine, 1))
    assert plugs[1].wrong_stores
    assert found["offloading"]["mismatch"] > 0
    assert found["lmcache-mp"]["mismatch"] == 0
