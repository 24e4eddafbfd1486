"""What is wrong in stock vLLM or in a connector itself: shown with both routers, so that a mend is noticed."""

import pytest

from tests.connectors.lives import Ending, build, live, make
from tests.connectors.offloading import Offloading

ROUTERS = pytest.mark.parametrize("router", ["stock", "kvobs"])


def run(router: str, seed: int, *names: str, is_late: bool = False, fail_rate: float = 0.0, blocks: int = 20) -> Ending:
    with pytest.MonkeyPatch.context() as patch:
        plugs = [make(name, seed, fail_rate=fail_rate) for name in names]
        for plug in plugs:
            if isinstance(plug, Offloading):
                plug.is_late = is_late
        return live(build(router, plugs, patch, blocks=blocks), seed)


@ROUTERS
def test_offloading_never_learns_of_blocks_that_a_sibling_loads(router: str) -> None:
    late = run(router, 7, "lmcache-mp", "offloading", is_late=True)
    assert late.wrong_stores["offloading"]
    assert late.wrong_uses  # which another request then reads
    assert run(router, 7, "lmcache-mp", "offloading").faults == []


@ROUTERS
def test_hf3fs_stores_wrong_kv_after_a_preemption(router: str) -> None:
    assert run(router, 1, "hf3fs").wrong_stores["hf3fs"]
    assert run(router, 1, "hf3fs", blocks=70).faults == []


def test_vllm_reserves_blocks_twice_after_a_failed_load() -> None:
    stock = run("stock", 2, "mooncake-store", fail_rate=0.5, blocks=16)
    assert stock.waiting
    assert not stock.pinned  # every block is free, and still nothing is scheduled
    assert run("stock", 2, "mooncake-store", fail_rate=0.5, blocks=32).faults == []
    # With kvobs the connector is not believed again, the request is computed: that reserves once.
    assert run("kvobs", 2, "mooncake-store", fail_rate=0.5, blocks=16).faults == []
