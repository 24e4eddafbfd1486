"""What an isolated child raises goes no further, whatever the hook; vLLM gets an answer that it takes for nothing."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvobs import signals
from kvobs.children import no_results
from kvobs.gates import AT_ANY_TIME, NOT_WHILE_OUT, NOTHING, Gate, ends_for_good
from kvobs.hooks import HOOKS, Cadence
from kvobs.recorder import Recorder

TABLES = {"NOTHING": set(NOTHING), "NOT_WHILE_OUT": set(NOT_WHILE_OUT), "AT_ANY_TIME": set(AT_ANY_TIME)}


def gate(**nothing: Any) -> tuple[Gate, list[tuple[str, tuple[Any, ...], Exception]]]:
    made, failures = Gate(0, Recorder(1), **nothing), []
    made.on_failure = lambda *failure: failures.append(failure)
    return made, failures


def raising(*_args: Any, **_kwargs: Any) -> None:
    raise OSError("no store")


@pytest.mark.parametrize("table", TABLES)
def test_the_tables_name_hooks(table: str) -> None:
    assert TABLES[table] <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_an_answer_passes_and_an_exception_does_not(hook: str) -> None:
    made, failures = gate()
    assert made.guard(hook, lambda *args, **kwargs: (args, kwargs))(1, two=2) == ((1,), {"two": 2})
    answer = made.guard(hook, raising)("r")
    assert answer == (NOTHING[hook]() if hook in NOTHING else None)
    ((where, args, error),) = failures
    assert (where, args, type(error)) == (hook, ("r",), OSError)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_shut_gate_lets_through_what_tells_and_asks(hook: str) -> None:
    made, failures = gate()
    made.is_shut = True
    calls: list[Any] = []
    made.guard(hook, calls.append)("r")
    assert calls == ([] if hook in NOT_WHILE_OUT else ["r"])
    assert failures == []


def test_answers_of_nothing_are_not_shared() -> None:
    made, _ = gate()
    ask = made.guard("get_block_ids_with_load_errors", raising)
    ask().add(7)
    assert ask() == set()


def test_no_results_are_this_vllms() -> None:
    made, _ = gate(**no_results())
    assert made.guard("get_transfer_results", raising)(set()) == KVConnectorTransferResults()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_ends_it(error: type[BaseException]) -> None:
    def end() -> None:
        raise error

    made, failures = gate()
    with pytest.raises(error):
        made.guard("wait_for_save", end)()
    assert failures == []


def test_a_load_has_started_when_the_call_came_back() -> None:
    made, _ = gate()
    made.guard("start_load_kv", raising)(None)
    made.guard("wait_for_save", lambda: None)()
    assert not made.has_started
    made.guard("start_load_kv", lambda _: None)(None)
    assert made.has_started


def test_errors_between_layers_are_counted_once_and_the_call_is_not() -> None:
    recorder = Recorder(1)
    layer = Gate(0, recorder).guard_layer("save_kv_layer", raising)
    layer("layer.0", 1, 2)
    taken = recorder.take()
    assert taken.opened == [[signals.CALL_ERRORS.name, 0, "save_kv_layer", "OSError", 1]]
    first = signals.PROCESS_WIDTH + signals.slot(signals.CALL_DURATION, "save_kv_layer")
    assert not [slot for slot in taken.counts if first <= slot < first + len(signals.CALL_DURATION.bounds) + 2]


def test_what_happens_once_can_not_be_made_up_for() -> None:
    once = {name for name, hook in HOOKS.items() if hook.cadence is Cadence.ONCE}
    assert {name for name in HOOKS if ends_for_good(name)} == once - AT_ANY_TIME
    assert ends_for_good("register_kv_caches")
    assert not ends_for_good("reset_cache")
