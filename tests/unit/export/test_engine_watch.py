"""The calls that an engine's processes are in, and the one that it died in, are seen from outside: real processes."""

import dataclasses
import logging
import os
import signal
import time
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from kvobs.export import engine_watch
from kvobs.export.engine import Engine
from kvobs.export.engine_watch import NOT_SEEN, STOPPED, EngineWatch
from kvobs.log import forget
from kvobs.page import reader
from kvobs.page.description import End, Identity
from kvobs.page.previous import SHOWN_S
from kvobs.page.reader import Call, Page, names_of
from tests.support.waiting import eventually
from tests.support.watched import config, process
from tests.support.written import Pages


@pytest.fixture
def engine() -> str:
    return f"engine-{uuid4()}"


def watched(engine: str, **more: bool) -> EngineWatch:
    return EngineWatch(Engine(f"{Identity.of(config(engine)).server}-0-"), **more)


def pages_of(watch: EngineWatch) -> tuple[Page, ...]:
    return watch._engine.all()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "LOOK_S", 0.05)


@pytest.fixture
def watch(engine: str) -> EngineWatch:
    forget()
    return watched(engine)


@pytest.mark.parametrize("fault", ["hangs", "holds the GIL"])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_call_that_hangs_is_shown_with_its_age(fault: str, rank: int | None, engine: str, watch: EngineWatch) -> None:
    with process(engine, rank, fault):
        assert eventually(watch.calls)
        (call,) = watch.calls()
        assert call[:3] == ("remote", "start_load_kv", rank)
        assert (time.perf_counter_ns() - call.since_ns) / 1e9 > 1
        where = "scheduler" if rank is None else "rank 1"
        others = {"rank 0": NOT_SEEN} if rank is None else {}
        assert watch.states() == {where: "start_load_kv of remote", **others}
    assert eventually(lambda: not watch.calls())


def test_a_call_that_returns_is_not_shown(engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, "returns") as ended:
        os.waitpid(ended.pid, 0)
        assert not watch.calls()
        assert not names_of(watch._engine.name), "its page is removed"


@pytest.mark.parametrize("way", ["hangs", "holds the GIL"])
@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer"])
def test_layer_hooks_connector_is_known(way: str, hook: str, engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, way, hook):
        assert eventually(watch.calls)
        assert [call[:3] for call in watch.calls()] == [("remote", hook, 0)]


def test_a_hang_is_logged_once(
    engine: str, watch: EngineWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_watch, "HANGS_NS", 1)
    with process(engine, 1, "hangs"):
        assert eventually(lambda: "remote" in caplog.text)
        time.sleep(0.5)
    assert caplog.text.count("connector 'remote' has been in start_load_kv on rank 1 for ") == 1


@pytest.mark.parametrize(("age_s", "is_logged"), [(9, False), (11, True)])
def test_a_call_hangs_after_ten_seconds(
    age_s: int, is_logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EngineWatch, "look", lambda _: time.sleep(0.1))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 10**15)
    watch, call = watched("none"), Call("remote", "wait_for_save", 0, 10**15 - age_s * 10**9)
    monkeypatch.setattr(watch, "calls", lambda: [call])
    watch._log_hanging()
    assert (f"has been in wait_for_save on rank 0 for {age_s} s" in caplog.text) is is_logged


@pytest.mark.parametrize(
    ("fault", "reason"), [("exits", "exit 3"), ("is killed", "SIGKILL"), ("raises", "RuntimeError")]
)
@pytest.mark.parametrize("rank", [None, 1])
def test_the_call_that_the_engine_died_in_is_named(  # noqa: PLR0917 - a table's columns, and fixtures
    fault: str, reason: str, rank: int | None, engine: str, watch: EngineWatch, caplog: pytest.LogCaptureFixture
) -> None:
    with process(engine, 0 if rank else 1, "hangs", "wait_for_save"), process(engine, rank, fault) as dead:
        assert eventually(lambda: watch._first or watch._raised())
        assert watch.ended() == End("remote", "start_load_kv", rank, reason) == watch.end
        where = "scheduler" if rank is None else "rank 1"
        assert f"the engine has ended in start_load_kv of connector 'remote' on {where}: {reason}" in caplog.text
        last_words = f"connector 'remote' raised RuntimeError in start_load_kv on {where}; this crashes the engine"
        assert (last_words in dead.last_words()) is (fault == "raises")


def test_an_end_outside_of_calls_blames_nobody(engine: str, watch: EngineWatch) -> None:
    with process(engine, 0, "hangs") as other, process(engine, None, "stays after it", "save_kv_layer") as dead:
        assert eventually(lambda: len(pages_of(watch)) == 2)
        os.kill(dead.pid, signal.SIGKILL)
        assert watch._has_noted.wait(60), "vLLM takes longer until it kills the others upon it"
        os.kill(other.pid, signal.SIGKILL)
        assert watch.ended() == End("", "", None, "SIGKILL")


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("fault", ["hangs", "stays after it"])
def test_engine_killed_whole_reports_only_a_call_that_hung(  # noqa: PLR0917 - its table, and fixtures
    fault: str,
    has_memory: bool,
    engine: str,
    watch: EngineWatch,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So vLLM stops an engine when its server gets SIGTERM: by a tree of processes, children first.

    The kernel frees a worker's memory for seconds, in which it seems to be alive.
    """
    monkeypatch.setattr(engine_watch, "AT_ONCE_S", 0.5)  # between two kills of this test another process may run
    with process(engine, 0, "stays after it") as worker, process(engine, None, fault) as core:
        assert eventually(lambda: len(pages_of(watch)) == 2 and (fault != "hangs" or watch.calls()))
        if has_memory:
            monkeypatch.setattr(reader, "is_ending", lambda pid: pid in (worker.pid, core.pid))
        for each in (core,) if has_memory else (worker, core):
            os.kill(each.pid, signal.SIGKILL)
        hung = End("remote", "start_load_kv", None, "SIGKILL")
        assert watch._has_noted.wait(60)
        end = watch.ended()
    assert (end, watch.end) == ((hung, hung) if fault == "hangs" else (None, None))
    assert ("the engine has ended" in caplog.text) is (fault == "hangs")


@pytest.mark.parametrize(
    ("parent", "idle_ns", "is_named"),
    [("runs", 10**18, True), ("runs", 0, False), ("ends", 10**18, False), (None, 10**18, False)],
    ids=["killed by another", "stopped by vLLM, after a while", "its parent too", "nothing is known of its parent"],
)
def test_a_lone_rank_that_worked_under_its_parent_was_killed(
    parent: str | None, idle_ns: int, is_named: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "IDLE_NS", idle_ns)
    monkeypatch.setattr(engine_watch, "is_ending", lambda pid: pid != os.getpid() or parent == "ends")
    watch = watched(engine)
    assert watch.states() == {}
    with process(engine, 1, "stays after it") as rank:
        assert eventually(lambda: pages_of(watch) and pages_of(watch)[0].worked_ns)
        (page,) = pages_of(watch)
        assert page.process.parent == os.getpid()
        if parent is None:
            page.process = dataclasses.replace(page.process, parent=0)
        os.kill(rank.pid, signal.SIGKILL)
        assert watch._has_noted.wait(60)
        assert watch.ended() == (End("", "", 1, "SIGKILL") if is_named else None)


def test_an_exception_that_the_engine_survives_is_not_its_end(engine: str, watch: EngineWatch) -> None:
    """Whatever kvobs thinks of vLLM: a process that calls connectors goes on."""
    with process(engine, 1, "raises, and goes on"):
        assert eventually(lambda: pages_of(watch))
        assert watch.end is None


def test_the_end_is_logged_at_once_by_a_watch_that_nobody_asks(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = watched(engine, logs_end=True)
    with process(engine, 0, "exits"):
        assert eventually(lambda: watch.end)
    assert "the engine has ended in start_load_kv of connector 'remote' on rank 0: exit 3" in caplog.text
    assert caplog.records[-1].levelno == logging.ERROR


def test_a_stopped_process_is_named_and_no_connector(
    engine: str, watch: EngineWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_watch, "HANGS_NS", 10**9)
    with process(engine, 1, "hangs") as hanging, process(engine, 0, "stays after it"):
        os.kill(hanging.pid, signal.SIGSTOP)
        assert eventually(lambda: "rank 1 is stopped (SIGSTOP, or a debugger); the engine waits for it" in caplog.text)
        assert (watch.calls(), watch.states()["rank 1"], "has been in" in caplog.text) == ([], STOPPED, False)
        assert watch.states()["rank 0"] != STOPPED
        seen_ns = time.perf_counter_ns()
        watch.calls()
        assert watch.halted_ns > seen_ns
        os.kill(hanging.pid, signal.SIGCONT)
        assert eventually(watch.calls)
        assert watch.calls()[0].since_ns > seen_ns, "the time in which it was stopped does not count"
        assert watch.states()["rank 1"] == "start_load_kv of remote"


@pytest.mark.parametrize(("gap_s", "is_shown"), [(9, True), (11, False)])
def test_after_a_watch_that_stood_ages_begin_again(gap_s: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineWatch, "look", lambda _: time.sleep(0.1))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 10**15)
    watch, call = watched("none"), Call("remote", "wait_for_save", 0, 0)
    page: Any = SimpleNamespace(
        rank=0, pid=os.getpid(), is_alive=True, is_stopped=False, calls=lambda: [call], halted_ns=0
    )
    watch._engine.pages["page"] = page
    watch._looked_ns = 10**15 - gap_s * 10**9
    assert watch.calls() == ([call] if is_shown else [])
    watch._engine.pages.clear()  # its thread may look once more, as it really does


def test_the_end_of_the_previous_life_is_shown_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a quarter of an hour, of which some had passed at the start."""
    end, now = End("remote", "start_load_kv", 1, "SIGKILL"), time.time()
    pages = Pages()
    watch = EngineWatch(pages.engine())
    assert watch.previous is None
    (page,) = watch._engine.all()
    page.process = dataclasses.replace(page.process, previous=end, previous_ago_s=60.0)
    for later_s, shown in ((0, end), (SHOWN_S - 61, end), (SHOWN_S - 59, None)):
        monkeypatch.setattr(time, "time", lambda later_s=later_s: now + later_s)
        assert watch.previous == shown
    assert watch.end is None
