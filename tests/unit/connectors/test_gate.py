"""What an isolated child raises goes no further, whatever the hook; vLLM gets an answer that it takes for nothing."""

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvobs.connectors.gate import AT_ANY_TIME, NOTHING, READ, Gate, ends_for_good
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import HOOKS, Cadence

IN_STEP = {name for name, hook in HOOKS.items() if hook.cadence in (Cadence.REQUEST, Cadence.STEP)}


def gate(**nothing: Any) -> tuple[Gate, list[tuple[str, tuple[Any, ...], Exception]]]:
    made, failures = Gate(0, Recorder(1), **nothing), []
    made.on_failure = lambda *failure: failures.append(failure)
    return made, failures


def raising(*_args: Any, **_kwargs: Any) -> None:
    raise OSError("no store")


def test_the_tables_name_hooks() -> None:
    assert {*NOTHING, *READ, *AT_ANY_TIME} <= set(HOOKS)


@pytest.mark.parametrize("hook", NOTHING)
def test_nothing_has_no_part_that_is_something(hook: str) -> None:
    answer = NOTHING[hook]()
    assert answer is not None
    assert not any(answer if isinstance(answer, tuple) else (answer,))


@pytest.mark.parametrize("hook", HOOKS)
def test_an_answer_passes_and_an_exception_does_not(hook: str) -> None:
    made, failures = gate()
    assert made.guard(hook, lambda *args, **kwargs: (*args, kwargs))(1, two=2) == (1, {"two": 2})
    assert made.guard(hook, raising)("r") == (NOTHING[hook]() if hook in NOTHING else None)
    ((where, args, error),) = failures
    assert (where, args, type(error)) == (hook, ("r",), OSError)


@pytest.mark.parametrize("hook", READ)
@pytest.mark.parametrize("answer", [None, 3, (1,), (1, True, 2), ("many", True)])
def test_an_answer_that_the_router_cannot_read_is_a_failure(hook: str, answer: object) -> None:
    made, failures = gate()
    is_read = isinstance(answer, tuple) and len(answer) == 2 and hook != "get_num_new_matched_tokens"
    assert made.guard(hook, lambda *_: answer)("r") == (answer if is_read else NOTHING[hook]())
    assert [where for where, *_ in failures] == [hook] * (not is_read)


@pytest.mark.parametrize("hook", HOOKS)
def test_only_closed_hooks_are_not_called_and_that_is_no_failure(hook: str) -> None:
    made, failures = gate()
    calls: list[Any] = []

    def called(argument: str) -> tuple[None, None]:
        calls.append(argument)
        return None, None

    guarded = made.guard(hook, called)
    made.closed = frozenset(HOOKS) - {hook}
    guarded("r")
    assert calls == ["r"]
    made.closed = frozenset({hook})
    assert guarded("r") == (NOTHING[hook]() if hook in NOTHING else None)
    assert calls == ["r"]
    assert failures == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_call_within_a_step_that_takes_long_is_reported_once_it_is_over(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N8. What happens once, such as the start, may take its time; a call between layers is not measured."""
    now = [0]
    monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda: now[0])
    made, failures = gate()
    slow: list[tuple[str, int]] = []
    made.slow_ns, made.on_slow = 1000, lambda *call: slow.append(call)

    def takes(ns: int) -> tuple[int, bool]:
        now[0] += ns
        return 3, True

    guarded = made.guard(hook, takes)
    assert guarded(1000) == (3, True)
    assert slow == []
    assert guarded(1001) == (3, True), "it counts all the same"
    assert slow == ([(hook, 1001)] if hook in IN_STEP else [])
    assert failures == []


@pytest.mark.parametrize(("paused_ns", "spent_ns"), [(0, 10**10), (10**9, 9 * 10**9), (10**10 - 1, None)])
def test_a_call_that_raises_late_is_slow(paused_ns: int, spent_ns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout: another call would block as long. Pauses of the process do not count."""
    times = iter((0, 10**10))
    monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda: next(times))
    made, failures = gate()
    made._recorder.pauses.note(1, 1 + paused_ns)
    slow: list[tuple[str, int]] = []
    made.slow_ns, made.on_slow = 1, lambda *call: slow.append(call)
    assert made.guard("get_num_new_matched_tokens", raising)("r") == (0, False)
    assert len(failures) == 1
    assert slow == ([("get_num_new_matched_tokens", spent_ns)] if spent_ns is not None else [])


def test_answers_of_nothing_are_not_shared() -> None:
    made, _ = gate()
    ask = made.guard("get_block_ids_with_load_errors", raising)
    ask().add(7)
    assert ask() == set()


def test_no_results_are_this_vllms() -> None:
    made, _ = gate(**versions.no_results())
    assert made.guard("get_transfer_results", raising)(set()) == KVConnectorTransferResults()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exception_that_ends_the_process_passes(error: type[BaseException]) -> None:
    def end() -> None:
        raise error

    made, failures = gate()
    with pytest.raises(error):
        made.guard("wait_for_save", end)()
    assert failures == []


def test_a_load_has_begun_when_the_call_came_back() -> None:
    made, _ = gate()
    made.guard("start_load_kv", raising)(None)
    made.guard("wait_for_save", lambda: None)()
    assert not made.began
    made.guard("start_load_kv", lambda _: None)(None)
    assert made.began


def test_errors_between_layers_are_counted_once_and_the_call_is_not() -> None:
    recorder = Recorder(1)
    Gate(0, recorder).guard_layer("save_kv_layer", raising)("layer.0", 1, 2)
    taken = recorder.take()
    assert taken.opened == [[signals.CALL_ERRORS.name, 0, "save_kv_layer", "OSError", 1]]
    first = signals.PROCESS_WIDTH + signals.slot(signals.CALL_DURATION, "save_kv_layer")
    assert not [slot for slot in taken.counts if first <= slot < first + len(signals.CALL_DURATION.bounds) + 2]


def test_hooks_called_once_fail_for_good() -> None:
    once = {name for name, hook in HOOKS.items() if hook.cadence is Cadence.ONCE}
    assert {name for name in HOOKS if ends_for_good(name)} == once - AT_ANY_TIME
    assert ends_for_good("register_kv_caches")
    assert not ends_for_good("reset_cache")
