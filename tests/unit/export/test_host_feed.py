"""On a host without an engine's EngineCore its first rank runs an exporter, however the hosts are known."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.export import feed as feed_module
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

    monkeypatch.setattr(feed_module, "Feed", feed)
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
    return HostFeed(config(backend, host), Options(**options), box, rank), box


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


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BlackBox]:
    """Return what begins the page of a process, in a folder of the test."""
    monkeypatch.setattr(black_box, "folder", lambda: tmp_path)
    return lambda vllm_config, rank: black_box.begin(vllm_config, ["disk"], rank, ())


@pytest.mark.parametrize(("here", "ranks"), [((1, 3), (1, 3)), ((0, 1), None), ((1, None), None), ((), None)])
def test_where_ray_places_ranks_the_pages_on_the_host_decide_after_the_first_step(
    here: tuple[int | None, ...],
    ranks: tuple[int, ...] | None,
    feeds: list[Fed],
    begin: Callable[..., BlackBox],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, other = config("ray"), config("ray")
    other.kv_transfer_config.engine_id = "another"
    boxes = [*(begin(made, rank) for rank in here), begin(other, None), begin(other, 0)]
    threads: list[Callable[[], None]] = []
    monkeypatch.setattr(host_feed, "Thread", lambda target, **_: SimpleNamespace(start=lambda: threads.append(target)))
    box = BlackBox(["disk"], 1)
    HostFeed(made, Options(), box, 1)
    assert not feeds
    box.words[STEPS] = 1
    threads[0]()
    assert [(fed.engine.ranks, fed.engine.parent) for fed in feeds] == ([] if ranks is None else [(ranks, 0)])
    for each in boxes:
        each.close()


def test_a_rank_begins_by_itself_after_its_first_step(feeds: list[Fed], begin: Callable[..., BlackBox]) -> None:
    box = begin(made := config("ray"), 1)
    HostFeed(made, Options(), box, 1)
    time.sleep(0.1)
    assert not feeds
    box.words[STEPS] = 1
    assert eventually(lambda: bool(feeds), 10)
    box.close()


def test_a_rank_that_ends_before_its_first_step_runs_none(
    feeds: list[Fed], begin: Callable[..., BlackBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[Callable[[], None]] = []
    monkeypatch.setattr(host_feed, "Thread", lambda target, **_: SimpleNamespace(start=lambda: threads.append(target)))
    box = begin(made := config("ray"), 1)
    host = HostFeed(made, Options(), box, 1)
    host.close(is_well=True)
    box.words[STEPS] = 1
    threads[0]()
    assert not feeds
    box.close()
