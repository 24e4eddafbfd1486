"""Every connector that stores, alone and beside another one, in random lives, with vLLM's router and with kvobs's."""

import re

import pytest

from tests.connectors.lives import PLUGS, SETTINGS, Ending, build, live, make, settle
from tests.connectors.memory import BLOCK
from tests.support.rig import forget_unused

KNOWN = {
    # A request is aborted while one connector loads for it, and another one has promised to report its end: both
    # report, vLLM frees at the first and asserts at the second.
    "lmcache-mp": (r"died: AssertionError:  \(step", ("stock",)),
    # On the V1 runner LMCache V1 asserts that a resumed request starts where LMCache or vLLM have it; a sibling's hit
    # is neither.
    "lmcache-v1": (r"died: AssertionError: Preempted request \w+ has num_computed_tokens", ("stock", "kvobs")),
    # FlexKV assigns to finished_recving and finished_sending of the output that its siblings share: what those reported
    # before it is lost, and their requests wait for ever.
    "flexkv": (r"(waits for ever|GPU blocks are not free|keeps )", ("stock",)),
}
"""By connector: the faults in these lives that are stock vLLM's or the connector's, and with which routers."""


def is_known(line: str, names: list[str], router: str) -> bool:
    return any(
        router in routers and re.search(pattern, line)
        for plug, (pattern, routers) in KNOWN.items()
        if any(name.startswith(plug) for name in names)
    )


def lives_of(names: list[str], router: str, seed: int, *, is_v2: bool) -> Ending:
    settings = {key: value for name in names for key, value in SETTINGS.get(name.partition("+")[0], {}).items()}
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make(name, seed) for name in names]
        engine = build(router, plugs, patch, is_v2=is_v2, **{"blocks": 20, **settings})
        return live(engine, seed, requests=24)


PAIRS = [
    names
    for name in PLUGS
    for sibling in ["simple-cpu+sibling" if name == "offloading" else "offloading+sibling"]
    for names in ([name], [name, sibling], [sibling, name])
]


@pytest.mark.parametrize("is_v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("names", PAIRS, ids="-then-".join)
def test_a_life_is_right_with_kvobs_wherever_it_is_with_stock(names: list[str], is_v2: bool) -> None:
    seed = 1 + is_v2
    stock = lives_of(names, "stock", seed, is_v2=is_v2)
    ours = lives_of(names, "kvobs", seed, is_v2=is_v2)
    assert [line for line in stock.faults if not is_known(line, names, "stock")] == []
    assert [line for line in ours.faults if not is_known(line, names, "kvobs")] == []
    assert stock.died or sum(stock.stored.values()) > 10 or names == ["decode-bench"]


@pytest.mark.parametrize("router", ["stock", "kvobs"])
@pytest.mark.parametrize("names", [["lmcache-mp", "offloading"], ["offloading", "mooncake-store"]], ids="-then-".join)
def test_loads_that_fail_are_computed_instead(names: list[str], router: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make(name, 1, fail_rate=0.4) for name in names]
        ending = live(build(router, plugs, patch, blocks=32), 1)
    assert ending.faults == []
    assert sum(ending.loaded.values()) > 2


@pytest.mark.parametrize("router", ["stock", "kvobs"])
def test_a_failed_sync_load_is_repeated_after_a_preemption(router: str) -> None:
    """On the V1 runner LMCache V1 asserts that a resumed request begins with what it has offered."""
    with pytest.MonkeyPatch.context() as patch:
        plug = make("lmcache-v1")
        engine = build(router, [plug], patch)
        prompt = list(range(6 * BLOCK + 1))
        engine.add("first", prompt, 1)
        settle(engine)
        forget_unused(engine)
        plug.fail_rate = 1.0
        request = engine.add("second", prompt, 20)
        engine.step()
        assert (request.status.name, request.num_computed_tokens, plug.loaded) == ("RUNNING", 0, 0)
        plug.fail_rate = 0.0
        for _ in range(4):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        settle(engine)
    assert (request.num_preemptions, plug.loaded, engine.is_busy) == (1, 1, False)


@pytest.mark.parametrize("router", ["stock", "kvobs"])
def test_vllms_own_router_is_a_connector_as_any_other(router: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make("simple-cpu", 1), make("offloading", 1), make("offloading+sibling", 1)]
        inner = [plug.config() for plug in plugs[:2]]
        extra = {"kv_connector_extra_config": {"connectors": inner}}
        nested = {"kv_connector": "MultiConnector", "kv_role": "kv_both", **extra}
        engine = build(router, plugs, patch, blocks=20, connectors=[nested, plugs[2].config()])
        ending = live(engine, 1)
    assert ending.faults == []
    assert min(ending.stored.values()) > 10
    assert ending.loaded["simple-cpu"] > 2
