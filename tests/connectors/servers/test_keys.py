"""What a store holds is its own: no failure of an engine's client makes kvobs delete any of it.

A master that was started again is empty by nature. So here it lives on, and the engine's client fails: its connection
is reset in one lookup, or the master does not answer for a while.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.servers import traffic
from tests.connectors.servers.served import MOONCAKE, Served, served, until_loads_grow
from tests.connectors.servers.stores import KEYS
from tests.connectors.servers.traffic import Answers
from tests.engine.serving import ServedEngine, eventually

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines and stores are started within it

HELD_STILL_S = 3.0
"""Longer than a call may take; the back-off is eight times that."""
SETTLES_S = 15.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def engine(served_engine: ServedEngine, folder: Path) -> Iterator[Served]:
    options = {"cls": "FlakyMooncakeStore", "fail_once": str(folder / "fail-once")}
    with served(served_engine, folder, MOONCAKE, is_best_effort=True, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def keys(engine: Served) -> float:
    """How many keys the store holds when every prompt is saved; it has place for all."""
    for _ in range(3):
        traffic.ask_all(engine.server, traffic.PROMPTS)
    assert eventually(lambda: engine.store.metric(KEYS) >= 12 * traffic.DOCUMENTS / 2)
    time.sleep(1)
    return engine.store.metric(KEYS)


def test_connection_error_removes_nothing(engine: Served, folder: Path, keys: float, expected: Answers) -> None:
    before = engine.store.metric("master_remove_all_requests_total")
    with traffic.asking(engine.server) as load:
        (folder / "fail-once").touch()
        assert eventually(lambda: engine.total("kvobs_call_errors_total", error_type="ConnectionError") == 1)
        assert eventually(lambda: engine.total("kvobs_quarantined") == 0), "it never took part again"
        back = until_loads_grow(engine, SETTLES_S + 2 * max(engine.backoffs()))
    print(f"\nleft out for {engine.backoffs()} s; loads again after {back} s; {keys:.0f} keys before")
    assert back is not None, "it never loaded again"
    assert engine.backoffs()[0] == 1
    assert traffic.wrong(load.asked, expected) == []
    assert engine.store.metric(KEYS) >= keys
    assert engine.store.metric("master_remove_all_requests_total") == before
    assert engine.total("kvobs_call_errors_total", error_type="ConnectionError") == 1


def test_a_master_that_is_silent_for_a_while_keeps_its_keys(engine: Served, keys: float, expected: Answers) -> None:
    before = len(engine.backoffs())
    with traffic.asking(engine.server) as load:
        time.sleep(2)
        with engine.store.held_still():
            time.sleep(HELD_STILL_S)
        assert eventually(lambda: len(engine.backoffs()) > before), "it was not left out"
        back = until_loads_grow(engine, SETTLES_S + 2 * max(engine.backoffs()))
    print(f"\nleft out for {engine.backoffs()[before:]} s; loads again after {back} s")
    assert back is not None, "it never loaded again"
    assert traffic.wrong(load.asked, expected) == []
    assert engine.store.metric(KEYS) >= keys
