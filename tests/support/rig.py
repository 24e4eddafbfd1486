"""What kvobs's own tests need beside ``kvobs.testing``: other scripted connectors, counts, kvobs's own state."""

from typing import Any, TypeVar

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.telemetry.estimates.gains import Gains
from kvobs.telemetry.requests.request_reports import Reports
from kvobs.telemetry.tracing.request_traces import Traces
from kvobs.telemetry.tracing.urgent_loads import UrgentLoads
from kvobs.testing import Rig, Script, entry_of
from tests.support.probes import counts

T = TypeVar("T")


def entry_for(script: Script, cls: str = "ScriptedConnector", **more: Any) -> dict[str, Any]:
    """Return the ``connectors`` entry of a scripted connector of any class."""
    return entry_of(script, **{"kv_connector": cls, "kv_connector_module_path": "tests.support.scripted", **more})


class Blocks:
    """Stands for vLLM's KVCacheBlocks."""

    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups


def started(router: str, *scripts: Script, steps: int = 1, max_tokens: int = 2, **more: Any) -> Rig:
    """Return a rig that has made steps with a request "r"; ``more`` are arguments of the rig."""
    rig = Rig(router, *scripts, **more)
    rig.add("r", max_tokens=max_tokens)
    rig.run(steps)
    return rig


def observer_of(rig: Rig, kind: type[T]) -> T | None:
    """Return the router's observer of this class, if there is one."""
    return next((each for each in rig.connector._side.observer.observers if isinstance(each, kind)), None)


def counted(rig: Rig, metric: str, index: int, *labels: str) -> int:
    """Return what all processes have counted."""
    routers = (rig.connector, *rig.workers)
    return sum(counts_of(router._telemetry._recorders.recorder, index, metric, *labels) for router in routers)


def counts_of(recorder: Recorder, index: int, metric: str, *labels: str) -> int:
    """Return what a recorder has counted."""
    return counts(recorder).get(_place(index, metric, *labels), 0)


def _place(index: int, metric: str, *labels: str) -> int:
    return signals.word(index, signals._BY_VALUES[(metric, *labels)].first)


def forget_unused(rig: Rig) -> None:
    """Evict what vLLM caches and nobody uses, so that connectors are asked for it."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    unused = {block.block_id for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None}
    rig.scheduler.kv_cache_manager.evict_blocks(unused)


def assert_gone_after(rig: Rig, script: Script, steps: int, rank: int = 0, **said: str) -> None:
    """Let a connector say something on a rank: some steps later vLLM must be done with the request "r"."""
    script.say(rank, **said)
    rig.run(steps)
    assert rig.status("r") == "gone"


def assert_nothing_is_left(rig: Rig) -> None:
    """Let the engine go idle: every block must be free, and no book of kvobs's may hold anything."""
    rig.run(3)
    assert rig.scheduler.requests == {}
    assert rig.free_blocks == rig.scheduler.kv_cache_config.num_blocks - 1
    side = rig.connector._side
    assert (len(side.ledger._entries), len(side.lookups._asked), side.next_orders.made) == (0, 0, None)
    assert side.targets._open_lookups._open == {}
    assert not any(visibility or visibility._over for visibility in side.targets._visibility)
    assert all(asked == {} for asked in side.targets.isolation._asked.values())
    assert not observer_of(rig, Traces)
    assert not observer_of(rig, UrgentLoads)
    assert not observer_of(rig, Reports)
    assert not observer_of(rig, Gains)
    assert [worker._side._open.by_request for worker in rig.workers] == [{}] * len(rig.workers)
    assert [worker._side._began for worker in rig.workers] == [{}] * len(rig.workers)
