"""Plug-ins and model runners that do more to connectors than vLLM: what they may do to them alone, they may do here.

Each test runs against vLLM's own router as well, where that has the same part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from kvobs.schema.signals import TIMED
from kvobs.testing import BLOCK, ROUTERS, Rig, Script, ScriptedConnector
from kvobs.vllm_api import versions
from kvobs.vllm_api.hooks import Side
from tests.support.rig import entry_for

both = pytest.mark.parametrize("router", list(ROUTERS))

SIDES = {"scheduler": (Side.SCHEDULER, Side.BOTH), "worker": (Side.WORKER, Side.BOTH)}
NOT_ASKED = {
    "get_finished": "a worker's results are read from get_transfer_results",
    "get_handshake_metadata": "vLLM's router asks the connectors until one has an answer",
    "get_finished_count": "vLLM's router asks once more",
    "get_kv_connector_kv_cache_events": "vLLM's router does not collect the workers' events",
}
"""Hooks that the routers call differently: declared deviations."""


def routers_of(rig: Rig, side: str) -> list[Any]:
    return [rig.connector] if side == "scheduler" else rig.workers


def live(rig: Rig) -> None:
    """Serve requests, and end the engine."""
    rig.add("r", max_tokens=4)
    rig.run(3)
    rig.add("s", tokens=2 * BLOCK, max_tokens=2)
    rig.step()
    rig.abort("r")
    rig.run(4)
    rig.connector.reset_cache()
    for router in (*rig.workers, rig.connector):
        router.shutdown()


class Replaced:
    """Replaces every hook of connectors, and counts the calls of the replacements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, side: str) -> None:
        self.calls: Counter[str] = Counter()
        self._setattr = monkeypatch.setattr
        known = versions.hooks()
        self._names = [name for name, hook in TIMED.items() if hook.side in SIDES[side] and name in known]

    def on(self, target: Any) -> None:
        for name in self._names:
            self._setattr(target, name, self._counted(name, getattr(target, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **kwargs)

        return counted


def before_the_first_step(rig: Rig, side: str, replace: Callable[[], None]) -> None:
    replace()
    live(rig)


def after_the_registration(rig: Rig, side: str, replace: Callable[[], None]) -> None:
    for worker in rig.workers:
        worker.register_kv_caches({})
    rig.connector.bind_gpu_block_pool(None)
    replace()
    live(rig)


@pytest.mark.parametrize("moment", [before_the_first_step, after_the_registration])
@pytest.mark.parametrize("where", ["connectors", "class", "router"])
@pytest.mark.parametrize("side", list(SIDES))
def test_hooks_replaced_before_the_first_step_are_called(
    side: str, where: str, moment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATOM wraps LMCache's hooks after vLLM's factory has built it; tracers wrap those of vLLM's own objects."""
    counts = {}
    for router in ROUTERS:
        with monkeypatch.context() as patch:
            a, b = Script("a"), Script("b")
            a.offers["r"] = (2 * BLOCK, False)
            rig = Rig(router, a, b)
            replaced = Replaced(patch, side)

            def replace(rig: Rig = rig, replaced: Replaced = replaced) -> None:
                for each in routers_of(rig, side):
                    targets = {"connectors": each._connectors, "class": [ScriptedConnector], "router": [each]}
                    for target in targets[where]:
                        replaced.on(target)

            moment(rig, side, replace)
            counts[router] = {name: n for name, n in replaced.calls.items() if name not in NOT_ASKED}
    assert counts["kvobs"] == counts["stock"]
    assert len(counts["kvobs"]) >= 8


class Runner:
    """What a platform's model runner gives to its connector."""


class PlatformConnector(ScriptedConnector):
    """Has methods that its platform's model runner calls, as AIBrix's, tpu-inference's and vllm-ascend's."""

    order: ClassVar[list[str]] = []

    def register_runner(self, runner: Any) -> Any:
        self.order.append(self.script.tag)
        return runner

    def start_load_kv_before_update(self, scheduled: Any, *, wait: bool = True) -> None:
        self.order.append(f"{self.script.tag} {scheduled} {wait}")

    @property
    def transport(self) -> str:
        return f"transport of {self.script.tag}"


def entry(script: Script) -> dict[str, Any]:
    return entry_for(script, "PlatformConnector", kv_connector_module_path=__name__)


@pytest.mark.parametrize("scripts", [("a",), ("a", "b"), ("plain", "a")], ids=" and ".join)
def test_methods_beyond_vllms_class_reach_their_connectors(scripts: tuple[str, ...]) -> None:
    """vLLM's own router has no such methods: only a single connector works there, without it."""
    entries = [entry_for(Script(tag)) if tag == "plain" else entry(Script(tag)) for tag in scripts]
    having = [tag for tag in scripts if tag != "plain"]
    (worker,) = Rig("kvobs", connectors=entries).workers
    PlatformConnector.order.clear()
    runner = Runner()
    assert worker.register_runner(runner) is runner
    worker.start_load_kv_before_update("step", wait=False)
    assert PlatformConnector.order == [*having, *(f"{tag} step False" for tag in having)]
    assert worker.transport == f"transport of {having[0]}"
    assert getattr(worker, "on_kv_cache_written", None) is None, "probes see the truth"
    assert not hasattr(worker, "_nothing")
    with pytest.raises(AttributeError, match="'MultiConnector' object has no attribute 'on_kv_cache_written'"):
        worker.on_kv_cache_written()


def test_such_a_method_of_an_isolated_connector_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("kvobs", connectors=[entry(Script("a"))], kvobs={"best_effort": ["PlatformConnector"]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlatformConnector, "register_runner", lambda *_: 1 / 0)
        assert rig.workers[0].register_runner(Runner()) is None
    assert "best-effort connector 'PlatformConnector' raised in register_runner" in caplog.text


def test_the_start_names_methods_beyond_vllms_class(caplog: pytest.LogCaptureFixture) -> None:
    Rig("kvobs", connectors=[entry(Script("a")), entry_for(Script("b"))])
    lines = [record.getMessage() for record in caplog.records if "not vLLM hooks" in record.getMessage()]
    assert lines == [
        "connector 'PlatformConnector' has methods that are not vLLM hooks: register_runner, "
        "start_load_kv_before_update. kvobs passes calls to them on but does not record them"
    ]
