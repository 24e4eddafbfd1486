"""On a host without an engine's EngineCore its first rank runs an exporter, however the hosts are known."""

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.export import host_feed
from kvobs.export.host_feed import HostFeed
from kvobs.probe import black_box
from kvobs.probe.black_box import STEPS, BlackBox
from kvobs.schema.config import EXPORTER_VARIABLE
from kvobs.schema.options import ExporterOptions, Options
from kvobs.telemetry.payload.wire import EngineInfo
from kvobs.testing import engine_config, transfer_config
from tests.engine.serving import eventually

RANKS, HOSTS = 4, 2
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


class Fed:
    """Stands in for the feed of an exporter."""

    def __init__(self, engine: EngineInfo) -> None:
        self.engine, self.closed = engine, list[bool]()

    def close(self, *, is_well: bool) -> None:
        self.closed.append(is_well)


@pytest.fixture
def feeds(monkeypatch: pytest.MonkeyPatch) -> list[Fed]:
    """Return the feeds that are made."""
    made: list[Fed] = []

    def feed(engine: EngineInfo) -> Fed:
        made.append(Fed(engine))
        return made[-1]

    monkeypatch.setattr(host_feed, "Feed", feed)
    monkeypatch.setattr(host_feed, "LOOK_S", 0.01)
    monkeypatch.delenv(EXPORTER_VARIABLE, raising=False)
    return made


def config(backend: str, host: int = 1) -> Any:
    """Return the configuration of a worker of an engine with two ranks on each host."""
    made = engine_config(transfer_config("kvobs", [CONNECTOR]))
    made.parallel_config = SimpleNamespace(
        distributed_executor_backend=backend, node_rank_within_dp=host, local_world_size=RANKS // HOSTS,
        world_size=RANKS, data_parallel_index=0, data_parallel_rank=0, data_parallel_rank_local=0,
    )  # fmt: skip
    return made


def started(rank: int, backend: str = "mp", host: int = 1, **options: Any) -> tuple[HostFeed, BlackBox]:
    box = BlackBox(["disk"], rank)
    return HostFeed(config(backend, host), (), Options(**options), box, rank), box


def test_the_first_rank_of_a_host_without_the_scheduler_runs_it_at_once(feeds: list[Fed]) -> None:
    hosts = [started(rank, host=rank // HOSTS)[0] for rank in range(RANKS)]
    (fed,) = feeds
    assert (fed.engine.ranks, fed.engine.has_core, fed.engine.connectors) == ((2, 3), False, ())
    assert (fed.engine.pid, fed.engine.parent, fed.engine.port) == (os.getpid(), os.getppid(), 9464)
    for host in hosts:
        host.close(is_well=True)
    assert fed.closed == [True]


@pytest.mark.parametrize("backend", ["mp", "uni", "external_launcher"])
def test_nothing_runs_beside_the_scheduler(backend: str, feeds: list[Fed]) -> None:
    host, box = started(0, backend, host=0)
    box.words[STEPS] = 1
    host.close(is_well=False)
    assert not feeds


@pytest.mark.parametrize(
    ("exporter", "runs", "level"), [("auto", 1, logging.INFO), (None, 0, logging.WARNING), ({"port": 1234}, 1, None)]
)
def test_the_option_decides(
    exporter: Any, runs: int, level: int | None, feeds: list[Fed], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    started(2, exporter=ExporterOptions(**exporter) if isinstance(exporter, dict) else exporter)
    assert len(feeds) == runs
    said = [record for record in caplog.records if "EngineCore is on another host" in record.getMessage()]
    assert [record.levelno for record in said] == ([level] if level else [])


@pytest.mark.parametrize(
    ("here", "ranks"),
    [({"rank1", "rank3"}, (1, 3)), ({"rank0", "rank1"}, None), ({"rank1", "scheduler"}, None), (set(), None)],
)
def test_where_ray_places_ranks_the_pages_on_the_host_decide_after_the_first_step(
    here: set[str], ranks: tuple[int, ...] | None, feeds: list[Fed], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def places(engine: str) -> set[str]:
        asked.append(engine)
        return here

    monkeypatch.setattr(host_feed, "places", places)
    _, box = started(1, "ray")
    assert not asked
    box.words[STEPS] = 1
    assert eventually(lambda: bool(asked) and bool(feeds) is (ranks is not None), 10)
    assert [(fed.engine.ranks, fed.engine.parent) for fed in feeds] == ([] if ranks is None else [(ranks, 0)])


def test_a_rank_that_ends_before_its_first_step_runs_none(feeds: list[Fed], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Callable[[], None]] = []
    monkeypatch.setattr(host_feed, "Thread", lambda target, **_: SimpleNamespace(start=lambda: threads.append(target)))
    monkeypatch.setattr(host_feed, "places", lambda _: {"rank1"})
    host, box = started(1, "ray")
    host.close(is_well=True)
    box.words[STEPS] = 1
    threads[0]()
    assert not feeds


def test_places_are_those_of_the_pages_of_one_engine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "folder", lambda: tmp_path)
    for page in ("ab-0-rank1-5-77.page", "ab-0-scheduler-5-78.page", "ab-1-rank2-5-79.page", "ab-0-rank3-5-80.end"):
        (tmp_path / page).touch()
    assert black_box.places("ab-0") == {"rank1", "scheduler"}
