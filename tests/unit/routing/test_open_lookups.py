"""Where an option says not to wait: a lookup that was left open is repeated until it is answered, and then closed."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.children.child import Child
from kvobs.routing.open_lookups import OpenLookups
from kvobs.routing.visibility import Visibility
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, counted

KV = (2 * BLOCK, True)
NOT_YET, MISS = (None, False), (0, False)


class Request:
    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


class Cache:
    """A connector with an answer; it remembers what it was called with."""

    def __init__(self) -> None:
        self.answer: tuple[int | None, bool] = NOT_YET
        self.calls: list[tuple[Any, ...]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("lookup", request.request_id, num_computed_tokens))
        return self.answer

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self.calls.append(("allocated", request.request_id, blocks, num_external_tokens))


class Lookups:
    def __init__(self) -> None:
        self.caches = [Cache(), Cache()]
        recorder = Recorder(2)
        children = [Child(i, str(i), cache, recorder) for i, cache in enumerate(self.caches)]
        self.visibility = [Visibility(), Visibility()]
        self.open = OpenLookups(children, self.visibility)

    def poll(self, slow: int | None = None) -> None:
        self.open.poll(lambda index: index == slow)


@pytest.mark.parametrize("answer", [(0, False), (32, True), (16, False)])
def test_it_is_asked_with_the_same_until_it_answers_and_then_given_the_blocks_and_no_tokens(
    answer: tuple[int, bool],
) -> None:
    lookups = Lookups()
    _, cache = lookups.caches
    lookups.open.leave_open(Request("r"), "blocks", 48, {1})
    assert lookups.open.has(1, "r")
    assert not lookups.open.has(0, "r")
    for n in (1, 2):
        lookups.poll()
        assert cache.calls == [("lookup", "r", 48)] * n
    cache.answer = answer
    lookups.poll()
    assert cache.calls[2:] == [("lookup", "r", 48), ("allocated", "r", "blocks", 0)]
    lookups.poll()
    assert len(cache.calls) == 4, "once"
    assert len(lookups.open) == 0
    assert lookups.caches[0].calls == []


def test_what_it_has_not_seen_allocated_is_withheld_from_it_also_after_its_answer() -> None:
    lookups = Lookups()
    lookups.open.leave_open(Request("r"), "blocks", 0, {1})
    lookups.caches[1].answer = MISS
    lookups.poll()
    assert [visibility.saves("r") for visibility in lookups.visibility] == [True, False]
    assert lookups.visibility[1].tainted == set(), "its end is shown"


def test_a_request_that_ends_or_is_looked_up_again_is_not_asked_about_any_more() -> None:
    lookups = Lookups()
    lookups.open.leave_open(Request("r"), "blocks", 0, {0, 1})
    lookups.open.leave_open(Request("s"), "blocks", 0, {1})
    lookups.open.forget("r")
    lookups.open.forget("r")
    lookups.poll()
    assert [cache.calls for cache in lookups.caches] == [[], [("lookup", "s", 0)]]


def test_one_whose_last_call_was_slow_is_not_asked_in_this_step() -> None:
    lookups = Lookups()
    lookups.open.leave_open(Request("r"), "blocks", 0, {0, 1})
    lookups.poll(slow=0)
    assert [len(cache.calls) for cache in lookups.caches] == [0, 1]
    lookups.poll()
    assert [len(cache.calls) for cache in lookups.caches] == [1, 2]


# --- under vLLM's scheduler


def waiting_for_earlier(a: Script, b: Script, *answers: Any) -> Rig:
    a.offers["r"], b.offers["r"] = [KV, MISS], [NOT_YET, *answers]
    rig = Rig("kvobs", a, b, kvobs={"wait_for": "earlier"})
    rig.add("r", max_tokens=4)
    rig.step()
    assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    return rig


def tokens_of(script: Script) -> list[int]:
    return [tokens for _, tokens, _ in script.called("update_state_after_alloc")]


def test_a_lookup_answered_while_its_sibling_loads_is_closed_once(a: Script, b: Script) -> None:
    """The allocation after the load is no lookup: it must not be opened again."""
    rig = waiting_for_earlier(a, b, NOT_YET, KV)
    rig.run(3)
    asked = len(b.called("get_num_new_matched_tokens"))
    assert tokens_of(b) == [0]
    a.say(0, received="r")
    rig.run(8)
    assert rig.status("r") == "gone"
    assert len(b.called("get_num_new_matched_tokens")) == asked == 3
    assert tokens_of(b) == [0, 0], "the second is that of the allocation after the load, as in vLLM"
    assert all("r" not in shown.scheduled for shown in b.called("build_connector_meta"))
    assert "r" in frozenset().union(*(shown.finished for shown in b.called("build_connector_meta")))
    assert_nothing_is_left(rig)


def test_one_that_answers_after_the_load_is_given_its_blocks_then(a: Script, b: Script) -> None:
    rig = waiting_for_earlier(a, b, *[NOT_YET] * 3, MISS)
    a.say(0, received="r")
    rig.run(2)
    assert rig.status("r") == "RUNNING"
    assert tokens_of(b) == [], "it is not given 0 tokens before it has answered"
    rig.run(2)
    assert tokens_of(b) == [0]
    rig.run(5)
    assert_nothing_is_left(rig)


def test_a_request_that_ends_first_is_reported_as_vllm_would(a: Script, b: Script) -> None:
    rig = waiting_for_earlier(a, b)
    rig.abort("r")
    rig.step()
    asked = len(b.called("get_num_new_matched_tokens"))
    a.say(0, received="r")
    rig.run(3)
    assert len(b.called("get_num_new_matched_tokens")) == asked
    assert b.called("request_finished") == ["r"]
    assert tokens_of(b) == []
    assert_nothing_is_left(rig)


def test_a_failed_load_is_looked_up_anew(a: Script, b: Script) -> None:
    """vLLM asks itself then: what was open is forgotten, and a hit that comes late loads the request."""
    rig = waiting_for_earlier(a, b, NOT_YET, KV)
    a.say(0, failed="r")
    rig.run(4)
    b.say(0, received="r")
    rig.run(8)
    assert rig.status("r") == "gone"
    assert tokens_of(b)[0] == 0
    assert_nothing_is_left(rig)


def test_the_timeout_leaves_a_lookup_open(a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = [NOT_YET, NOT_YET, NOT_YET, KV], KV
    rig = Rig("kvobs", a, b, kvobs={"lookup_timeout_ms": 0.001})
    rig.add("r", max_tokens=2)
    rig.run(2)
    assert tokens_of(b) == [2 * BLOCK]
    assert tokens_of(a) == []
    rig.run(2)
    assert tokens_of(a) == [0]
    b.say(0, received="r")
    rig.run(5)
    assert counted(rig, "kvobs_lookups_total", 0, "timeout") == 1
    assert_nothing_is_left(rig)


def test_by_default_no_lookup_is_left_open(a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = KV, [NOT_YET, NOT_YET, MISS]
    rig = Rig("kvobs", a, b)
    rig.add("r", max_tokens=2)
    for _ in range(3):
        rig.step()
        assert len(rig.connector._side._open_lookups) == 0
    a.say(0, received="r")
    rig.run(5)
    assert "r" in frozenset().union(*(shown.scheduled for shown in b.called("build_connector_meta"))), "it saves it"
    assert_nothing_is_left(rig)
