"""The request log has every line once; whatever becomes of its file, nobody waits, and losses are counted."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.telemetry.requests import request_log
from kvobs.telemetry.requests.request_log import WAITING_AT_MOST, LogFile, RequestLog, Stderr
from tests.support.probes import counts
from tests.support.waiting import eventually

DROPPED = signals.slot(signals.REQUEST_LOG_DROPPED)
pytestmark = pytest.mark.timeout(300)

Start = Callable[..., RequestLog]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start logs that write every few milliseconds, and to the end on a busy machine; they end with the test."""
    monkeypatch.setattr(request_log, "EVERY_S", 0.005)
    monkeypatch.setattr(request_log, "CLOSING_S", 100)
    started: list[RequestLog] = []

    def begin(output: LogFile | Stderr | Path, recorder: Recorder | None = None) -> RequestLog:
        handler = LogFile(str(output)) if isinstance(output, Path) else output
        started.append(RequestLog(handler, recorder or Recorder(1)))
        return started[-1]

    yield begin
    for log in started:
        log.close()


def put(log: RequestLog, *numbers: int, **more: Any) -> None:
    for n in numbers:
        log.put({"n": n, **more})


def numbers(path: Path) -> list[int]:
    """Return the numbers of a file's lines, all of which must be whole."""
    return [json.loads(line)["n"] for line in path.read_text().splitlines()] if path.exists() else []


class Stuck(Stderr):
    def __init__(self) -> None:
        super().__init__()
        self.is_settled = threading.Event()
        self.has_begun = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.has_begun.set()
        self.is_settled.wait(100)


def test_lines_are_appended_in_order_with_the_last_at_the_end(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"n": -1}\n')
    log = start(path)
    put(log, 0, 1)
    assert eventually(lambda: numbers(path) == [-1, 0, 1])
    put(log, *range(2, 500))
    log.close()
    assert numbers(path) == list(range(-1, 500))


def test_a_new_file_is_the_users_and_the_groups(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: os.stat(""))  # an OSError: it is written all the same
    before = os.umask(0)
    try:
        log = start(tmp_path / "log")
        put(log, 0)
        log.close()
    finally:
        os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o640


def test_after_a_rename_lines_go_to_the_new_file(start: Start, tmp_path: Path) -> None:
    """As logrotate does it by default; no signal is needed."""
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = start(path)
    put(log, 0, 1)
    assert eventually(lambda: numbers(path) == [0, 1])
    path.rename(old)
    put(log, 2)
    log.close()
    assert (numbers(old), numbers(path)) == ([0, 1], [2])


def test_without_its_folder_lines_are_counted(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, recorder = tmp_path / "logs/log", Recorder(1)
    path.parent.mkdir()
    log = start(path, recorder)
    put(log, 0)
    assert eventually(lambda: numbers(path) == [0])
    shutil.rmtree(path.parent)
    put(log, 1, 2)
    assert eventually(lambda: log._handler.lost == 2)
    path.parent.mkdir()
    put(log, 3)
    assert eventually(lambda: numbers(path) == [3])
    assert counts(recorder) == {DROPPED: 2}
    # Threads of other tests' API servers log, too.
    begin, end = (
        text for text in map(logging.LogRecord.getMessage, caplog.records) if text.startswith("the request log")
    )
    assert begin.startswith(f"the request log {path} can't be written: [Errno 2] No such file or directory")
    assert end == f"the request log {path} is written again; 2 lines have been dropped since the start"


@pytest.mark.parametrize("path", ["/", "/dev/full", "/proc/version"])
def test_unwritten_lines_are_counted_and_logged_once(path: str, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(1)
    log = start(LogFile(path), recorder)
    put(log, *range(200))
    assert eventually(lambda: counts(recorder) == {DROPPED: 200}), "without another line"
    put(log, 0)
    log.close()
    assert counts(recorder) == {DROPPED: 201}
    assert caplog.text.count("can't be written") == 1


def test_no_link_is_followed(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    put(start(tmp_path / "link"), 1)
    assert eventually(lambda: "can't be written: [Errno 40] Too many levels of symbolic links" in caplog.text)
    assert not (tmp_path / "theirs").exists()


def test_a_pipe_that_nobody_reads_is_waited_for_by_nobody(start: Start, tmp_path: Path) -> None:
    path, recorder = tmp_path / "pipe", Recorder(1)
    os.mkfifo(path)
    log = start(path, recorder)
    put(log, *range(WAITING_AT_MOST + 1000), more="x" * 100)
    dropped = counts(recorder)[DROPPED]
    assert 0 < dropped <= 1000, "some may have been taken out of the queue"
    with path.open("rb") as reader:
        lines = [json.loads(reader.readline()) for _ in range(WAITING_AT_MOST + 1000 - dropped)]
        log.close()
        assert reader.read() == b""
    numbers = [line["n"] for line in lines]
    assert numbers[:WAITING_AT_MOST] == list(range(WAITING_AT_MOST))
    assert numbers == sorted(numbers), "one has a place as soon as another is taken out"


def test_a_pipe_is_opened_once(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader sees the end of the file whenever it is closed, if only to be opened again."""
    opened = []

    def open_once_more(path: str, flags: int) -> int:
        opened.append(path)
        return os.open(path, flags)

    monkeypatch.setattr(request_log, "_opened", open_once_more)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = start(path)
    put(log, *range(3))
    with path.open() as reader:
        log.close()
        assert [json.loads(line)["n"] for line in reader] == [0, 1, 2]
    assert opened == [str(path)]


CUT = """
import resource, sys, time
from kvobs.telemetry.requests import request_log
from kvobs.probe.recorder import Recorder
request_log.EVERY_S, request_log.CLOSING_S = 0.01, 100
resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
log = request_log.RequestLog(request_log.LogFile(sys.argv[1]), Recorder(1))
for n in range(5):
    log.put({"n": n, "more": "xxxx"})
while log._handler.lost < 3:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.put({"n": 5})
log.close()
"""


def test_a_line_that_was_cut_is_completed(tmp_path: Path) -> None:
    """As on a full disk, once there is space again."""
    path = tmp_path / "log"
    subprocess.run([sys.executable, "-c", CUT, path], check=True, timeout=200)
    assert numbers(path) == [0, 1, 5]


WRITER = """
import sys
from kvobs.probe.recorder import Recorder
from kvobs.telemetry.requests import request_log
from kvobs.telemetry.requests.request_log import LogFile, RequestLog, Stderr
path, name, request_log.CLOSING_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
log = RequestLog(LogFile(path) if path else Stderr(), Recorder(1))
for n in range(2000):
    log.put({"n": n, "of": name, "more": "x" * (n % 300)})
log.close()
print(log._queue.empty())
"""


def writer(path: Path | str = "", name: str = "0", closing_s: float = 100.0) -> list[str]:
    """The command of a process that writes 2000 lines; it ends at once when all are written."""
    return [sys.executable, "-c", WRITER, str(path), name, str(closing_s)]


def test_engines_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writers = [subprocess.Popen(writer(path, str(i))) for i in range(3)]
    assert [process.wait(200) for process in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i in range(3):
        assert [line["n"] for line in lines if line["of"] == str(i)] == list(range(2000))


def test_lines_on_stderr_have_nothing_before_them() -> None:
    ran = subprocess.run(writer(), capture_output=True, timeout=200, check=True)
    assert [json.loads(line)["n"] for line in ran.stderr.splitlines()] == list(range(2000))


@pytest.mark.parametrize("is_named", [False, True])
def test_a_full_output_delays_neither_the_engine_nor_its_end(is_named: bool, tmp_path: Path) -> None:
    """Stderr, or a pipe with a name, that nobody reads any more."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = writer(path if is_named else "", closing_s=1.0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"False\n", "it did not write all"
        assert process.wait(60) == 0
    os.close(reader)


def test_handing_over_waits_for_no_write(start: Start) -> None:
    stuck, recorder = Stuck(), Recorder(1)
    log = start(stuck, recorder)
    put(log, 0)
    assert stuck.has_begun.wait(60)
    put(log, *range(WAITING_AT_MOST + 7))
    assert counts(recorder) == {DROPPED: 7}
    stuck.is_settled.set()


@pytest.mark.parametrize("lines", [1, 3])
def test_the_end_waits_shortly(
    lines: int, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "CLOSING_S", 0.05)
    stuck, recorder = Stuck(), Recorder(1)
    log = start(stuck, recorder)
    put(log, 0)
    assert stuck.has_begun.wait(60)
    put(log, *range(1, lines))
    log.close()
    assert counts(recorder) == {DROPPED: lines}
    assert f"{lines} lines of the request log stderr were not written" in caplog.text
    stuck.is_settled.set()
