"""The parts of `kvobs demo`, each on its own; the whole of it runs in tests/engine/test_demo.py."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvobs.demo import load, run
from kvobs.demo.host_offload import HostWorker
from kvobs.export.numbers import Series
from kvobs.testing.server import Completion, ServerError


@given(
    st.integers(1, 4), st.lists(st.integers(0, 12), min_size=2, max_size=2),
    st.lists(st.integers(0, 9), min_size=2, max_size=2), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_blocks_come_back_from_host_memory_byte_for_byte(
    blocks_per_chunk: int, group_sizes: list[int], firsts: list[int], seed: int
) -> None:
    """A job's blocks are stored to host memory, wiped, and loaded; every byte of the whole cache is compared."""
    rng = np.random.default_rng(seed)
    blocks, chunks, page, used = 64, 48, 24, 20  # the last 4 bytes of a page are padding
    caches = [torch.from_numpy(rng.integers(-128, 128, (blocks, page), dtype=np.int8)) for _ in range(3)]
    refs = [[CanonicalKVCacheRef(0, used), CanonicalKVCacheRef(1, page)], [CanonicalKVCacheRef(2, used)]]
    tensors = [CanonicalKVCacheTensor(cache, page) for cache in caches]
    worker = HostWorker(CanonicalKVCaches(tensors, refs), blocks_per_chunk, chunks)
    block_ids = rng.permutation(blocks)[: sum(group_sizes)].tolist()
    each = zip(group_sizes, firsts, strict=True)
    needed = [-(-(first % blocks_per_chunk + size) // blocks_per_chunk) if size else 0 for size, first in each]
    engine_spec = GPULoadStoreSpec(block_ids, group_sizes, firsts)
    host_spec = CPULoadStoreSpec(rng.permutation(chunks)[: sum(needed)].tolist())

    before = [cache.clone() for cache in caches]
    assert worker.submit_store(7, engine_spec, host_spec)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True)), "a store changed the engine's cache"
    groups = [block_ids[: group_sizes[0]], block_ids[group_sizes[0] :]]
    for group, group_refs in zip(groups, refs, strict=True):
        for ref in group_refs:
            caches[ref.tensor_idx][group, : ref.page_size_bytes] = 0
    assert worker.submit_load(8, host_spec, engine_spec, expedited=True)
    assert all(torch.equal(*pair) for pair in zip(caches, before, strict=True)), "a load brought back other bytes"

    done = worker.get_finished()
    moved = group_sizes[0] * (used + page) + group_sizes[1] * used
    results = [(result.job_id, result.success, result.transfer_size) for result in done]
    assert results == [(7, True, moved), (8, True, moved)]
    assert worker.get_finished() == []


def test_jobs_into_one_chunk_keep_each_others_blocks() -> None:
    cache = torch.arange(4, dtype=torch.int8).repeat(8, 1).T.contiguous()  # block b is full of b
    worker = HostWorker(CanonicalKVCaches([CanonicalKVCacheTensor(cache, 8)], [[CanonicalKVCacheRef(0, 8)]]), 2, 1)
    for job, (block, place) in enumerate([(1, 0), (2, 1)]):
        worker.submit_store(job, GPULoadStoreSpec([block], [1], [place]), CPULoadStoreSpec([0]))
    worker.submit_load(2, CPULoadStoreSpec([0]), GPULoadStoreSpec([0, 3], [2], [0]))
    assert cache[:, 0].tolist() == [1, 1, 2, 2]


def test_prompts_differ_for_exampleconnector_and_share_documents() -> None:
    both = [load.prompts(questions, 24) for questions in (0, 1)]
    for prompts in both:
        assert len({prompt[: 28 * load.BLOCK] for prompt in prompts}) == len(load.DOCUMENTS)
    prompts = both[0] + both[1]
    assert max(map(len, prompts)) + load.ANSWER_TOKENS < 2048
    # ExampleConnector distinguishes whole blocks only, and a prompt that ends one token into one has another key.
    assert len({prompt[: (len(prompt) - 1) // load.BLOCK * load.BLOCK] for prompt in prompts}) == len(prompts)
    assert not [prompt for prompt in load.prompts(0, 400) + load.prompts(1, 400) if len(prompt) % load.BLOCK == 1]


class FakeServer:
    """Answers each prompt with its length, and notes what is asked of it."""

    def __init__(self, fail_at: int = -1) -> None:
        self.seen: list[str] = []
        self.fail_at = fail_at
        self.may_go = threading.Event()  # set once the failure is noticed

    def complete(self, prompt: str, max_tokens: int, *, headers: Mapping[str, str]) -> Completion:
        assert headers.keys() == {"traceparent"}
        self.seen.append(prompt)
        if len(self.seen) == self.fail_at:
            raise ServerError("gone")
        if 0 < self.fail_at < len(self.seen):
            self.may_go.wait()
        return Completion("", (len(prompt),) * max_tokens, len(prompt), {})

    def reset_prefix_cache(self, *, external: bool = False) -> None:
        self.seen.append(f"reset{' external' * external}")


def test_the_load_repeats_its_prompts_around_cache_resets() -> None:
    """Rounds 1 and 3, and 2 and 4, ask the same; caches are emptied between rounds, cpu's only before the third."""
    server: Any = FakeServer()
    counts: list[tuple[str, int, int]] = []
    results = list(load.run_rounds(server, 40, on_answer=lambda part, *done: counts.append((part.title, *done))))
    assert counts == [(part.title, done, 10) for part in load.ROUNDS for done in range(1, 11)]
    assert [len(result.answers) for result in results] == [10] * 4
    assert results[0].answers == results[2].answers
    assert results[1].answers == results[3].answers
    assert load.differing(results) == []
    changed = load.RoundResult(load.ROUNDS[2], 1.0, 10, {**results[2].answers, "b": (4,)})
    assert load.differing([load.RoundResult(load.ROUNDS[0], 1.0, 10, {"b": (3,)}), changed]) == ["b"]
    assert [entry for entry in server.seen if entry.startswith("reset")] == ["reset", "reset external", "reset"]
    assert [server.seen.index("reset"), server.seen.index("reset external")] == [10, 21]
    assert all(result.prompt_tokens == sum(map(len, result.answers)) for result in results)


@pytest.mark.parametrize(("requests", "each"), [(1, 4), (16, 4), (96, 24), (97, 24), (99, 25)])
def test_rounds_are_of_equal_size_and_touch_every_document(requests: int, each: int) -> None:
    server: Any = FakeServer()
    assert [len(result.answers) for result in load.run_rounds(server, requests)] == [each] * 4


def test_the_load_stops_at_the_first_failure() -> None:
    server: Any = FakeServer(fail_at=3)
    with pytest.raises(ServerError, match="gone"):
        list(load.run_rounds(server, 4000, concurrency=1))
    server.may_go.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join()
    assert len(server.seen) <= 4


def test_a_histogram_is_printed_as_a_mean_and_zeros_are_left_out() -> None:
    def sample(series: str, value: float, **labels: str) -> tuple[Series, float]:
        named = {"model_name": "m", "connector": "cpu", "mode": "async", **labels}
        return (f"kvobs_{series}", frozenset(named.items())), value

    values = dict([
        sample("load_duration_seconds_sum", 3, engine="0"), sample("load_duration_seconds_count", 2, engine="0"),
        sample("load_duration_seconds_sum", 1, engine="1"), sample("load_duration_seconds_count", 2, engine="1"),
        sample("load_duration_seconds_count", 0, connector="disk"), sample("loads_total", 4, outcome="ok"),
        sample("loads_total", 0, outcome="failed"), sample("lookups_total", 4, outcome="hit"),
    ])  # fmt: skip
    assert list(run.FAULTS["slow-connector"].lines(values)) == [
        'kvobs_loads_total{connector="cpu", mode="async", outcome="ok"} 4',
        'kvobs_load_duration_seconds{connector="cpu", mode="async"} 1 s on average, 4 times',
    ]
