"""SpoolCache alone and in kvobs, and its end in vLLM's MultiConnector; its folder can't be written, then not be read.

When an entry that it has offered can't be read it ends its worker, on purpose, wherever it runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import entry
from tests.connectors.servers import traffic
from tests.connectors.servers.served import STORE
from tests.connectors.servers.third_party import KNOWN, NEW, Run, running_in
from tests.connectors.servers.traffic import Answers, Asked
from tests.engine.serving import ServedEngine, eventually, total

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines are started within it

ROUTERS = ("alone", "kvobs", "kvobs-second")
KILLS_ITSELF = "post-admission restore failed; terminating worker"


def spoolcache(folder: Path) -> dict[str, Any]:
    """Return SpoolCache's connector, which keeps files in this folder, as a connector."""
    config = entry("SpoolCacheConnector", spoolcache_path=str(folder), spoolcache_max_size=1)
    return {**config, "kv_connector_module_path": "tests.connectors.servers.spoolcache_cpu"}


def entries(folder: Path) -> list[str]:
    return sorted(f"{path.relative_to(folder)}: {path.stat().st_size}" for path in folder.rglob("*.kv"))


def remove(folder: Path, part: str) -> None:
    """Take away a folder inside that of its only rank."""
    (found,) = folder.glob(f"*/rank-0000/{part}")
    found.rename(folder.with_name(f"{part} of before"))


@dataclass(frozen=True)
class Spooled:
    """The life of an engine with SpoolCache."""

    run: Run
    unsaved: float  # saves that failed when the folder could not be written
    last: Asked  # the answer when it could not be read, either
    exit_code: int | None  # of the server then, if it ended

    @property
    def log(self) -> str:
        return self.run.server.log.read_text(errors="replace")


def spooled(router: str, served_engine: ServedEngine, folder: Path) -> Spooled:
    store = folder / "spool"
    with running_in(router, "spoolcache", spoolcache(store), served_engine) as run:
        server, process = run.server, run.server.process
        assert process is not None
        run.ask_one_after_the_other(lambda: entries(store))
        run.ask_and_abort()
        remove(store, "tmp")
        run.answers += [traffic.ask(server, text) for text in NEW]
        run.look_at_the_end()
        unsaved = total(server, "spoolcache_store_skipped_total", reason="error")
        remove(store, "manifests")
        last = traffic.ask(server, KNOWN[0])
        if last.error:
            assert eventually(lambda: process.poll() is not None), "the server goes on without its worker"
        return Spooled(run, unsaved, last, process.poll())


@pytest.fixture(scope="module")
def lives(served_engine: ServedEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Spooled]:
    return {router: spooled(router, served_engine, tmp_path_factory.mktemp(router)) for router in ROUTERS}


def test_in_stock_it_crashes_the_engine_at_its_siblings_stats(served_engine: ServedEngine, tmp_path: Path) -> None:
    with running_in("stock", "spoolcache", spoolcache(tmp_path / "spool"), served_engine) as run:
        assert traffic.ask_all(run.server, KNOWN)[-1].error
        assert "RuntimeError: SpoolCache connector stats type is incompatible" in run.server.log.read_text()


def test_answers_are_right_also_if_the_folder_is_not_writable(lives: dict[str, Spooled], expected: Answers) -> None:
    for router, life in lives.items():
        assert traffic.wrong(life.run.answers, expected) == [], router
        assert life.unsaved == len(NEW), router
        assert (life.run.is_settled, life.run.wrong) == (True, []), router


def test_files_and_spoolcaches_numbers_are_the_same_in_kvobs(lives: dict[str, Spooled]) -> None:
    alone, first, second = (lives[router].run for router in ROUTERS)
    assert len(alone.stored) > len(KNOWN)
    assert alone.total("spoolcache_hit_tokens_total") > 0
    assert (first.stored, first.own) == (alone.stored, alone.own)
    assert second.stored == alone.stored


def test_kvobs_counts_what_spoolcache_counts(lives: dict[str, Spooled]) -> None:
    run = lives["kvobs"].run
    loads = run.total("kvobs_loads_total", connector=STORE, outcome="ok")
    assert loads == run.total("spoolcache_restore_seconds_count") == len(KNOWN)
    for metric in ("kvobs_offered_tokens_total", "kvobs_load_tokens_total"):
        assert run.total(metric, connector=STORE) == run.total("spoolcache_hit_tokens_total")
    assert run.total("kvobs_lookups_total", connector=STORE) == run.total("spoolcache_lookup_total")


def test_spoolcache_ends_its_worker_if_its_offer_is_unreadable(lives: dict[str, Spooled], expected: Answers) -> None:
    """Second after host memory it is not asked to."""
    alone, first, second = (lives[router] for router in ROUTERS)
    assert alone.last.error
    assert KILLS_ITSELF in alone.log
    assert first.last.error
    assert KILLS_ITSELF in first.log
    assert first.exit_code == alone.exit_code
    assert traffic.wrong([second.last], expected) == []
    assert second.exit_code is None
