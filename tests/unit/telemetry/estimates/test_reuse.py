"""Each prompt is counted once, whole, at its first allocation; what an engine generated is known at its end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.schema.signals import REUSE_DISTANCE
from kvobs.state.cache_layout import CacheLayout
from kvobs.state.transfers import NO_RESULT
from kvobs.telemetry.estimates.reuse import PromptReuse, cache_tokens, hash_block_size
from kvobs.telemetry.events import TelemetryObserver
from kvobs.testing import BLOCK, Rig, Script
from kvobs.vllm_api import versions
from tests.support.probes import counts
from tests.support.rig import forget_unused

LOADABLE = signals.slot(signals.LOADABLE_TOKENS)
FIRST, TAIL = signals.slot(REUSE_DISTANCE), signals.slot(signals.PROMPT_TAIL_TOKENS)
Counted = Callable[[], tuple[int, int, int]]


@pytest.fixture
def rig(a: Script, b: Script) -> Rig:
    return Rig("kvobs", a, b)


def reuse_of(rig: Rig) -> PromptReuse:
    """Return the observer of prompts, one of the router's."""
    return next(each for each in rig.connector._side.observer.observers if isinstance(each, PromptReuse))


@pytest.fixture
def counted(rig: Rig) -> Counted:
    """Return the tokens so far that were used before, those that were not, and those that no cache serves."""
    recorder = reuse_of(rig)._recorder = Recorder(2)  # which counts from here on

    def tokens() -> tuple[int, int, int]:
        *seen, new = (counts(recorder).get(FIRST + i, 0) for i in range(REUSE_DISTANCE.sum_offset))
        return sum(seen), new, counts(recorder).get(TAIL, 0)

    return tokens


def serve(rig: Rig, request: str, tokens: int | list[int], max_tokens: int = 1) -> list[int]:
    """Serve a request to its end; return all its tokens."""
    live = rig.add(request, tokens, max_tokens)
    rig.run(max_tokens + 2)
    assert rig.status(request) == "gone"
    return list(live.all_token_ids)


def test_a_prompt_counts_whole_but_its_last_token_is_not_served(rig: Rig, counted: Counted) -> None:
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5]
    for total, tokens in zip(accumulate(lengths), lengths, strict=True):
        serve(rig, f"r{tokens}", [tokens] * tokens)
        assert sum(counted()) == total
    assert counted() == (0, (0 + 0 + 0 + 1 + 2 + 3) * BLOCK, sum(lengths) - 6 * BLOCK)
    assert not reuse_of(rig)._live


def test_the_next_turn_of_a_chat_knows_the_answer_before(rig: Rig, counted: Counted) -> None:
    serve(rig, "two", serve(rig, "one", 2 * BLOCK, max_tokens=2 * BLOCK) + [5] * BLOCK)
    seen, new, tail = counted()
    assert (seen, new) == (4 * BLOCK - BLOCK, BLOCK + BLOCK), "the last generated token was not computed"
    assert seen + new + tail == 2 * BLOCK + 5 * BLOCK


@pytest.mark.parametrize("is_async", [True, False])
def test_a_prompt_counts_once_however_often_it_is_looked_up(
    is_async: bool, rig: Rig, counted: Counted, a: Script
) -> None:
    a.offers["r"] = [(None, False), (2 * BLOCK, is_async)]
    rig.add("r", 4 * BLOCK + 1, max_tokens=9)
    rig.run(3)
    a.say(0, received="r")
    rig.run(2)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # preempts it
    rig.run(9)
    assert len(a.called("update_state_after_alloc")) >= 2
    assert counted() == (0, 4 * BLOCK, 1)


def test_tokens_that_vllm_has_no_longer_could_be_loaded(rig: Rig, counted: Counted) -> None:
    for _ in range(2):
        serve(rig, "r", 4 * BLOCK + 1)
    recorder = reuse_of(rig)._recorder
    assert LOADABLE not in counts(recorder), "it had them itself"
    forget_unused(rig)
    serve(rig, "r", 2 * BLOCK + 1)
    assert counts(recorder)[LOADABLE] == 2 * BLOCK


@pytest.mark.skipif(not versions.ignores_answers(), reason="this vLLM loads what is offered")
def test_a_prompt_that_reads_no_cache_counts_as_used_only(rig: Rig, counted: Counted) -> None:
    rig.add("r", prompt := [7] * 4 * BLOCK, max_tokens=1).skip_reading_prefix_cache = True
    rig.run(3)
    assert counted() == (0, 0, 0)
    serve(rig, "s", prompt)
    assert counted() == (3 * BLOCK, 0, BLOCK)


def test_an_aborted_and_never_allocated_request_is_not_counted(rig: Rig, counted: Counted, a: Script) -> None:
    a.offers["r"] = (None, False)
    rig.add("r")
    rig.run(2)
    rig.abort("r")
    rig.run(2)
    assert counted() == (0, 0, 0)


def test_without_a_block_size_nothing_is_done() -> None:
    recorder = Recorder(0)
    request: Any = SimpleNamespace(request_id="r", num_prompt_tokens=40, block_hashes=[b"hash"])
    PromptReuse(recorder, TelemetryObserver(), 0, 0).allocated(request, NO_RESULT, None, 0)
    assert not counts(recorder)


class Noting(TelemetryObserver):
    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def reused(self, request_id: str, tokens: int) -> None:
        self.heard.append((request_id, tokens))


def test_a_prompts_reused_tokens_are_announced_once() -> None:
    listener, hashes = Noting(), [b"first hash", b"second hash"]
    reuse = PromptReuse(Recorder(0), listener, 8, 0)
    for request, tokens in (("r", 17), ("s", 17), ("t", 16)):
        live: Any = SimpleNamespace(request_id=request, num_prompt_tokens=tokens, block_hashes=hashes)
        for _ in range(2):
            reuse.allocated(live, NO_RESULT, None, 0)
    assert listener.heard == [("r", 0), ("s", 16), ("t", 8)]


def test_sizes_are_stated_or_follow_from_groups_sharing_blocks() -> None:
    layout = CacheLayout((48, 32))
    assert hash_block_size(SimpleNamespace(hash_block_size=8), layout) == 8
    assert hash_block_size(SimpleNamespace(hash_block_size=None), layout) == 16
    assert hash_block_size(None, CacheLayout(())) == 0
    for stated, tokens in ((5000, 5000), (None, 100 * 32 // 2)):
        config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=stated))
        assert cache_tokens(config, SimpleNamespace(num_blocks=100), layout) == tokens
    assert cache_tokens(config, SimpleNamespace(num_blocks=100), CacheLayout(())) == 0
