"""An isolated connector answers nonsense: whatever the hook and the answer, the engine serves on, and it is counted."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from kvobs.routing.isolation import GIVE_UP_NS
from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector
from kvobs.testing.scripted import TransferResults
from kvobs.vllm_api.hooks import HOOKS, Side
from tests.support.best_effort import KV, OF_SCHEDULER, OF_WORKER, Isolating, S
from tests.support.contexts import request as named
from tests.support.rig import assert_nothing_is_left, counted, entry_for
from tests.support.scripted import Events, OddConnector, Stats, Tally

UNPICKLABLE: Any = threading.Lock()
PROMPT = 4 * BLOCK + 1
LOOKUP, RESULTS, FINISHED = "get_num_new_matched_tokens", "get_transfer_results", "request_finished_all_groups"


class Unreadable:
    """Can be pickled and not read back."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Unmergeable(Tally):
    def aggregate(self, other: Any) -> Any:
        raise ArithmeticError("not these two")


class UnmergeableEvents(Events):
    def add_events(self, events: Any) -> None:
        raise ArithmeticError("not these two")


def results(**odd: Any) -> Any:
    made = TransferResults()
    for name, value in odd.items():
        setattr(made, name, value)
    return made


def each(*answers: Any) -> tuple[Any, ...]:
    return answers


MALFORMED: list[tuple[str, Any]] = [
    *[(LOOKUP, answer) for answer in each(
        None, 3, (), (1,), (1, True, 2), ("many", True), (float("inf"), True), (float("nan"), True), (16.5, True),
        (16.0, True), (True, True), (np.True_, False), (np.zeros(2), True), (object(), True), (2 * BLOCK, np.zeros(2)),
        (PROMPT + 1, True), (PROMPT, False), (10**30, True), ([2 * BLOCK], True),
    )],
    *[("get_loaded_kv_cache_group_ids", answer) for answer in each(None, 7, "0", (0.5,), ([0],))],
    *[("get_external_cache_hit_sources", answer) for answer in each(
        None, 7, {"tape": 32}, {"disk": "32"}, [("disk", 32)], {"disk": None},
    )],
    *[(FINISHED, answer) for answer in each(
        None, True, (True,), (False, 7), (False, "params"), (False, {1: 2}), (False, {"a": object()}),
        (False, [("a", 1)]), (np.zeros(2), None), (False, {"a": UNPICKLABLE}),
    )],
    *[("take_events", answer) for answer in each(7, np.zeros(2))],
    *[("has_pending_push_work", answer) for answer in each(np.zeros(2),)],
    *[("build_connector_meta", answer) for answer in each(UNPICKLABLE, Unreadable(), lambda: lambda: 0)],
    *[("get_kv_connector_stats", answer) for answer in each(
        7, {"n": 1}, np.zeros(2), Stats(data={"n": UNPICKLABLE}), Stats(data={"n": object}), Stats(data=UNPICKLABLE),
    )],
    *[(RESULTS, answer) for answer in each(
        None, 7, (), (set(), set()), (None, None), {}, results(finished_recving=None), results(finished_sending=7),
        results(failed_recving="load"), results(finished_recving={7}), results(finished_recving=[["load"]]),
    )],
    *[("get_block_ids_with_load_errors", answer) for answer in each(None, 7, "all", {"a"}, [[1]], (1.5,))],
    *[("get_kv_connector_kv_cache_events", answer) for answer in each(UNPICKLABLE, Unreadable())],
    *[("build_connector_worker_meta", answer) for answer in each(
        UNPICKLABLE, Unreadable(), Tally(UNPICKLABLE),
    )],
]  # fmt: skip
"""Answers that vLLM can't use: its own router, or vLLM behind it, would end the engine."""


UNMERGEABLE: list[tuple[str, Any]] = [
    *[("get_kv_connector_kv_cache_events", answer) for answer in each(7, UnmergeableEvents)],
    *[("build_connector_worker_meta", answer) for answer in each(7, Unmergeable(1))],
]
"""Messages of one rank to the connector's other side, which can't be merged with those of others."""


def ids(case: Any) -> str:
    return f"{case:.40}" if isinstance(case, str) else type(case).__name__


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> Isolating:
    return Isolating(monkeypatch, a, b, best_class="OddConnector")


@pytest.mark.parametrize(
    ("hook", "answer", "ranks"),
    [
        *((*case, {0, 1}) for case in (*MALFORMED, *UNMERGEABLE)),
        *((*case, {0}) for case in MALFORMED if HOOKS[case[0]].side is not Side.SCHEDULER),
    ],
    ids=ids,
)
def test_a_malformed_answer_is_a_failure_and_no_more(  # noqa: PLR0917 - the fixtures, and a row of the table
    odd: Isolating, a: Script, b: Script, hook: str, answer: Any, ranks: set[int]
) -> None:
    """One of its own loads and one of its sibling's are under way; then the engine is idle, and serves again."""
    odd.rig.add("before", max_tokens=2)
    odd.run_to_end("before")
    a.answers[hook], a.raises_on = answer, ranks
    a.offers["load"] = b.offers["other"] = KV
    for request in ("load", "other", "plain"):
        odd.rig.add(request, max_tokens=3)
    odd.step(2)
    assert list(odd.rig.connector.take_events()) == []
    assert odd.rig.connector.has_pending_push_work() is False
    odd.say(a, received="load")
    odd.say(b, received="other")
    odd.run_to_end("other", "plain")
    assert odd.epoch >= 1
    assert odd.failures() >= 1
    odd.step(seconds=GIVE_UP_NS / S)
    odd.run_to_end("load")
    del a.answers[hook]
    odd.step(3, seconds=60)
    odd.rig.add("after", max_tokens=2)
    odd.run_to_end("after")
    assert not odd.is_out
    assert counted(odd.rig, "kvobs_loads_total", 1, "async", "ok") == 1
    assert_nothing_is_left(odd.rig)


def test_the_answers_are_many() -> None:
    assert len(MALFORMED) > 65
    with pytest.raises(TypeError):
        pickle.dumps(UNPICKLABLE)


@pytest.mark.parametrize(("hook", "answer"), UNMERGEABLE, ids=ids)
def test_what_one_rank_alone_says_may_be_anything(odd: Isolating, a: Script, hook: str, answer: Any) -> None:
    """It goes to the connector's own other side."""
    a.answers[hook], a.raises_on = answer, {1}
    odd.rig.add("r", max_tokens=3)
    odd.run_to_end("r")
    key = "events" if "events" in hook else "meta"
    (said,) = {type(seen[key]) for seen in a.called("update_connector_output")} - {type(None)}
    assert isinstance(answer() if callable(answer) else answer, said)
    assert not odd.is_out


ACCEPTED: list[tuple[str, Any]] = [
    *[(LOOKUP, answer) for answer in each(
        (0, True), (-3, False), [0, 0], (None, None), (np.int64(0), False), iter((0, False)),
    )],
    *[(FINISHED, answer) for answer in each((0, None), [False, {}], (None, {"a": {"b": [1, None]}}))],
    *[(RESULTS, answer) for answer in each(
        results(finished_recving=[], finished_sending=(), failed_recving={}), results(finished_recving=frozenset()),
        lambda: results(finished_sending=iter(())),
    )],
    *[("get_block_ids_with_load_errors", answer) for answer in each(frozenset(), {}.keys(), [])],
    *[("get_finished_count", answer) for answer in each(None, 1, np.int64(2))],
    *[("take_events", answer) for answer in each(None, [], iter(()))],
]  # fmt: skip


@pytest.mark.parametrize(("hook", "answer"), ACCEPTED, ids=ids)
def test_an_answer_that_vllm_accepts_is_no_failure(odd: Isolating, a: Script, hook: str, answer: Any) -> None:
    a.answers[hook] = answer
    odd.rig.add("r", max_tokens=1)
    odd.step(1 if hasattr(answer, "__next__") else 3)  # that is used up
    assert (odd.epoch, odd.failures()) == (0, 0)


class Panic(BaseException):
    """As that of pyo3."""


@pytest.mark.parametrize("hook", [*OF_SCHEDULER, *OF_WORKER])
def test_a_panic_in_any_hook_is_contained(engine: Isolating, a: Script, hook: str) -> None:
    a.raises[hook] = Panic("unwrap on None")  # type: ignore[assignment]
    engine.rig.add("r", max_tokens=3)
    engine.run_to_end("r")
    assert engine.is_out
    a.raises.clear()
    engine.step(2, seconds=GIVE_UP_NS / S)
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("name", ["finished_recving", "finished_sending", "failed_recving", "kv_connector_stats"])
@pytest.mark.parametrize("value", [7, {7}, "r", [["r"]], np.zeros(2)])
def test_nonsense_put_into_the_workers_output(odd: Isolating, a: Script, b: Script, name: str, value: Any) -> None:
    a.on_output = lambda output: setattr(output, name, value)
    b.offers["r"] = KV
    odd.rig.add("r", max_tokens=2)
    odd.step(2)
    odd.say(b, received="r")
    odd.run_to_end("r")
    assert odd.epoch >= 1
    assert counted(odd.rig, "kvobs_loads_total", 1, "async", "ok") == 1
    a.on_output = None
    assert_nothing_is_left(odd.rig)


@pytest.mark.parametrize("hook", ["supports_divergent_local_hybrid_hits", "requires_kv_delivery"])
@pytest.mark.parametrize("odd_value", [Panic, np.zeros(2)])
def test_a_property_that_fails_is_contained(
    odd: Isolating, a: Script, hook: str, odd_value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def value(_: object) -> Any:
        if odd_value is Panic:
            raise Panic
        return odd_value

    monkeypatch.setattr(OddConnector, hook, property(value))
    monkeypatch.setattr(ScriptedConnector, hook, property(lambda _: True), raising=False)
    assert getattr(odd.rig.connector, hook) is True
    assert odd.is_out
    monkeypatch.setattr(ScriptedConnector, hook, property(value))
    with pytest.raises((Panic, ValueError)):
        getattr(odd.rig.connector, hook)


@pytest.mark.parametrize("hook", ["supports_divergent_local_hybrid_hits", "requires_kv_delivery"])
def test_ctrl_c_in_a_property_passes(odd: Isolating, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [KeyboardInterrupt]

    def value(_: object) -> bool:
        if left:
            raise left.pop()
        return False

    monkeypatch.setattr(OddConnector, hook, property(value))
    with pytest.raises(KeyboardInterrupt):
        getattr(odd.rig.connector, hook)


UNTOUCHED = [case for case in (*MALFORMED, *UNMERGEABLE, *ACCEPTED) if case[0] != "take_events"]
"""Events are drained, so that their time is the connector's."""


def test_an_answer_without_isolation_is_not_touched(a: Script) -> None:
    """It reaches the router as it would reach vLLM's."""
    rig = Rig("kvobs", connectors=[entry_for(a, "OddConnector")])
    rig.step()
    arguments = {
        RESULTS: (set(),),
        "build_connector_meta": (rig.scheduled,),
        "get_loaded_kv_cache_group_ids": (named("r"),),
        **dict.fromkeys((LOOKUP, FINISHED, "get_external_cache_hit_sources"), (named("r"), 1)),
    }
    for hook, answer in UNTOUCHED:
        given = answer() if callable(answer) else answer
        a.answers[hook] = lambda given=given: given
        of = rig.workers[0] if HOOKS[hook].side is Side.WORKER else rig.connector
        assert getattr(of._side.connectors[0], hook)(*arguments.get(hook, ())) is given, (hook, answer)
