"""The calls that an engine's processes are in, and the one that it died in, are seen from outside: real processes."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from uuid import uuid4

import pytest

from kvobs.export import engine_watch
from kvobs.export.engine_watch import NOT_SEEN, End, EngineWatch
from kvobs.log import forget
from kvobs.telemetry.timeline.black_box import SUFFIX, UNKNOWN, Identity, folder
from tests.support.watched import config, process


@pytest.fixture
def engine() -> str:
    return f"engine-{uuid4()}"


def name(engine: str) -> str:
    return Identity.of(config(engine)).pages()


@pytest.fixture
def watch(engine: str) -> EngineWatch:
    forget()
    return EngineWatch(name(engine), 2)


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["hangs", "holds the GIL", "stops"])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_call_that_does_not_return_is_shown_with_its_age(
    fault: str, rank: int | None, engine: str, watch: EngineWatch
) -> None:
    with process(engine, rank, fault):
        until(watch.calls)
        (call,) = watch.calls()
        assert call[:3] == ("remote", "start_load_kv", rank)
        assert 1 < (time.perf_counter_ns() - call.since_ns) / 1e9 < 20
        where = "scheduler" if rank is None else "rank 1"
        assert watch.states()[where] == "start_load_kv of remote"
        assert NOT_SEEN in watch.states().values()
    until(lambda: not watch.calls())


def test_a_call_that_returns_is_not_shown(engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, "returns") as ended:
        os.waitpid(ended.pid, 0)
        assert not watch.calls()
        assert not [one for one in os.listdir(folder()) if one.startswith(name(engine))], "its page is removed"


@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer"])
def test_of_a_layer_hook_the_connector_is_known_from_the_stack(hook: str, engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, "hangs", hook):
        until(watch.calls)
        assert [call[:3] for call in watch.calls()] == [("remote", hook, 0)]


def test_of_a_layer_hook_that_holds_the_gil_the_connector_is_not_known(engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, "holds the GIL", "save_kv_layer"):
        until(watch.calls)
        assert [call[:3] for call in watch.calls()] == [(UNKNOWN, "save_kv_layer", 0)]


def test_a_hang_is_logged_once(
    engine: str, watch: EngineWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_watch, "HANGS_NS", 1)
    with process(engine, 1, "hangs"):
        until(lambda: "remote" in caplog.text)
        time.sleep(2.2)
    assert caplog.text.count("connector 'remote' has been in start_load_kv on rank 1 for ") == 1


@pytest.mark.parametrize(
    ("fault", "reason"), [("exits", "exit 3"), ("is killed", "SIGKILL"), ("raises", "RuntimeError")]
)
@pytest.mark.parametrize("rank", [None, 1])
def test_the_call_that_the_engine_died_in_is_named(  # noqa: PLR0917 - a table's columns, and fixtures
    fault: str, reason: str, rank: int | None, engine: str, watch: EngineWatch, caplog: pytest.LogCaptureFixture
) -> None:
    with process(engine, 0 if rank else 1, "hangs", "wait_for_save"), process(engine, rank, fault) as dead:
        until(lambda: watch._first or watch._raised())
        assert watch.ended() == End("remote", "start_load_kv", rank, reason) == watch.end
        where = "scheduler" if rank is None else "rank 1"
        assert f"the engine has ended in start_load_kv of connector 'remote' on {where}: {reason}" in caplog.text
        last_words = f"connector 'remote' raised RuntimeError in start_load_kv on {where}; this ends the engine"
        assert (last_words in dead.last_words()) is (fault == "raises")


def test_an_end_outside_of_calls_blames_nobody(engine: str, watch: EngineWatch) -> None:
    with process(engine, None, "stays after it", "save_kv_layer") as dead:
        until(lambda: watch._opened)
        os.kill(dead.pid, signal.SIGKILL)
        assert watch.ended() == End("", "", None, "SIGKILL")


def test_an_exception_that_the_engine_survives_is_not_its_end(engine: str, watch: EngineWatch) -> None:
    """Whatever kvobs thinks of vLLM: a process that calls connectors goes on."""
    with process(engine, 1, "raises, and goes on"):
        until(lambda: watch._opened)
        assert watch.end is None


def test_pages_of_the_dead_are_removed_by_the_next_start(
    engine: str, monkeypatch: pytest.MonkeyPatch, watch: EngineWatch
) -> None:
    with process(engine, 0, "is killed") as dead:
        os.waitpid(dead.pid, 0)
    (left,) = (one for one in os.listdir(folder()) if one.startswith(name(engine)))
    old = left.replace(left.rsplit("-", 2)[1], "1")
    (folder() / left).rename(folder() / old)
    with process(f"{engine}-next", 0, "hangs"):
        names = os.listdir(folder())
        assert old not in names
        assert [one for one in names if one.endswith(SUFFIX)]


def test_the_end_is_logged_at_once_by_a_watch_that_nobody_asks(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = EngineWatch(name(engine), logs_end=True)
    with process(engine, 0, "exits"):
        until(lambda: watch.end)
    assert "the engine has ended in start_load_kv of connector 'remote' on rank 0: exit 3" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR
