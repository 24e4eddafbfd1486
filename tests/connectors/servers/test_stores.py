"""Real engines with real stores behind kvobs: 200 requests with aborts, and the store's server killed under them.

The engines' answers are compared with those of an engine without any connector, token for token.
"""

import time
from collections.abc import Iterator

import pytest

from tests.connectors.servers import traffic
from tests.connectors.servers.served import (
    LMCACHE,
    MOONCAKE,
    Served,
    blocks_are_free,
    is_idle,
    served,
    until_loads_grow,
)
from tests.connectors.servers.traffic import Answers
from tests.engine.serving import ServedEngine, eventually

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines and stores are started within it

BEFORE_S = 10.0
NOISE_S = 1.0  # of two cores; a call that blocks the step takes four seconds
ASIDE_S = 10.0
"""Nothing is asked of the times right after the kill: calls that wait for the dead server end, and it is noticed."""
SETTLES_S = 15.0
"""For a connector to find its server again by itself: LMCache pings it every two seconds, Mooncake connects anew."""
UNNOTICED_S = 60.0


@pytest.fixture(
    scope="module",
    params=[(kind, is_best_effort) for kind in (LMCACHE, MOONCAKE) for is_best_effort in (False, True)],
    ids=["lmcache", "lmcache-isolated", "mooncake", "mooncake-isolated"],
)
def engine(
    request: pytest.FixtureRequest, served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind, is_best_effort = request.param
    with served(served_engine, tmp_path_factory.mktemp(kind.name), kind, is_best_effort=is_best_effort) as engine:
        yield engine


def test_200_requests_and_aborts(engine: Served, expected: Answers) -> None:
    begin = time.monotonic()
    answers = traffic.ask_and_abort(engine.server)
    print(f"\n{len(answers)} answers in {time.monotonic() - begin:.1f} s, {engine.loads:.0f} loads from the store")
    assert traffic.wrong(answers, expected) == []
    assert engine.loads >= traffic.REQUESTS / 4
    assert engine.total("kvobs_call_errors_total") == 0
    assert engine.total("kvobs_loads_total", outcome="failed") == 0
    assert_nothing_is_left(engine, traffic.ABORTS)


def assert_nothing_is_left(engine: Served, unfetched: int = 0) -> None:
    assert eventually(lambda: is_idle(engine.server)), "requests, loads or saves are still open"
    assert blocks_are_free(engine.server), "blocks are still held"
    if engine.kind is LMCACHE:
        # LMCache's server keeps the job of a lookup whose answer nobody fetches, until a time limit.
        assert engine.store.metric("lmcache_mp_active_prefetch_jobs") <= unfetched


def test_the_server_is_killed_and_started_again(engine: Served, expected: Answers) -> None:
    with traffic.asking(engine.server) as load:
        begin = time.monotonic()
        time.sleep(BEFORE_S)
        killed = time.monotonic()
        engine.store.kill()
        time.sleep(ASIDE_S)
        aside = time.monotonic()
        time.sleep(engine.kind.after_s if engine.is_best_effort else ASIDE_S)
        dead = time.monotonic()
        engine.store.start()
        backoff = max(engine.backoffs(), default=0.0)
        back = until_loads_grow(engine, SETTLES_S + (2 * backoff if engine.is_best_effort else UNNOTICED_S))
    before, after = load.between(begin, killed), load.between(aside, dead)
    print(
        f"\n{len(before)} answers before, p95 {traffic.p95(before):.3f} s; {len(after)} with the server dead, "
        f"p95 {traffic.p95(after) if after else float('nan'):.3f} s; left out for {engine.backoffs()} s; "
        f"it loaded again after {back} s"
    )
    assert traffic.wrong(load.asked, expected) == []
    assert back is not None, "it never loaded again"
    if engine.is_best_effort:
        assert traffic.p95(after) <= max(2 * traffic.p95(before), NOISE_S)
    # What was sent to the server when it died is sent to the new one: an old lookup for each client.
    assert_nothing_is_left(engine, traffic.CLIENTS)


def test_the_server_is_alive_to_the_end(engine: Served, expected: Answers) -> None:
    engine.server.check_alive()
    assert traffic.wrong(traffic.ask_all(engine.server, traffic.PROMPTS), expected) == []
    assert engine.total("kvobs_internal_errors_total") == 0
    assert engine.total("kvobs_verified_blocks_total", outcome="mismatch") == 0
    assert engine.total("kvobs_verified_blocks_total", outcome="match") > traffic.REQUESTS
