"""What a reader sees in a page: whose it is, the calls in progress; and in anything else, a ValueError at most."""

import json
import mmap
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from kvobs.page import files, layout, writer
from kvobs.page.description import Identity, ProcessInfo
from kvobs.page.layout import HEAD, MAGIC, ORDINARY, URGENT, VERSION, WORD
from kvobs.page.reader import OtherVersionError, Page, pages
from kvobs.page.writer import PageWriter, describe, plain, size_of
from kvobs.probe.layer_calls import ARGUMENTS, LayerCall, LayerCalls
from kvobs.probe.recorder import Recorder
from kvobs.schema.options import Options
from kvobs.telemetry import recorders
from kvobs.telemetry.tracing.journal import Journal
from tests.support import watched
from tests.support.contexts import TRACING, json_values, record
from tests.support.page_files import page_folder
from tests.support.probes import Kind, each_probe, recorder_of
from tests.support.waiting import eventually
from tests.support.watched import NAMES, REMOTE, config


def begin(engine: str = "e", rank: int | None = 1) -> PageWriter:
    return watched.begin(engine, rank)


def read(engine: str = "e") -> list[Page]:
    return [page for _, page in pages(Identity.of(config(engine)).server)]


# --- what is no page, or none yet


def memory_of(process: ProcessInfo) -> mmap.mmap:
    return mmap.mmap(-1, size_of(process))


def a_page() -> bytes:
    """Return the page of a process that has counted, called and traced."""
    process = describe(plain(NAMES), None)
    memory = memory_of(process)
    recorder = Recorder(2, names=NAMES, page=PageWriter(process, memory=memory))
    for _ in range(20):
        recorder.timed(REMOTE, "wait_for_save", lambda: None)()
    recorder.failed(0, "start_load_kv", 1, 2, OSError())
    journal = Journal(recorder.page)
    for reason in ("parent", "slow") * 9:
        journal.add([record(reason=reason)] * 3)
    return bytes(memory)


GOOD = a_page()
FIRST = layout.first(GOOD[HEAD.size : HEAD.size + HEAD.unpack_from(GOOD)[2]])


def opened(content: bytes) -> Page:
    """Open a page of this content."""
    with page_folder() as folder:
        folder.mkdir(mode=0o700)
        (path := folder / "a.page").write_bytes(content)
        return Page(path)


def use(page: Page) -> None:
    """Read all that there is, more than once."""
    for ring in (ORDINARY, URGENT):
        spans = page.spans(ring, (7, 7))
        for _ in range(2):
            assert all(list(spans.read()))
        assert min(spans.position) >= 0 <= spans.missed
    for what in (page.rows, page.calls, page.records):
        assert all(list(what()))
    for name in ("is_alive", "is_stopped", "is_ending", "exit_status", "has_ended_well", "worked_ns", "names", "rank"):
        getattr(page, name)
    assert page.raised() is None or page.raised()
    if (process := page.watched()) is not None:
        os.close(process)
    assert len(page.counts) == page.layout.slots


def refused_or_used(content: bytes) -> None:
    """Nothing but a ValueError comes of any content, and it comes soon."""
    begin_ns = time.process_time_ns()
    try:
        page = opened(content)
    except ValueError:
        page = None
    if page is not None:
        use(page)
    assert time.process_time_ns() - begin_ns < 2 * 10**9


def test_a_good_page_is_read() -> None:
    page = opened(GOOD)
    assert (page.pid, page.names, page.is_alive, len(page.records())) == (os.getpid(), [*NAMES], True, 21)
    assert [sum(map(len, page.spans(ring).read())) for ring in (ORDINARY, URGENT)] == [27, 27]
    use(page)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its process has not written it yet"),
        (b"x", "truncated"),
        (bytes(4096), "its process has not written it yet"),
        (GOOD[:-8], f"it has {len(GOOD) - 8} bytes instead of {len(GOOD)}"),
        (GOOD + bytes(8), f"it has {len(GOOD) + 8} bytes instead of {len(GOOD)}"),
        (GOOD[: HEAD.size + 9], "its description can't be read"),
    ],
)
def test_a_file_that_is_no_page_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        opened(content)
    assert not isinstance(refused.value, OtherVersionError)


@pytest.mark.parametrize("head", [(MAGIC, VERSION ^ 1), (b"KVOBSBOX", VERSION)], ids=["version", "before pages"])
def test_a_page_of_another_version_is_refused_and_left_out(head: tuple[bytes, int], folder: Path) -> None:
    mine = begin()
    (path,) = folder.iterdir()
    path.chmod(0o600)
    path.write_bytes(HEAD.pack(*head, 9) + path.read_bytes()[HEAD.size :])
    with pytest.raises(OtherVersionError, match="it was written by another version of kvobs"):
        Page(path)
    assert read() == []
    mine.close()


class Seen(mmap.mmap):
    """The memory of a page; a reader looks at it whenever something was written."""

    path: Path
    found: list[object]

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        try:
            self.found.append(Page(self.path).pid)
        except ValueError as error:
            self.found.append(type(error))


def test_a_page_that_is_half_written_is_no_page_yet(folder: Path) -> None:
    folder.mkdir()
    process, path = describe(plain(NAMES), 1), folder / "a.page"
    with path.open("w+b") as file:
        for size in (0, 10, size_of(process)):  # it grows
            file.truncate(size)
            with pytest.raises(ValueError, match="truncated|not written"):
                Page(path)
        memory = Seen(file.fileno(), size_of(process))
    memory.path, memory.found = path, []
    PageWriter(process, memory=memory)
    *before, last = memory.found
    assert ({*before}, last) == ({ValueError}, os.getpid())


@given(st.binary(max_size=200), st.booleans())
def test_a_page_of_random_bytes_is_refused(content: bytes, has_head: bool) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - of whatever kind
        opened((HEAD.pack(MAGIC, VERSION, len(content)) if has_head else b"") + content)


@given(st.integers(0, 2**32), st.sampled_from([1, 1e-3, 1e-1]))
@settings(max_examples=40)
@example(0, 1)
def test_random_words_raise_nothing_and_end_soon(seed: int, share: float) -> None:
    draw = np.random.default_rng(seed)
    words = np.frombuffer(GOOD[FIRST:], np.int64).copy()
    chosen = draw.random(len(words)) < share
    edges = np.array([0, 1, -1, 2, 2**31, 2**63 - 1, -(2**63), len(words)], np.int64)
    wild = draw.integers(-(2**63), 2**63 - 1, len(words), np.int64, endpoint=True)
    wild = np.where(draw.random(len(words)) < 0.3, draw.choice(edges, len(words)), wild)
    refused_or_used(GOOD[:FIRST] + np.where(chosen, wild, words).tobytes())


@given(st.integers(0, 2**32), st.integers(1, 64))
@settings(max_examples=40)
def test_random_bytes_raise_nothing_and_end_soon(seed: int, n: int) -> None:
    """Frames and texts of which a part is as it was; the description, too."""
    draw, content = np.random.default_rng(seed), bytearray(GOOD)
    parts = [range(FIRST), *(range(FIRST + at * WORD, FIRST + at * WORD + 4096) for at in RINGS), range(len(GOOD))]
    for _ in range(n):
        part = parts[draw.integers(len(parts))]
        content[draw.integers(part.start, part.stop)] = draw.integers(256)
    refused_or_used(bytes(content))


_AT = opened(GOOD).layout
RINGS = [_AT.spans(ORDINARY), _AT.spans(URGENT), _AT.rows, _AT.counts, 0]
DESCRIPTION: dict[str, Any] = json.loads(GOOD[HEAD.size : HEAD.size + HEAD.unpack_from(GOOD)[2]])
FIELDS = [(of, name) for of in ("", "engine") for name in (DESCRIPTION[of] if of else DESCRIPTION)]


def with_description(text: bytes) -> bytes:
    head = HEAD.pack(MAGIC, VERSION, len(text)) + text
    return head.ljust(layout.first(text), b"\0") + GOOD[FIRST:]


@given(st.sampled_from(FIELDS), json_values | st.integers(-(2**70), 2**70) | st.sampled_from([2**31, 2**63, 1e300, -1]))
@example(("", "pid"), 2**31)
@example(("", "calls"), 2**40)
@example(("", "calls"), 0)
@example(("engine", "connectors"), [{"name": "n"}] * 2000)
@example(("engine", "connectors"), [])
@example(("engine", "ranks"), 2**62)
def test_an_altered_description_is_refused_or_used(field: tuple[str, str], value: Any) -> None:
    of, name = field
    changed = {**DESCRIPTION, "engine": {**DESCRIPTION["engine"]}}
    (changed["engine"] if of else changed)[name] = value
    refused_or_used(with_description(json.dumps(changed).encode(errors="replace")))


@given(json_values)
@example("[" * 100_000)
@example({})
def test_a_description_that_is_none_is_refused(value: Any) -> None:
    for text in (json.dumps(value).encode(), str(value).encode(errors="replace")):
        with pytest.raises(ValueError, match="its description can't be read"):
            opened(with_description(text))


def test_a_description_may_have_any_names() -> None:
    """A path on a command line need not be UTF-8."""
    process = describe(replace(plain(["c\udcff", "\0"]), model="/m/\udce9"), 1)
    memory = memory_of(process)
    PageWriter(process, memory=memory)
    page = opened(bytes(memory))
    assert (page.names, page.process.engine.model) == (["c?", "\0"], "/m/?")


# --- the process


def test_no_file_stays_open(folder: Path) -> None:
    def of_pages() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # of another thread
                found += os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
        return found

    mine = begin()
    assert of_pages() == 1, "the map's, with its lock"
    (path,) = folder.iterdir()
    for _ in range(20):
        Page(path)
        (bad := folder / "0-0-rank1-1-1.page").write_bytes(GOOD[:-8])
        assert len(read()) == 1
        with pytest.raises(ValueError, match="bytes instead of"):
            Page(bad)
    assert of_pages() == 1
    mine.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that begin now be in another container, as far as their readers know."""
    begin_here = describe
    monkeypatch.setattr(writer, "describe", lambda *more: replace(begin_here(*more), namespace="pid:[1]", pid=1))


@pytest.mark.usefixtures("elsewhere")
def test_a_process_in_another_container_is_alive_by_its_lock() -> None:
    """Its number is another process's here."""
    with watched.process("e", 1, "hangs") as forked:
        (page,) = read()
        assert (page.pid, page.is_alive, page.is_ending, page.is_stopped) == (1, True, False, False)
        assert (page.watched(), page.exit_status) == (None, None)
        assert eventually(page.calls)
        assert [call[1] for call in page.calls()] == ["start_load_kv"]
        os.kill(forked.pid, signal.SIGSTOP)
        assert page.is_alive
        forked.kill()
        assert (page.is_alive, page.is_ending, page.has_ended_well) == (False, True, False)
        assert [call[1] for call in page.calls()] == ["start_load_kv"], "what it died in"


def test_a_fork_of_an_engine_keeps_no_one_alive_and_ends_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the map, and the lock with it: the page is removed once it has ended."""
    monkeypatch.setattr(files, "NEW_NS", 0)
    (told, tell), (ends, end) = os.pipe(), os.pipe()
    if not (engine := os.fork()):
        mine = begin()
        if not os.fork():  # of the engine
            mine.close()
            mine.leave()
            os.write(tell, os.getpid().to_bytes(4, "little"))
            os.read(ends, 1)
            os._exit(0)
        os.read(ends, 1)
    fork = int.from_bytes(os.read(told, 4), "little")
    (page,) = read()
    assert (page.pid, page.is_alive, page.has_ended_well) == (engine, True, False)
    os.kill(engine, signal.SIGKILL)
    os.waitpid(engine, 0)
    assert (page.is_alive, page.has_ended_well) == (False, False)
    files.clean(folder)
    assert len(list(folder.iterdir())) == 1
    os.kill(fork, signal.SIGKILL)

    def is_cleaned() -> bool:
        files.clean(folder)
        return not list(folder.iterdir())

    assert eventually(is_cleaned)
    for pipe in (told, tell, ends, end):
        os.close(pipe)


# --- its calls


def test_the_calls_of_a_process_are_on_its_page() -> None:
    recorder = recorders.build(plain(NAMES), Options(), config("e"), replace(TRACING, is_on=False), 1).recorder
    calls = recorder.timed(REMOTE, "start_load_kv", read()[0].calls)()
    assert [call[:3] for call in calls] == [("remote", "start_load_kv", 1)]


@each_probe
@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer"])
def test_a_layer_hooks_call_is_shown_at_the_connector_it_is_in(kind: Kind, hook: str) -> None:
    mine = begin()
    recorder, seen = recorder_of(kind, 2, names=NAMES, page=mine), list[list[tuple[Any, ...]]]()

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
    timed = recorder_of(kind, 2, names=NAMES, page=begin()).timed(0, "wait_for_save", Call.act)
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
