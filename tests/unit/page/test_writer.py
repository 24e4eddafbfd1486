"""The page of a process: when it begins and goes, and which exceptions it names as the end of its engine."""

import gc
import os
import stat
import subprocess
import sys
import time
from asyncio import CancelledError
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT
from kvobs.page.description import Identity
from kvobs.page.layout import SINCE, STEPS
from kvobs.page.reader import Page, pages
from kvobs.page.writer import PageWriter
from kvobs.probe.recorder import Recorder
from tests.support import watched
from tests.support.pending import Signalled, in_collections
from tests.support.waiting import eventually
from tests.support.watched import NAMES, REMOTE, config


def begin(engine: str = "e", rank: int | None = 1, **more: Any) -> PageWriter:
    return watched.begin(engine, rank, **more)


def read(engine: str = "e") -> list[Page]:
    return [page for _, page in pages(Identity.of(config(engine)).server)]


def test_a_page_is_private_and_goes_when_it_is_closed(folder: Path) -> None:
    mine = begin()
    (path,) = folder.iterdir()
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o400)
    (page,) = read()
    assert (page.pid, page.rank, page.is_alive, page.has_ended_well) == (os.getpid(), 1, True, False)
    mine.close()
    assert (page.has_ended_well, list(folder.iterdir())) == (True, [])


def test_a_page_goes_with_its_engine_and_loses_no_signal(folder: Path) -> None:
    """Of an engine in this process that was not shut down: code that its collection ran would swallow a signal's."""
    with in_collections():
        for _ in range(20):
            cycle: list[Any] = [begin()]
            cycle.append(cycle)
            del cycle
            with pytest.raises(Signalled):
                gc.collect(0)
    assert eventually(lambda: not list(folder.iterdir()))


EXITS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from kvobs.page import files, writer
files.folder = lambda: Path(sys.argv[1])
config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"), instance_id="1")
mine = writer.begin(config, writer.describe(writer.plain(["one"]), 1))
if sys.argv[2]:
    mine.raised(0, "wait_for_save", OSError())
"""


@pytest.mark.parametrize("has_raised", ["", "raised"])
def test_a_page_stays_at_exit_only_if_it_names_the_engines_end(has_raised: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", EXITS, folder, has_raised], check=True, cwd=ROOT)
    assert len(list(folder.iterdir())) == bool(has_raised)


def test_a_fork_does_not_remove_it_and_has_not_ended_it(folder: Path) -> None:
    mine = begin()
    pid = os.fork()
    if not pid:
        mine.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 1
    (page,) = read()
    assert not page.has_ended_well
    mine.close()
    assert page.has_ended_well


def test_engines_of_a_group_are_one_start_and_several_pages() -> None:
    """As vLLM names them for dense models; the group's name is the same without the suffix."""
    several = [begin("e_dp0", None), begin("e_dp3", None), begin("other", None)]
    assert [Identity.of(config(name)).number for name in ("e", "e_dp0", "e_dp3")] == [0, 0, 3]
    group = Identity.of(config("e"))
    assert [len(list(pages(f"{group.server}-{number}-"))) for number in (0, 1, 3)] == [1, 0, 1]
    assert len(several) == 3


def test_isolated_exceptions_or_those_of_a_reset_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mine = begin(rank=0, contained={REMOTE})
    for index, hook, error in ((REMOTE, "wait_for_save", OSError()), (0, "reset_cache", OSError()),
                               (0, "wait_for_save", SystemExit())):  # fmt: skip
        mine.raised(index, hook, error)
        assert read()[0].raised() is None
    assert "crashes the engine" not in caplog.text
    mine.raised(0, "start_load_kv", CancelledError())
    raised = read()[0].raised()
    assert (raised and raised.error) == "CancelledError", "nor is it an Exception, as pyo3's PanicException"
    mine.raised(0, "wait_for_save", OSError())
    raised = read()[0].raised()
    assert raised is not None
    assert (raised[:3], raised.error) == (("cpu", "wait_for_save", 0), "OSError")
    assert 0 <= time.perf_counter_ns() - raised.since_ns < 60 * 10**9
    assert "connector 'cpu' raised OSError in wait_for_save on rank 0; this crashes the engine" in caplog.text


def raising(recorder: Recorder, index: int, error: Exception) -> None:
    """Raise the error in a call into a connector, which has handled another one before."""

    def call() -> None:
        try:
            raise KeyError
        except KeyError:
            raise error  # noqa: B904 - as connectors do

    recorder.timed(index, "wait_for_save", call)()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_steps_last_connector_is_not_blamed_for_a_past_error(is_ours: bool) -> None:
    """vLLM's V1 model runner calls the hooks of a step's end in a `finally`; what failed once often fails again."""
    mine = begin()
    recorder = Recorder(2, names=NAMES, page=mine)
    mine.words[SINCE] = time.perf_counter_ns()

    def step() -> None:
        try:
            if is_ours:
                raising(recorder, REMOTE, OSError("first"))
            raise RuntimeError("in the model")
        finally:
            mine.words[SINCE], mine.words[STEPS] = 0, 1
            raising(recorder, 0, OSError("again"))

    with pytest.raises(OSError, match="again"):
        step()
    raised = read()[0].raised()
    assert (raised and raised[:3]) == (("remote", "wait_for_save", 1) if is_ours else None)
    mine.words[STEPS] += 1
    assert read()[0].raised() is None, "it has run another step"


def test_exceptions_in_each_others_context_are_passed_on() -> None:
    first, second = OSError("first"), OSError("second")
    first.__context__, second.__context__ = second, first

    def call() -> None:
        raise first

    with pytest.raises(OSError, match="first"):
        Recorder(1).timed(0, "wait_for_save", call)()
