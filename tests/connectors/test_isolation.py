"""Best-effort connectors that are real connectors fail in every hook: what they store stays right, and all else."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvobs import faults as internal_faults
from kvobs.routing import isolation
from tests.connectors.lives import SETTINGS, Ending, build, live, make
from tests.connectors.plug import Plug

STORES = ["offloading", "offloading-tiering", "lmcache-mp", "mooncake-store", "simple-cpu", "flexkv", "hf3fs"]
AFTER = ("update_state_after_alloc", "build_connector_meta", "start_load_kv")
"""Hooks that also fail when they have done their work."""
HOOKS = [
    (hook, when)
    for hook in (
        *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "start_load_kv"),
        *("wait_for_save", "get_finished", "update_connector_output", "request_finished_all_groups", "take_events"),
    )
    for when in (("before", "after") if hook in AFTER else ("before",))
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
NOT_FREE = "GPU blocks are not free"
HALF_DONE = {
    # SimpleCPUOffload takes a save for done as soon as a later one is, also if it was never begun.
    ("simple-cpu", "wait_for_save"): "simple-cpu stored wrong KV",
    # Both hold the GPU blocks of the saves that they had just ordered; the order was lost with the exception.
    ("simple-cpu", "build_connector_meta"): NOT_FREE,
    ("mooncake-store", "build_connector_meta"): NOT_FREE,
    # Both let go of blocks when their saves are reported, and the report was lost with the exception.
    ("simple-cpu", "update_connector_output"): NOT_FREE,
    ("mooncake-store", "update_connector_output"): NOT_FREE,
}
"""What a call that failed half-way leaves inside a connector, where nobody from outside can mend it."""


class InjectedError(ConnectionError):
    """What a connector raises when its server is gone."""


@dataclass
class Faults:
    """When a hook of a connector raises: in a share of its calls for a while, before or after it has done its work."""

    plug: Plug
    hook: str
    is_after: bool
    most: int  # how many calls raise at most
    raised: int = 0
    live: Callable[[], set[str]] = set
    touched: set[str] = field(default_factory=set)  # requests it knew when it raised
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    def install(self, patch: Any) -> None:
        """Wrap the hook of the connector's class; routers look hooks up when they are built."""
        cls = KVConnectorFactory.get_connector_class(KVTransferConfig(**self.plug.config()))
        real, faults = getattr(cls, self.hook), self

        def hook(connector: Any, *args: Any, **kwargs: Any) -> Any:
            is_due = faults.is_due(connector)
            if is_due and not faults.is_after:
                faults.fail()
            answer = real(connector, *args, **kwargs)
            if is_due:
                faults.fail()
            return answer

        hook.__name__ = self.hook
        patch.setattr(cls, self.hook, hook)

    def is_due(self, index: Any) -> bool:
        is_ours = index is self.plug.on_scheduler or index in self.plug.workers.values()
        is_time = self.raised < self.most and 15 <= self.plug.now <= 80
        return is_ours and is_time and self._random.random() < 0.6

    def fail(self) -> None:
        self.raised += 1
        self.touched |= self.live() | set(re.findall(r"\br\d+\b", " ".join(self.plug.leftovers())))
        raise InjectedError("the server is gone")


def run(name: str, hook: str, when: str, seed: int) -> tuple[Ending, Faults]:
    """Live a life in which the isolated connector fails for a while, early on."""
    sibling = "simple-cpu" if name.startswith("offloading") else "offloading"
    names = [name, sibling] if seed % 2 else [sibling, name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "GIVE_UP_NS", int(GIVE_UP_S * 1e9))
        patch.setattr(internal_faults, "is_under_pytest", lambda: False)
        plugs = [make(each, seed) for each in names]
        faults = Faults(
            plugs[names.index(name)], NAMES.get((name, hook), hook), when == "after", 2 if hook in FEW else 99
        )
        faults.install(patch)
        options = {"blocks": 70 if hook in FEW else 30, "is_v2": seed % 4 > 1} | SETTINGS.get(name, {})
        engine = build("kvobs", plugs, patch, kvobs={"names": names, "best_effort": [name]}, **options)
        faults.live = lambda: set(engine.scheduler.requests)
        return live(engine, seed, requests=24, seconds=10 * GIVE_UP_S), faults


@pytest.mark.parametrize(("hook", "when"), HOOKS, ids=lambda value: value)
@pytest.mark.parametrize("name", STORES)
def test_a_connector_that_fails_harms_nothing(name: str, hook: str, when: str) -> None:
    seed = STORES.index(name) + HOOKS.index((hook, when))
    ending, faults = run(name, hook, when, seed)
    assert faults.raised, "the hook was never called in time"
    half_done = HALF_DONE.get((name, hook))
    wrong = [line for line in ending.faults if half_done is None or half_done not in line]
    assert [line for line in wrong if not _was_left_by_the_failure(line, name, faults)] == []
    sibling = next(other for other in ending.stored if other != name)
    assert ending.stored[sibling] > 10


def _was_left_by_the_failure(line: str, name: str, faults: Faults) -> bool:
    """Return whether a line is about the connector's own books of requests that were alive when it failed."""
    return line.startswith(f"{name} keeps ") and set(re.findall(r"\br\d+\b", line)) <= faults.touched


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
    options = {
        "names": ["store", "host"],
        "best_effort": ["store"],
        "best_effort_slow_ms": 150,
    }  # a busy machine is not slow
    engine = build("kvobs", [store, make("offloading", 1)], monkeypatch, blocks=40, kvobs=options)
    ending = live(engine, 1, requests=30)
    assert ending.faults == []
    assert 1 <= len(calls) <= 4, "a slow call per back-off, which grows from a second on"
    assert ending.stored["offloading"] > 10
