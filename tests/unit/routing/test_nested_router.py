"""A router within the router."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.schema.config import ConfigError
from kvobs.testing import BLOCK, ROUTERS, Rig, Script
from tests.support.best_effort import KV
from tests.support.rig import assert_nothing_is_left, child_config, counted
from tests.support.scripted import Stats


def router(path: str, *scripts: Script) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*map(child_config, scripts)]},
    }


def test_a_nested_multi_connector_loads_and_saves(a: Script, b: Script) -> None:
    inner = router(ROUTERS["stock"], a, b)
    outer = Script("outer")
    rig = Rig("kvobs", connectors=[inner, child_config(outer)], ranks=2)
    b.offers["r"] = KV
    a.promises.add("r")
    rig.add("r")
    rig.step()
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [0]
    for rank in (0, 1):
        b.say(rank, received="r")
    rig.run(3)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    for rank in (0, 1):
        a.say(rank, saved="r")
    rig.run(2)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert counted(rig, "kvobs_saves_total", 0, "ok") == 1
    assert_nothing_is_left(rig)


def test_a_nested_multi_connectors_stats_pass_through(a: Script, b: Script) -> None:
    inner = router(ROUTERS["stock"], a)
    rig = Rig("kvobs", connectors=[inner, child_config(b)])
    a.stats.append(Stats(data={"n": 3}))
    rig.run(2)
    noted = [payload for payload in rig.stats if "MultiConnector" in payload]
    assert str(noted).count("'n': 3") >= 1


def test_kvobs_within_kvobs_is_refused(a: Script, b: Script) -> None:
    inner = router("kvobs", a)
    with pytest.raises(ConfigError, match=r"connectors\[0\].*kvobs within kvobs; list its connectors here"):
        Rig("kvobs", connectors=[inner, child_config(b)])
    assert a.calls == b.calls == []
