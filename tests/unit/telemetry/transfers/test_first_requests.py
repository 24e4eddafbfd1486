"""One line where a decode engine's first requests load nothing from others, and none otherwise, in every order."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connectors import specs
from kvobs.state.transfers import NO_RESULT, LookupResult
from kvobs.telemetry.transfers.first_requests import FIRST, FirstLoads, FirstRequests, Silence
from kvobs.testing import Script
from tests.support.observed import KV, Observed
from tests.support.rig import entry_for

NIXL, CPU = 0, 1
ASKING = {"do_remote_prefill": True}
UNANSWERED = (
    "connector 'nixl' loaded nothing for the first 100 requests that ask for a remote prefill: this engine computes "
    "their prompts."
)
UNASKED = "connector 'nixl' only takes KV (kv_consumer), and the first 100 requests ask for no remote prefill"


@pytest.mark.parametrize("only_takes", [True, False])
def test_every_order_of_requests_shows_what_its_definition_says(only_takes: bool) -> None:
    """A request may come again, and ask no more: connectors change the params."""
    events = [(request, asks) for request in "abc" for asks in (True, False)]
    for order in itertools.product(events, repeat=5):
        requests = FirstRequests(only_takes=only_takes, first=2)
        for number, (request, asks) in enumerate(order):
            found = requests.computed(request, asks=asks)
            asking = {each for each, asked in order[: number + 1] if asked}
            all_of_them = {each for each, _ in order[: number + 1]}
            expected = None
            if len(asking) >= 2:
                expected = Silence.UNANSWERED
            elif only_takes and not asking and len(all_of_them) >= 2:
                expected = Silence.UNASKED
            assert found is expected, order[: number + 1]
            if found is not None:
                break


def allocate(
    loads: FirstLoads,
    request: str,
    params: Any = ASKING,
    owner: int | None = None,
    *,
    lookup: LookupResult = NO_RESULT,
) -> None:
    observed: Any = SimpleNamespace(request_id=request, kv_transfer_params=params, num_prompt_tokens=64)
    loads.allocated(observed, lookup, owner, 64 if owner is not None else 0)


def first_loads(*, only_takes: bool = False, takers: dict[int, str] | None = None) -> FirstLoads:
    return FirstLoads(takers or {NIXL: "nixl"}, only_takes=only_takes)


@pytest.mark.parametrize("only_takes", [True, False])
def test_requests_that_ask_in_vain_are_logged_once(only_takes: bool, caplog: pytest.LogCaptureFixture) -> None:
    loads = first_loads(only_takes=only_takes)
    for number in range(FIRST - 1):
        allocate(loads, f"r{number}")
        allocate(loads, f"r{number}", {"do_remote_prefill": False})  # after a preemption
    assert caplog.messages == []
    for number in range(3 * FIRST):
        allocate(loads, f"s{number}")
    (line,) = caplog.messages
    assert line.startswith(UNANSWERED)
    assert line.endswith("whether the proxy passes on kv_transfer_params")


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, "text"])
def test_a_consumer_that_nobody_asks_is_logged_once(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    loads, other = first_loads(only_takes=True), first_loads()
    for number in range(3 * FIRST):
        allocate(loads, f"r{number}", params)
        allocate(other, f"r{number}", params)
    (line,) = caplog.messages
    assert line.startswith(UNASKED)


def test_several_connectors_are_all_named(caplog: pytest.LogCaptureFixture) -> None:
    loads = first_loads(takers={0: "nixl", 2: "far"})
    for number in range(FIRST):
        allocate(loads, f"r{number}")
    assert caplog.messages[0].startswith("connectors 'nixl', 'far' loaded nothing")


@pytest.mark.parametrize("only_takes", [True, False])
@pytest.mark.parametrize("loaded_at", [0, FIRST - 1])
def test_one_load_is_enough(only_takes: bool, loaded_at: int, caplog: pytest.LogCaptureFixture) -> None:
    for params in (ASKING, None):
        loads = first_loads(only_takes=only_takes)
        for number in range(3 * FIRST):
            allocate(loads, f"r{number}", params, NIXL if number == loaded_at else None)
    assert caplog.messages == []


def test_prompts_that_are_not_computed_are_no_sign(caplog: pytest.LogCaptureFixture) -> None:
    """Another connector has them, or vLLM's own cache has all but the last token."""
    for params in (ASKING, None):
        loads = first_loads(only_takes=True)
        for number in range(3 * FIRST):
            allocate(loads, f"r{number}", params, CPU)
            allocate(loads, f"s{number}", params, lookup=LookupResult(local=63))
    assert caplog.messages == []


def test_a_proxy_may_ask_by_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    """Only where all requests are for loading: a prefill engine gets the same ids."""
    loads, both = first_loads(only_takes=True), first_loads()
    for number in range(FIRST):
        for each in (loads, both):
            allocate(each, f"cmpl-___prefill_addr_h:1___decode_addr_h:2_{number}", None)
    (line,) = caplog.messages
    assert line.startswith(UNANSWERED)


@pytest.mark.parametrize(
    ("role", "params", "loads", "is_between", "expected"),
    [
        ("kv_consumer", {}, False, True, "only takes KV"),
        ("kv_consumer", ASKING, False, True, "loaded nothing"),
        ("kv_both", ASKING, False, True, "loaded nothing"),
        ("kv_both", {}, False, True, ""),
        ("kv_producer", ASKING, False, True, ""),
        ("kv_consumer", ASKING, True, True, ""),
        ("kv_consumer", ASKING, False, False, ""),
        ("kv_both", ASKING, False, False, ""),
    ],
)
def test_engines_that_do_not_load_though_they_should_are_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    a: Script,
    *,
    role: str,
    params: dict[str, Any],
    loads: bool,
    is_between: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(specs, "hands_over", lambda _: is_between)
    engine = Observed(monkeypatch, a, connectors=[entry_for(a, kv_role=role)], names=["nixl"])
    for number in range(FIRST + 1):
        if loads and number == FIRST // 2:
            a.offers[f"r{number}"] = KV
        engine.rig.add(f"r{number}", [number] * 64, max_tokens=1, **params)
        engine.step()
    lines = [line for line in caplog.messages if "this engine computes their prompts" in line]
    assert len(lines) == bool(expected)
    assert expected in "".join(lines)
