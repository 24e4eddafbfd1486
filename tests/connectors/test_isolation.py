"""Best-effort children that are real connectors fail in every hook: what they store stays right, and all else."""

from __future__ import annotations

import re
import time

import pytest

from kvobs import faults as internal_faults
from kvobs.routing import isolation
from tests.connectors.catalogue import SETTINGS, make
from tests.connectors.faults import Faults
from tests.connectors.known import explain_isolated
from tests.connectors.lives import Ending, build, live

STORES = ["offloading", "offloading-tiering", "lmcache-mp", "mooncake-store", "simple-cpu", "flexkv", "hf3fs"]
HOOKS = [
    ("get_num_new_matched_tokens", "before"),
    ("update_state_after_alloc", "before"),
    ("update_state_after_alloc", "after"),
    ("build_connector_meta", "before"),
    ("build_connector_meta", "after"),
    ("start_load_kv", "before"),
    ("start_load_kv", "after"),
    ("wait_for_save", "before"),
    ("get_finished", "before"),
    ("update_connector_output", "before"),
    ("request_finished_all_groups", "before"),
    ("take_events", "before"),
]

FEW = ("build_connector_meta", "wait_for_save", "update_connector_output")
"""Hooks of which every failure may leave blocks pinned inside a connector: they fail twice only."""
GIVE_UP_S = 0.2  # instead of 10
NAMES = {
    ("flexkv", "request_finished_all_groups"): "request_finished",  # they don't know several KV cache groups
    ("hf3fs", "request_finished_all_groups"): "request_finished",
    ("mooncake-store", "get_finished"): "get_transfer_results",
    ("lmcache-mp", "get_finished"): "get_transfer_results",
}
"""What a hook is called in those that have another one in its place."""


def run(name: str, hook: str, when: str, seed: int) -> tuple[Ending, Faults]:
    """Live a life in which the isolated child fails for a while, early on."""
    sibling = "simple-cpu" if name.startswith("offloading") else "offloading"
    names = [name, sibling] if seed % 2 else [sibling, name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "GIVE_UP_NS", int(GIVE_UP_S * 1e9))
        patch.setattr(internal_faults, "is_under_pytest", lambda: False)
        plugs = {each: make(each, seed) for each in names}
        most = 2 if hook in FEW else 99
        faults = Faults(plugs[name], NAMES.get((name, hook), hook), after=when == "after", most=most)
        engine = build(
            "kvobs",
            list(plugs.values()),
            patch,
            faults,
            kvobs={"names": names, "isolate": [name]},
            is_v2=seed % 4 > 1,
            **{"blocks": 70 if hook in FEW else 30, **SETTINGS.get(name, {})},
        )
        return live(engine, seed, requests=24, seconds=10 * GIVE_UP_S), faults


@pytest.mark.parametrize(("hook", "when"), HOOKS, ids=lambda value: value)
@pytest.mark.parametrize("name", STORES)
def test_a_child_that_fails_harms_nothing(name: str, hook: str, when: str) -> None:
    seed = STORES.index(name) + HOOKS.index((hook, when))
    ending, faults = run(name, hook, when, seed)
    assert faults.raised, "the hook was never called in time"
    wrong = [line for line in ending.faults if not explain_isolated(line, name, hook)]
    assert [line for line in wrong if not _was_left_by_the_failure(line, name, faults)] == []
    sibling = next(other for other in ending.stored if other != name)
    assert ending.stored[sibling] > 10


def _was_left_by_the_failure(line: str, name: str, faults: Faults) -> bool:
    """Return whether a line is about the child's own books of what was alive when it failed."""
    if not line.startswith(f"{name} keeps "):
        return False
    requests = re.findall(r"\br\d+\b", line)
    return all(request in faults.touched for request in requests)


def test_a_dead_store_that_answers_slowly_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each lookup take longer than it may; there are no exceptions."""
    monkeypatch.setattr(internal_faults, "is_under_pytest", lambda: False)
    store = make("mooncake-store", 1)
    calls: list[int] = []

    def slow(call: str) -> None:
        if call == "lookup" and store.now > 20:
            calls.append(store.now)
            time.sleep(0.3)

    store.may_fail = slow  # type: ignore[method-assign]
    options = {"names": ["store", "host"], "isolate": ["store"], "isolate_slow_ms": 150}  # a busy machine is not slow
    engine = build("kvobs", [store, make("offloading", 1)], monkeypatch, blocks=40, kvobs=options)
    ending = live(engine, 1, requests=30)
    assert ending.faults == []
    assert 1 <= len(calls) <= 4, "a slow call per back-off, which grows from a second on"
    assert ending.stored["offloading"] > 10
