"""The page of a process: where it is, who may read it, when it goes. What is seen in it: ``test_engine_watch``."""

import gc
import logging
import os
import stat
import subprocess
import sys
import time
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from docs.pages import ROOT
from kvobs.log import forget
from kvobs.probe import black_box
from kvobs.probe.black_box import BlackBox, Identity, Page, pages
from kvobs.probe.layer_calls import ARGUMENTS, LayerCall, LayerCalls
from kvobs.probe.recorder import Recorder
from kvobs.schema.options import Options
from kvobs.telemetry import recorders
from tests.support.pending import Signalled, in_collections
from tests.support.probes import Kind, each_probe, recorder_of
from tests.support.watched import NAMES, REMOTE, config


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget()
    monkeypatch.setattr(black_box, "folder", lambda: tmp_path / "pages")
    return tmp_path / "pages"


def begin(engine: str = "e", rank: int | None = 1) -> BlackBox:
    return black_box.begin(config(engine), NAMES, rank, ())


def read(engine: str = "e") -> list[Page]:
    return [page for _, page in pages(Identity.of(config(engine)).pages())]


def test_a_page_is_private_and_goes_when_it_is_closed(folder: Path) -> None:
    box = begin()
    (path,) = folder.iterdir()
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o400)
    (page,) = read()
    assert (page.pid, page.rank, page.is_alive, page.has_ended_well) == (os.getpid(), 1, True, False)
    box.close()
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
    while list(folder.iterdir()):
        time.sleep(0.05)


EXITS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from kvobs.probe import black_box
black_box.folder = lambda: Path(sys.argv[1])
config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="e"), instance_id="1")
box = black_box.begin(config, ["one"], 1, ())
if sys.argv[2]:
    box.raised(0, "wait_for_save", OSError())
"""


@pytest.mark.parametrize("has_raised", ["", "raised"])
def test_a_page_stays_at_the_exit_only_if_it_names_what_ended_the_engine(has_raised: str, folder: Path) -> None:
    subprocess.run([sys.executable, "-c", EXITS, folder, has_raised], check=True, cwd=ROOT)
    assert len(list(folder.iterdir())) == bool(has_raised)


def test_a_fork_does_not_remove_it(folder: Path) -> None:
    box = begin()
    pid = os.fork()
    if not pid:
        box.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 1


def test_the_calls_of_a_process_are_on_its_page() -> None:
    recorder = recorders.build(NAMES, Options(), config("e"), None, 1).recorder
    calls = recorder.timed(REMOTE, "start_load_kv", read()[0].calls)()
    assert [call[:3] for call in calls] == [("remote", "start_load_kv", 1)]


def test_engines_of_a_group_are_one_start_and_several_pages() -> None:
    """As vLLM names them for dense models; the group's name is the same without the suffix."""
    boxes = [begin("e_dp0", None), begin("e_dp3", None), begin("other", None)]
    assert [Identity.of(config(name)).number for name in ("e", "e_dp0", "e_dp3")] == [0, 0, 3]
    group = Identity.of(config("e"))
    assert [len(list(pages(group.pages(number)))) for number in (0, 1, 3)] == [1, 0, 1]
    assert len(boxes) == 3


def test_an_exception_of_an_isolated_connector_or_of_a_reset_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    box = black_box.begin(config("e"), NAMES, 0, {REMOTE})
    for child, hook, error in ((REMOTE, "wait_for_save", OSError()), (0, "reset_cache", OSError()),
                               (0, "wait_for_save", SystemExit())):  # fmt: skip
        box.raised(child, hook, error)
        assert read()[0].raised() is None
    assert "ends the engine" not in caplog.text
    box.raised(0, "start_load_kv", CancelledError())
    raised = read()[0].raised()
    assert (raised and raised.error) == "CancelledError", "nor is it an Exception, as pyo3's PanicException"
    box.raised(0, "wait_for_save", OSError())
    raised = read()[0].raised()
    assert raised is not None
    assert (raised[:3], raised.error) == (("cpu", "wait_for_save", 0), "OSError")
    assert 0 <= time.perf_counter_ns() - raised.since_ns < 60 * 10**9
    assert "connector 'cpu' raised OSError in wait_for_save on rank 0; this ends the engine" in caplog.text


@each_probe
@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer"])
def test_a_layer_hooks_call_in_progress_is_that_of_the_connector_that_is_in_it(kind: Kind, hook: str) -> None:
    box = begin()
    recorder, seen = recorder_of(kind, 2, names=NAMES, box=box), list[list[tuple[Any, ...]]]()

    def call(*_: Any) -> None:
        seen.append([call[:2] for call in read()[0].calls()])

    layers = LayerCalls(hook, [LayerCall(i, call) for i in range(2)], recorder)
    for _ in range(2):
        layers.fan_out(*ARGUMENTS[hook])
    assert seen == [[(name, hook)] for name in NAMES] * 2
    assert read()[0].calls() == []


class Call(Thread):
    """A call on its own thread, which ends when it may."""

    def __init__(self, timed: Callable[[Any], object]) -> None:
        super().__init__(target=lambda: timed(self))
        self.begun, self.may_end = Event(), Event()

    def act(self) -> None:
        self.begun.set()
        self.may_end.wait()


@each_probe
@pytest.mark.parametrize(("order", "seen"), [("ABab", [1, 1, 1, 0]), ("ABba", [1, 1, 0, 0]), ("AaBb", [1, 0, 1, 0])])
def test_calls_that_overlap_leave_none_in_progress(kind: Kind, order: str, seen: list[int]) -> None:
    """Each begins and ends on its thread; the one that began last is seen."""
    timed = recorder_of(kind, 2, names=NAMES, box=begin()).timed(0, "wait_for_save", Call.act)
    calls, found = {name: Call(timed) for name in "AB"}, list[int]()
    for each in order:
        call = calls[each.upper()]
        if each.isupper():
            call.start()
            call.begun.wait()
        else:
            call.may_end.set()
            call.join()
        found.append(len(read()[0].calls()))
    assert found == seen


def raising(recorder: Recorder, child: int, error: Exception) -> None:
    """Raise the error in a call into a connector, which has handled another one before."""

    def call() -> None:
        try:
            raise KeyError
        except KeyError:
            raise error  # noqa: B904 - as connectors do

    recorder.timed(child, "wait_for_save", call)()


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_connector_that_a_step_ends_with_is_not_blamed_for_an_exception_before(is_ours: bool) -> None:
    """vLLM's V1 model runner calls the hooks of a step's end in a `finally`; what failed once often fails again."""
    box = begin()
    recorder = Recorder(2, names=NAMES, box=box)
    box.words[black_box.SINCE] = time.perf_counter_ns()

    def step() -> None:
        try:
            if is_ours:
                raising(recorder, REMOTE, OSError("first"))
            raise RuntimeError("in the model")
        finally:
            box.words[black_box.SINCE], box.words[black_box.STEPS] = 0, 1
            raising(recorder, 0, OSError("again"))

    with pytest.raises(OSError, match="again"):
        step()
    raised = read()[0].raised()
    assert (raised and raised[:3]) == (("remote", "wait_for_save", 1) if is_ours else None)
    box.words[black_box.STEPS] += 1
    assert read()[0].raised() is None, "it has run another step"


def test_exceptions_that_name_each_other_as_their_context_are_passed_on() -> None:
    first, second = OSError("first"), OSError("second")
    first.__context__, second.__context__ = second, first

    def call() -> None:
        raise first

    with pytest.raises(OSError, match="first"):
        Recorder(1).timed(0, "wait_for_save", call)()


@pytest.mark.parametrize("mode", [0o777, None])
def test_without_a_folder_calls_are_made(mode: int | None, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    if mode is None:
        folder.symlink_to("/nowhere")
    else:
        folder.mkdir()
        folder.chmod(mode)
    box = begin()
    assert Recorder(2, box=box).timed(REMOTE, "wait_for_save", lambda: "done")() == "done"
    assert read() == []
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()[:34]) == (logging.WARNING, "calls in progress can't be shown: ")
    box.close()


def test_a_file_that_is_no_page_is_not_read(folder: Path) -> None:
    folder.mkdir()
    for name, content in (("empty", b""), ("short", b"x"), ("zeros", bytes(4096)), ("other", b"KVOBSBOX" + bytes(64))):
        (folder / f"{Identity.of(config('e')).pages()}-{name}.page").write_bytes(content)
    assert read() == []
