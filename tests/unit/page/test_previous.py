"""The next start finds what ended the life before in the pages that its dead processes have left: real processes."""

import logging
import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvobs.page import previous, writer
from kvobs.page.description import End, Identity, ProcessInfo
from kvobs.page.layout import ENDED, LOOKED, RAISED
from kvobs.page.previous import SHOWN_S, described
from kvobs.page.reader import pages
from kvobs.page.writer import PageWriter, describe, plain
from tests.support import watched
from tests.support.waiting import eventually
from tests.support.watched import NAMES, REMOTE, config, process

S = 10**9
ENGINE: dict[str, Any] = {"launch": "vllm serve", "model": "tiny", "index": 0}
"""What an engine has in its next life, too."""


@pytest.fixture(autouse=True)
def same_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all engines be lives of one."""
    monkeypatch.setattr(writer, "plain", lambda names: replace(plain(names), **ENGINE))


def next_life(engine: str = "next", **changes: Any) -> ProcessInfo:
    """Start an engine; return how its scheduler's page describes it."""
    mine = watched.begin(engine, None, **changes)
    (page,) = (page for _, page in pages(Identity.of(config(engine)).server) if page.rank is None)
    assert page.process == mine.process, "readers find it there"
    mine.close()
    return page.process


def end_of(*dead: tuple[int | None, str], hook: str = "start_load_kv") -> None:
    """Let an engine with these ranks and faults die, one after the other."""
    for rank, fault in dead:
        with process("before", rank, fault, hook) as forked:
            if fault in ("hangs", "holds the GIL"):
                assert eventually(partial(looked_long_after, rank))
                forked.kill()
            else:
                os.waitpid(forked.pid, 0)


def looked_long_after(rank: int | None) -> bool:
    """Return whether the thread of a process has seen that it hangs."""
    (page,) = (page for _, page in pages() if page.rank == rank)
    return any(page.words[LOOKED] - call.since_ns > S for call in page.calls())


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize(("fault", "reason"), [("hangs", "unknown"), ("raises", "RuntimeError")])
def test_the_call_that_the_life_before_died_in_is_named(
    fault: str, reason: str, rank: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    end_of((rank, fault))
    process = next_life()
    assert process.previous == End("remote", "start_load_kv", rank, reason)
    assert 0 <= process.previous_ago_s < 60
    where = "scheduler" if rank is None else "rank 1"
    text = f"the previous engine ended in start_load_kv of connector 'remote' on {where}: {reason}, "
    (record,) = (record for record in caplog.records if text in record.getMessage())
    assert record.levelno == logging.WARNING


def test_only_the_next_lifes_scheduler_finds_it_and_just_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_of((1, "raises"))
    rank = watched.begin("next", 0)
    assert rank.process.previous is None
    monkeypatch.setattr("kvobs.page.files.NEW_NS", 0)
    assert next_life("next").previous is not None
    rank.close()
    assert list(folder.iterdir()) == [], "its start has removed the page"
    assert next_life("later").previous is None


@pytest.mark.parametrize("other", [{"launch": "vllm serve --port 1"}, {"model": "large"}, {"index": 1}], ids=str)
def test_another_engines_start_leaves_it_while_it_would_be_shown(
    other: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvobs.page.files.NEW_NS", 0)
    end_of((1, "raises"), (2, "hangs"), (3, "is killed"))
    for rank in (0, None):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "plain", lambda names: replace(plain(names), **ENGINE | other))
            watched.begin("another", rank).close()
    assert len(list(folder.iterdir())) == 2, "of two there is nothing to be known"
    patient = time.perf_counter_ns
    monkeypatch.setattr(previous, "perf_counter_ns", lambda: patient() + int(SHOWN_S * S))
    watched.begin("host", 0).close()
    assert list(folder.iterdir()) == []


def test_what_another_engines_start_has_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobs.page.files.NEW_NS", 0)
    end_of((1, "raises"))
    with monkeypatch.context() as patch:
        patch.setattr(writer, "plain", lambda names: replace(plain(names), **ENGINE | {"index": 7}))
        watched.begin("another", None).close()
    assert next_life().previous == End("remote", "start_load_kv", 1, "RuntimeError")


def test_an_exception_or_the_first_of_several_is_why_calls_hung() -> None:
    end_of((0, "hangs"), (1, "raises"), (2, "raises"))
    assert next_life().previous == End("remote", "start_load_kv", 1, "RuntimeError")


@pytest.mark.parametrize("fault", ["returns", "stays after it", "exits", "is killed"])
def test_a_life_that_ended_well_or_in_no_long_call_leaves_none(fault: str) -> None:
    if fault == "stays after it":
        with process("before", 1, fault) as forked:
            os.kill(forked.pid, signal.SIGKILL)
    else:
        end_of((1, fault))
    assert next_life().previous is None


def left(engine: str, at_ns: int, *, rank: int = 1, hung: bool = False, **info: Any) -> PageWriter:
    """Leave the page of a process that died at this time."""
    began = replace(describe(replace(plain(NAMES), **ENGINE | info), rank), started="of another")
    page = writer.begin(config(engine), began)
    page.raised(REMOTE, "wait_for_save", OSError())
    page.words[RAISED] = at_ns
    if hung:
        page.words[RAISED] = 0
        page.words[page.marks(0, "start_load_kv")] = at_ns - 2 * S
        page.words[LOOKED] = at_ns
    return page


@pytest.mark.parametrize("other", [{"launch": "vllm serve --port 1"}, {"model": "large"}, {"index": 1}, {}], ids=str)
def test_an_end_of_another_server_model_or_number_does_not_count(other: dict[str, Any]) -> None:
    page = left("before", time.perf_counter_ns(), **other)
    assert (next_life().previous is None) is bool(other)
    assert page.process.previous is None


@pytest.mark.parametrize("hung", [False, True])
@pytest.mark.parametrize(("ago_s", "is_shown"), [(1, True), (SHOWN_S - 60, True), (SHOWN_S + 1, False), (-60, False)])
def test_an_end_is_shown_for_a_quarter_of_an_hour(ago_s: float, is_shown: bool, hung: bool) -> None:
    page = left("before", time.perf_counter_ns() - int(ago_s * S), hung=hung)
    found = next_life()
    assert (found.previous is not None) is is_shown
    if is_shown:
        assert found.previous == End(*(("cpu", "start_load_kv", 1, "unknown") if hung else
                                       ("remote", "wait_for_save", 1, "OSError")))  # fmt: skip
        assert ago_s <= found.previous_ago_s < ago_s + 50
    assert not page.words[ENDED]


def test_of_several_lives_the_last_end_is_shown() -> None:
    now = time.perf_counter_ns()
    lives = [left("first", now - 30 * S, rank=0), left("third", now - 10 * S, rank=2), left("second", now - 20 * S)]
    lives.append(left("third", now - 9 * S, rank=3))
    lives.append(left("third", now - 99 * S, rank=4, hung=True))
    found = next_life()
    assert found.previous is not None
    assert (found.previous.rank, round(found.previous_ago_s)) == (2, 10), "the first of its ranks"
    assert len(lives) == 5


def test_the_end_of_a_process_of_this_life_is_no_previous_one() -> None:
    page = left("next", time.perf_counter_ns())
    assert next_life("next").previous is None
    assert page.rank == 1


def test_pages_that_are_none_do_not_hinder(folder: Path) -> None:
    page = left("before", time.perf_counter_ns())
    (path,) = folder.iterdir()
    (folder / "x-0-rank1-1-1.page").write_bytes(bytes(4096))
    (folder / "y-0-rank1-1-1.page").write_bytes(path.read_bytes()[:-8])
    (folder / "z-0-rank1-1-1.page").symlink_to("/proc/999999999/fd/3")
    assert next_life().previous == End("remote", "wait_for_save", 1, "OSError")
    assert page.rank == 1


@pytest.mark.usefixtures("in_production")
def test_a_fault_in_the_search_does_not_cost_the_engine_its_page(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> Any:
        raise LookupError

    monkeypatch.setattr(previous, "pages", fails)
    assert next_life().previous is None
    assert "internal error in kvobs's telemetry (record)" in caplog.text


def test_an_end_outside_of_calls_is_described_as_such() -> None:
    assert described(End("", "", None, "SIGKILL")) == " outside any connector's call (scheduler: SIGKILL)"
    assert described(End("a", "get_finished", 2, "exit 1")) == " in get_finished of connector 'a' on rank 2: exit 1"
