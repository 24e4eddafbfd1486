"""The comparison finds what it is for: kvobs, made to deviate in one thing while it runs, is found out each time."""

from typing import Any

import pytest

from tests.support.runners import Running
from tests.transparency.comparator import judge
from tests.transparency.life import Character, Life, Plan
from tests.transparency.mutation import SCHEDULER, WORKER, Mutation, mutated
from tests.transparency.planted_faults import ROUTING_FAULTS
from tests.transparency.sweep import first_faulty

LOADER = Character(hits=1.0, asynchronous=1.0, promises=1.0, slow=0.5)
SAVER = Character(promises=1.0, slow=1.0)

LIFE = Life(
    connectors=(LOADER, SAVER),
    plans=tuple(Plan(f"r{i}", arrives=2 * i, family=i, shared=16, prompt=70, answer=4) for i in range(3)),
    seed=5,
    running=Running(ranks=2),
    budget=48,
)


def _resetting(connector: Any, build: Any, scheduled: Any) -> Any:
    if scheduled.finished_req_ids:
        connector._connectors[1].reset_cache()
    return build(scheduled)


def _never(connector: Any, update: Any, output: Any) -> None:
    update(output)
    output.finished_sending = None


MUTATIONS = {
    "a sibling is given tokens": Mutation(
        SCHEDULER,
        "update_state_after_alloc",
        lambda say, request, blocks, tokens: say(request, blocks, 16),
        connectors=(1,),
    ),
    "a cache is reset": Mutation(SCHEDULER, "build_connector_meta", _resetting),
    "a save is never completed": Mutation(SCHEDULER, "update_connector_output", _never),
    "metadata stays bound": Mutation(WORKER, "clear_connector_metadata", lambda clear: None, connectors=(0,)),
}


def test_without_a_mutation_nothing_is_found() -> None:
    verdict = judge(LIFE)
    assert verdict.fault is None, verdict.fault
    assert verdict.compared > 300


SEEN_IN = {"a cache is reset": "reset_cache", "a save is never completed": "stepped"}
"""The hook whose call gives it away, if it is another."""


def test_no_connector_raises_once_its_life_is_over() -> None:
    """In this one, the next step would."""
    assert first_faulty([1016]) is None


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_deviation_is_found(what: str) -> None:
    with mutated(MUTATIONS[what]):
        verdict = judge(LIFE)
    first = str(verdict.fault).partition("before that")[0]
    assert first.startswith("step ")
    assert SEEN_IN.get(what, MUTATIONS[what].hook) in first


@pytest.mark.parametrize("name", ROUTING_FAULTS)
def test_a_fault_of_routing_is_found_in_the_first_lives(name: str) -> None:
    with mutated(ROUTING_FAULTS[name]):
        assert first_faulty(range(12)) is not None


def test_a_message_says_where_and_what() -> None:
    with mutated(MUTATIONS["a sibling is given tokens"]):
        fault = judge(LIFE).fault or ""
    assert "step 0, connector 1 scheduler: the calls differ" in fault
    assert "differs: 0 - 16" in fault
    assert "before that, with both:\n" in fault
