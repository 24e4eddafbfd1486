"""Each declared deviation that the differential test cannot show, or shows among others: here it is alone."""

import sys
from collections import Counter
from types import CodeType
from typing import Any
from unittest import mock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvobs.testing import Rig, Script, ScriptedConnector
from tests.transparency.comparator import compare
from tests.transparency.engine import live
from tests.transparency.life import V2, Character, Life, Plan
from tests.transparency.record import Cause

QUIET = Character(shape="lean")
OUTPUT = "update_connector_output"


def life(*connectors: Character, **more: Any) -> Life:
    """Return a life with one request, and nothing but what these connectors do."""
    return Life(connectors, (Plan("r", arrives=0, family=0, shared=0, prompt=70, answer=3),), **more)


def calls_of(router: str, *functions: Any) -> Counter[str]:
    """Live a quiet life and count the calls of these functions, which nothing else can see."""
    names: dict[CodeType, str] = {function.__code__: function.__name__ for function in functions}
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with mock.patch("tests.transparency.engine.assert_nothing_is_left"):  # it makes steps of its own
            run = live(life(QUIET, QUIET), router)
    finally:
        sys.setprofile(before)
    assert run.error is None
    return found


def test_empty_hooks_are_not_called() -> None:
    base = KVConnectorBase_V1
    empty = (base.finish_forward, base.update_connector_output, base.get_kv_connector_kv_cache_events)
    others = (base.get_block_ids_with_load_errors, base.clear_connector_metadata)
    stock, ours = calls_of("stock", *empty, *others), calls_of("kvobs", *empty, *others)
    assert stock["finish_forward"] > 0
    assert stock["update_connector_output"] > 0
    assert ours["finish_forward"] == ours["update_connector_output"] == 0
    assert stock["clear_connector_metadata"] == ours["clear_connector_metadata"] > 0


def test_a_hook_replaced_after_the_first_step_is_not_called(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """As tracers and profilers do; vLLM's class looks hooks up at each call."""
    rigs = {router: Rig(router, a, b) for router in ("stock", "kvobs")}
    for rig in rigs.values():
        rig.step()
    a.calls.clear()
    replaced, found = [], {}

    def replacement(connector: Any) -> None:
        replaced.append(connector)

    monkeypatch.setattr(ScriptedConnector, "wait_for_save", replacement)
    for router, rig in rigs.items():
        rig.step()
        found[router] = len(replaced), len(a.called("wait_for_save"))
    assert found == {"stock": (2, 0), "kvobs": (2, 1)}


@pytest.mark.parametrize("chats", [0.0, 0.3])
def test_an_output_with_nothing_but_a_workers_events_is_shown(chats: float) -> None:
    """With an executor that has no aggregator, vLLM drops an output in which nothing is; its router has no events."""
    one = life(Character(promises=1.0, slow=1.0, chats=chats), Character(), running=V2._replace(is_uni=True))
    stock, ours = live(one, "stock"), live(one, "kvobs")
    assert compare(one, stock, ours).fault is None
    shown = [sum(entry.hook == OUTPUT for entry in run.entries) for run in (stock, ours)]
    assert (shown[0] < shown[1]) is bool(chats), "without events both show the same"


def test_each_connector_has_a_copy_operation_of_its_own(a: Script, b: Script) -> None:
    copied: list[str] = []
    rig = Rig("kvobs", a, b)
    operation = lambda *arguments: copied.append("copied")  # noqa: E731
    rig.workers[0].set_host_xfer_buffer_ops(operation)
    first, second = (connector.copy_blocks for connector in rig.workers[0]._connectors)
    assert len({first, second, operation}) == 3
    stock = Rig("stock", a, b)
    stock.workers[0].set_host_xfer_buffer_ops(operation)
    assert [connector.copy_blocks for connector in stock.workers[0]._connectors] == [operation, operation]


def test_a_failed_load_is_not_repeated() -> None:
    """Both connectors are asked again; with vLLM's class the first loads and fails until the life is over."""
    one = life(Character(hits=1.0, asynchronous=1.0, fails=1.0, offers_again=1.0), QUIET)
    stock, ours = live(one, "stock"), live(one, "kvobs")
    assert compare(one, stock, ours).fault is None
    assert ours.causes[0] is Cause.OFFERED_AGAIN
    allocated = [
        [
            entry.arguments[2]
            for entry in run.entries
            if entry[1:3] == ("connector 0 scheduler", "update_state_after_alloc")
        ]
        for run in (stock, ours)
    ]
    assert sum(tokens > 0 for tokens in allocated[0]) > 1
    assert [tokens > 0 for tokens in allocated[1]] == [True, False]


@pytest.mark.parametrize(
    "router",
    ["kvobs", pytest.param("stock", marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason="stops there"))],
)
def test_a_reset_reaches_every_connector_after_one_raised(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    a.raises["reset_cache"] = OSError("a is stuck")
    with pytest.raises(OSError, match="a is stuck"):
        rig.connector.reset_cache()
    assert len(b.called("reset_cache")) == 1
