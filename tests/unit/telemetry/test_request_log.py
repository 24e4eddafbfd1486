"""The request log has every line once; whatever becomes of its file, nobody waits, and losses are counted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs import signals
from kvobs.telemetry import request_log
from kvobs.telemetry.recorder import Recorder
from kvobs.telemetry.request_log import WAITING_AT_MOST, LogFile, Output, RequestLog, Stderr, Unlogged

DROPPED = signals.slot(signals.REQUEST_LOG_DROPPED)
pytestmark = pytest.mark.timeout(60)

Start = Callable[..., RequestLog]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start logs that write every few milliseconds; they end with the test."""
    monkeypatch.setattr(request_log, "EVERY_S", 0.005)
    started: list[RequestLog] = []

    def begin(output: Output, recorder: Recorder | None = None) -> RequestLog:
        started.append(RequestLog(output, recorder or Recorder(1)))
        return started[-1]

    yield begin
    for log in started:
        log.close()


def eventually(condition: Callable[[], Any], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.002)
    return bool(found)


def put(log: RequestLog, *numbers: int, **more: Any) -> None:
    for n in numbers:
        log.put({"n": n, **more})


def numbers(path: Path) -> list[int]:
    """Return the numbers of a file's lines, all of which must be whole."""
    return [json.loads(line)["n"] for line in path.read_text().splitlines()] if path.exists() else []


class Narrow:
    """Takes a few bytes at a time, and an error where a test says so."""

    name = "narrow"

    def __init__(self, width: int) -> None:
        self.width = width
        self.data = b""
        self.error: OSError | None = None
        self.is_new = False

    def refresh(self) -> bool:
        is_new, self.is_new = self.is_new, False
        return is_new

    def write(self, data: bytes) -> int:
        if self.error is not None:
            raise self.error
        self.data += data[: self.width]
        return len(data[: self.width])

    def close(self) -> None:
        self.name = "closed"


# --- a file


def test_lines_are_appended_in_their_order_and_the_last_ones_at_the_end(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"n": -1}\n')
    log = start(LogFile(str(path)))
    put(log, 0, 1)
    assert eventually(lambda: numbers(path) == [-1, 0, 1])
    put(log, *range(2, 500))
    log.close()
    assert numbers(path) == list(range(-1, 500))


def test_a_new_file_is_the_users_and_the_groups(start: Start, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        log = start(LogFile(str(tmp_path / "log")))
        log.close()
    finally:
        os.umask(before)
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o640


def test_after_a_rename_lines_go_to_the_new_file(start: Start, tmp_path: Path) -> None:
    """As logrotate does it by default; no signal is needed."""
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = start(LogFile(str(path)))
    put(log, 0)
    assert eventually(lambda: numbers(path) == [0])
    path.rename(old)
    assert eventually(path.exists)
    put(log, 1)
    log.close()
    assert (numbers(old), numbers(path)) == ([0], [1])


def test_a_file_that_is_truncated_goes_on_at_its_begin(start: Start, tmp_path: Path) -> None:
    """As logrotate does it with copytruncate."""
    path = tmp_path / "log"
    log = start(LogFile(str(path)))
    put(log, 0)
    assert eventually(lambda: numbers(path) == [0])
    os.truncate(path, 0)
    put(log, 1)
    log.close()
    assert path.read_bytes() == b'{"n": 1}\n'


def test_lines_wait_for_a_folder_that_is_gone(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = start(LogFile(str(folder / "log")))
    put(log, 0)
    assert eventually(lambda: numbers(folder / "log") == [0])
    shutil.rmtree(folder)
    put(log, 1, 2)
    assert eventually(lambda: "can't be written: No such file or directory" in caplog.text)
    folder.mkdir()
    assert eventually(lambda: numbers(folder / "log") == [1, 2])
    assert caplog.text.count("can't be written") == 1


@pytest.mark.parametrize("path", ["/", "/dev/full", "/proc/version"])
def test_what_cannot_be_written_is_said_once_and_harms_nobody(
    path: str, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(1)
    log = start(LogFile(path), recorder=recorder)
    put(log, *range(WAITING_AT_MOST + 100))
    assert eventually(lambda: "can't be written" in caplog.text)

    def has_dropped() -> bool:
        put(log, 0)
        return recorder._counts.get(DROPPED, 0) > 0

    assert eventually(has_dropped)
    log.close()
    assert len(log._waiting) <= WAITING_AT_MOST
    assert caplog.text.count("can't be written") == 1
    assert "lines of the request log" in caplog.text


def test_a_pipe_that_nobody_reads_is_waited_for_by_nobody(start: Start, tmp_path: Path) -> None:
    path, recorder = tmp_path / "pipe", Recorder(1)
    os.mkfifo(path)
    log = start(LogFile(str(path)), recorder=recorder)
    put(log, 0)
    time.sleep(0.05)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert eventually(lambda: len(log._waiting) == 0)
    put(log, *range(1, 3 * WAITING_AT_MOST), more="x" * 100)
    assert eventually(lambda: len(log._waiting) > 1000, 2), "it is full"
    dropped = recorder._counts.get(DROPPED, 0)
    assert dropped > 1000
    data = b""
    while log._waiting or log._rest:
        data += _drained(reader)
    log.close()
    data += _drained(reader)
    os.close(reader)
    found = [json.loads(line)["n"] for line in data.splitlines()]
    assert found == sorted(set(found))
    assert len(found) == 3 * WAITING_AT_MOST - dropped


def _drained(reader: int) -> bytes:
    data = b""
    try:
        while part := os.read(reader, 1 << 16):
            data += part
    except BlockingIOError:
        time.sleep(0.001)
    return data


WRITER = """
import sys
from kvobs.telemetry.recorder import Recorder
from kvobs.telemetry.request_log import LogFile, RequestLog
log = RequestLog(LogFile(sys.argv[1]), Recorder(1))
for n in range(2000):
    log.put({"n": n, "of": sys.argv[2], "more": "x" * (n % 300)})
log.close()
"""


def test_engines_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(i)]) for i in range(3)]
    assert [writer.wait(50) for writer in writers] == [0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i in range(3):
        assert [line["n"] for line in lines if line["of"] == str(i)] == list(range(2000))


# --- stderr


def test_lines_on_stderr_have_nothing_before_them() -> None:
    code = WRITER.replace("LogFile(sys.argv[1])", "Stderr()").replace("LogFile,", "Stderr,")
    ran = subprocess.run([sys.executable, "-c", code, "", "0"], capture_output=True, timeout=50, check=True)
    lines = ran.stderr.splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(2000))
    assert not Stderr().refresh()


def test_a_stderr_that_is_full_holds_up_neither_the_engine_nor_its_end() -> None:
    code = WRITER.replace("LogFile(sys.argv[1])", "Stderr()").replace("LogFile,", "Stderr,")
    code = code.replace("log.close()", "log.close(); print(len(log._waiting) > 0, flush=True)")
    with subprocess.Popen(
        [sys.executable, "-c", code, "", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert process.wait(20) == 0


# --- writes


@pytest.mark.parametrize("width", [1, 7, 4096])
def test_what_a_write_leaves_comes_with_the_next(width: int, start: Start) -> None:
    output = Narrow(width)
    log = start(output)
    put(log, *range(100))
    log.close()
    assert [json.loads(line)["n"] for line in output.data.splitlines()] == list(range(100))
    assert output.name == "closed"


def test_a_write_has_whole_lines_and_is_no_longer_than_a_pipe_takes_at_once(start: Start) -> None:
    written: list[bytes] = []
    output = Narrow(1 << 20)
    output.write = lambda data: written.append(data) or len(data)  # type: ignore[method-assign,func-returns-value]
    log = start(output)
    put(log, *range(300), more="x" * 90)
    put(log, 300, more="x" * 10_000)
    put(log, 301)
    log.close()
    assert all(data.endswith(b"\n") for data in written)
    lengths = sorted(map(len, written))
    assert lengths[-1] > 10_000
    assert 2048 < lengths[-2] <= 4096
    assert [json.loads(line)["n"] for line in b"".join(written).splitlines()] == list(range(302))


def test_a_line_that_is_torn_by_a_rotation_is_dropped_and_counted(start: Start) -> None:
    """On a full disk that is cleaned up: half of it is in the old file."""
    output, recorder = Narrow(5), Recorder(1)
    log = start(output, recorder=recorder)
    first = output.write

    def once(data: bytes) -> int:
        output.error = OSError(errno.ENOSPC, "No space left on device")
        output.write = first  # type: ignore[method-assign]
        output.data += data[:5]
        return 5

    output.write = once  # type: ignore[method-assign]
    put(log, 1, 2, 3)
    assert eventually(lambda: output.error is not None)
    assert output.data == b'{"n":'
    output.data, output.is_new, output.error = b"", True, None
    assert eventually(lambda: log._torn == 1)
    put(log, 4)
    log.close()
    assert [json.loads(line)["n"] for line in output.data.splitlines()][-1] == 4
    assert recorder._counts == {DROPPED: 1}


def test_handing_over_waits_for_no_write(start: Start) -> None:
    output, is_stuck = Narrow(1 << 20), threading.Event()
    output.write = lambda data: is_stuck.wait(30) and len(data)  # type: ignore[method-assign]
    recorder = Recorder(1)
    log = start(output, recorder=recorder)
    put(log, 0)
    assert eventually(lambda: not log._waiting)
    began = time.perf_counter()
    put(log, *range(WAITING_AT_MOST + 7))
    assert time.perf_counter() - began < 5
    assert recorder._counts == {DROPPED: 7}
    is_stuck.set()


def test_the_end_waits_a_second_at_most(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_log, "CLOSING_S", 0.05)
    output, is_stuck = Narrow(1 << 20), threading.Event()
    output.write = lambda data: is_stuck.wait(30) and len(data)  # type: ignore[method-assign]
    log = start(output)
    put(log, 0)
    assert eventually(lambda: not log._waiting)
    put(log, 1, 2)
    log.close()
    assert "2 lines of the request log narrow were not written" in caplog.text
    is_stuck.set()


def test_the_log_ends_after_the_connectors_and_with_an_error_too(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = start(LogFile(str(path)))

    def shutdown() -> None:
        put(log, 1)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        log.ended_by(shutdown)()
    assert numbers(path) == [1]
    assert Unlogged().ended_by(shutdown) is shutdown
