"""What an isolated connector raises goes no further, whatever the hook; vLLM gets an answer that means nothing."""

import signal
from asyncio import CancelledError
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import Mock

import pytest

from kvobs.connectors.answers import ANSWERS, MalformedAnswerError, answer_of
from kvobs.connectors.gate import AT_ANY_TIME, Gate, ends_for_good
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.vllm_api.hooks import HOOKS, Cadence
from tests.support.numbers import taken

IN_STEP = {name for name, hook in HOOKS.items() if hook.cadence in (Cadence.REQUEST, Cadence.STEP)}


def gate() -> tuple[Gate, list[Any]]:
    made, failures = Gate(0, Recorder(1)), list[Any]()
    made.on_failure = lambda *failure: failures.append(failure)
    return made, failures


def raising(*_args: Any, **_kwargs: Any) -> None:
    raise OSError("no store")


def test_the_table_names_hooks() -> None:
    assert {*ANSWERS, *AT_ANY_TIME} <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_an_answer_passes_and_an_exception_does_not(hook: str) -> None:
    made, failures = gate()
    good = answer_of(hook).nothing()
    assert made.guard(hook, lambda *_, **__: good)(1, two=2) == good
    assert made.guard(hook, raising)("r") == good
    ((where, args, error, slow_ns),) = failures
    assert (where, args, type(error), slow_ns) == (hook, ("r",), OSError, 0)


def test_a_malformed_answer_is_a_counted_failure_with_its_text() -> None:
    made, failures = gate()
    assert made.guard("get_num_new_matched_tokens", lambda *_: (float("inf"), True))("r", 0) == (0, False)
    ((hook, args, error, _),) = failures
    assert (hook, args, type(error)) == ("get_num_new_matched_tokens", ("r", 0), MalformedAnswerError)
    assert str(error).startswith("returned (inf, True); allowed: None, or how many tokens")
    (counted,) = taken(made._recorder).opened
    assert counted == [signals.CALL_ERRORS.name, 0, "get_num_new_matched_tokens", "MalformedAnswerError", 1]


@pytest.mark.parametrize("hook", HOOKS)
def test_only_closed_hooks_are_not_called_and_that_is_no_failure(hook: str) -> None:
    made, failures = gate()
    calls: list[Any] = []

    def called(argument: str) -> Any:
        calls.append(argument)
        return answer_of(hook).nothing()

    guarded = made.guard(hook, called)
    made.closed = frozenset(HOOKS) - {hook}
    guarded("r")
    assert calls == ["r"]
    made.closed = frozenset({hook})
    assert guarded("r") == answer_of(hook).nothing()
    assert calls == ["r"]
    assert failures == []


@pytest.mark.parametrize("hook", HOOKS)
def test_a_slow_call_within_a_step_is_reported_once_it_is_over(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """N8. What happens once, such as the start, may take its time; a call between layers is not measured."""
    now = [0]
    monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda: now[0])
    made, failures = gate()
    slow: list[tuple[str, int]] = []
    made.slow_ns, made.on_slow = 1000, lambda *call: slow.append(call)

    def takes(ns: int) -> Any:
        now[0] += ns
        return answer_of(hook).nothing()

    guarded = made.guard(hook, takes)
    guarded(1000)
    assert slow == []
    assert guarded(1001) == answer_of(hook).nothing()
    assert slow == ([(hook, 1001)] if hook in IN_STEP else [])
    assert failures == []


@pytest.mark.parametrize(("paused_ns", "spent_ns"), [(0, 10**10), (10**9, 9 * 10**9), (10**10 - 1, None)])
def test_pauses_are_no_part_of_a_slow_call(
    paused_ns: int, spent_ns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The back-off follows from its time. A call that raises late is slow as well: another would block as long."""
    times = cycle((0, 10**10))
    monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda: next(times))
    made, failures = gate()
    made._recorder.pauses.note(1, 1 + paused_ns)
    slow: list[tuple[str, int]] = []
    made.slow_ns, made.on_slow = 1, lambda *call: slow.append(call)
    assert made.guard("get_num_new_matched_tokens", raising)("r") == (0, False)
    assert [slow_ns for *_, slow_ns in failures] == [spent_ns or 0]
    assert slow == [], "the failure has it all"
    made.guard("get_num_new_matched_tokens", lambda _: (0, False))("r")
    assert [slow_ns for _, slow_ns in slow] == ([spent_ns] if spent_ns else [])


def test_answers_of_nothing_are_not_shared() -> None:
    made, _ = gate()
    ask = made.guard("get_block_ids_with_load_errors", raising)
    ask().add(7)
    assert ask() == set()


class PanicException(BaseException):
    """As that of pyo3, which derives from BaseException."""


@pytest.mark.parametrize("error", [PanicException, CancelledError, GeneratorExit, SystemExit])
@pytest.mark.parametrize("hook", ["wait_for_save", "save_kv_layer", "take_events"])
def test_what_a_library_raises_is_contained_whatever_it_is(error: type[BaseException], hook: str) -> None:
    def raises() -> None:
        raise error

    made, failures = gate()
    guard = made.guard_layer if hook == "save_kv_layer" else made.guard
    assert guard(hook, raises)() == answer_of(hook).nothing()
    assert [type(error) for _, _, error, _ in failures] == [error]


def test_ctrl_c_passes() -> None:
    made, failures = gate()
    with pytest.raises(KeyboardInterrupt):
        made.guard("wait_for_save", Mock(side_effect=KeyboardInterrupt))()
    assert failures == []


def test_sigterm_that_comes_in_a_call_passes() -> None:
    """vLLM's worker makes one SystemExit of it, which must not be lost."""

    def handler(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, handler)
    try:
        made, failures = gate()
        with pytest.raises(SystemExit):
            made.guard("wait_for_save", partial(signal.raise_signal, signal.SIGTERM))()
        assert failures == []
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_load_has_begun_when_the_call_came_back() -> None:
    made, _ = gate()
    made.guard("start_load_kv", raising)(None)
    made.guard("wait_for_save", lambda: None)()
    assert not made.began
    made.guard("start_load_kv", lambda _: None)(None)
    assert made.began


def test_errors_between_layers_count_once_and_the_call_does_not() -> None:
    recorder = Recorder(1)
    Gate(0, recorder).guard_layer("save_kv_layer", raising)("layer.0", 1, 2)
    grown = taken(recorder)
    assert grown.opened == [[signals.CALL_ERRORS.name, 0, "save_kv_layer", "OSError", 1]]
    first = signals.PROCESS_WIDTH + signals.slot(signals.CALL_DURATION, "save_kv_layer")
    assert not [slot for slot in grown.counts if first <= slot < first + len(signals.CALL_DURATION.bounds) + 2]


def test_hooks_called_once_fail_for_good() -> None:
    once = {name for name, hook in HOOKS.items() if hook.cadence is Cadence.ONCE}
    assert {name for name in HOOKS if ends_for_good(name)} == once - AT_ANY_TIME
    assert ends_for_good("register_kv_caches")
    assert not ends_for_good("reset_cache")
