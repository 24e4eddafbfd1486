"""The exporter's loop: lines as they come, ticks between them, and an end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from kvobs.exporter import process
from kvobs.exporter.process import first_message, lines
from kvobs.stats import wire
from tests.support.payloads import engine

pytestmark = pytest.mark.timeout(60)


def test_lines_come_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    text = b"".join(b"%d\n" % i for i in range(500)) + b"unfinished"

    def send() -> None:
        with theirs:
            for at in range(0, len(text), 7):
                theirs.sendall(text[at : at + 7])

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        assert list(lines(ours, b"begun ", lambda: True)) == [b"begun 0", *(b"%d" % i for i in range(1, 500))]
    thread.join()


def test_a_silent_engine_is_ticked_and_a_tick_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TICK_S", 0.05)
    ticks = iter([True, True, False])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert list(lines(ours, b"a\nb", lambda: next(ticks))) == [b"a"]
    assert list(ticks) == []


def test_the_first_message_is_read_and_the_rest_kept() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.to_line(engine().message()) + b'{"v"')
        assert first_message(ours) == (engine(), b'{"v"')
        theirs.sendall(b"{}\n")
        with pytest.raises(ValueError, match="version None"):
            first_message(ours)
        theirs.close()
        with pytest.raises(ValueError, match="ended before"):
            first_message(ours)


def test_it_needs_neither_vllm_nor_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import kvobs.exporter.__main__, kvobs.exporter.otlp_metrics"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_started_by_hand_it_says_who_starts_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvobs.exporter"], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 2
    assert "started by an engine" in done.stderr


def test_asked_to_end_it_waits_for_its_engine_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "AFTER_SIGTERM_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        exporter = process.Exporter(ours, engine())
        exporter._asked_to_end()
        assert not exporter._is_over()
        time.sleep(0.15)
        assert exporter._is_over()
