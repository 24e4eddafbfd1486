"""The comparison finds what it is for: kvobs, made to deviate in one thing while it runs, is found out each time."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.transparency.comparator import judge
from tests.transparency.life import Character, Life, Plan
from tests.transparency.mutation import SCHEDULER, WORKER, Mutation, mutated

LOADER = Character(hits=1.0, asynchronous=1.0, promises=1.0, slow=0.5)
SAVER = Character(promises=1.0, slow=1.0)

LIFE = Life(
    children=(LOADER, SAVER),
    plans=tuple(Plan(f"r{i}", arrives=2 * i, family=i, shared=16, prompt=70, answer=4) for i in range(3)),
    seed=5,
    runner="v1",
    ranks=2,
    budget=48,
)


def _without_receipts(show: Any, output: Any) -> None:
    seen = copy.copy(output)
    seen.finished_recving = None
    show(seen)


def _filtered(build: Any, scheduled: Any) -> Any:
    seen = copy.copy(scheduled)
    seen.finished_req_ids = set()
    return build(seen)


def _resetting(connector: Any, build: Any, scheduled: Any) -> Any:
    if scheduled.finished_req_ids:
        connector._connectors[1].reset_cache()
    return build(scheduled)


def _backwards(connector: Any, start: Any, *arguments: Any, **more: Any) -> None:
    for child in reversed(connector._connectors):
        child.start_load_kv(*arguments, **more)


def _never(connector: Any, update: Any, output: Any) -> None:
    update(output)
    output.finished_sending = None


def _swapped(connector: Any, bind: Any, metadata: Any) -> None:
    first, second, *more = metadata.metadata
    bind(type(metadata)(**{**vars(metadata), "metadata": (second, first, *more)}))


MUTATIONS = {
    "a lookup is left out": Mutation(
        SCHEDULER, "get_num_new_matched_tokens", lambda ask, *_: (0, False), children=(1,)
    ),
    "a sibling is given tokens": Mutation(
        SCHEDULER,
        "update_state_after_alloc",
        lambda say, request, blocks, tokens: say(request, blocks, 16),
        children=(1,),
    ),
    "a sibling's receipt is hidden": Mutation(SCHEDULER, "update_connector_output", _without_receipts, children=(1,)),
    "a finished request is hidden": Mutation(SCHEDULER, "build_connector_meta", _filtered, children=(0,)),
    "a request's end is hidden": Mutation(
        SCHEDULER, "request_finished_all_groups", lambda say, *_: (False, None), children=(0,)
    ),
    "a cache is reset": Mutation(SCHEDULER, "build_connector_meta", _resetting),
    "a save is never completed": Mutation(SCHEDULER, "update_connector_output", _never),
    "children load in another order": Mutation(WORKER, "start_load_kv", _backwards),
    "metadata goes to another child": Mutation(WORKER, "bind_connector_metadata", _swapped),
    "metadata stays bound": Mutation(WORKER, "clear_connector_metadata", lambda clear: None, children=(0,)),
}


def test_without_a_mutation_nothing_is_found() -> None:
    verdict = judge(LIFE)
    assert verdict.fault is None, verdict.fault
    assert verdict.compared > 300


SEEN_IN = {"a cache is reset": "reset_cache", "a save is never completed": "stepped"}
"""The hook whose call gives it away, if it is another."""


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_deviation_is_found(what: str) -> None:
    with mutated(MUTATIONS[what]):
        verdict = judge(LIFE)
    assert verdict.fault is not None
    first = verdict.fault.partition("before that")[0]
    assert first.startswith("step ")
    assert SEEN_IN.get(what, MUTATIONS[what].hook) in first


def test_a_message_says_where_and_what() -> None:
    with mutated(MUTATIONS["a sibling is given tokens"]):
        fault = judge(LIFE).fault or ""
    assert "step 0, child 1 scheduler: the calls differ" in fault
    assert "differs: 0 - 16" in fault
    assert "before that, with both:\n" in fault
