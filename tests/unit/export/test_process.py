"""The exporter's loop: lines as they come, ticks between them, and an end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from kvobs.export import process
from kvobs.export.process import first_lines, lines
from kvobs.telemetry.payload import wire
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


def test_it_is_ticked_after_the_first_lines_and_in_silence_and_a_tick_may_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "TICK_S", 0.05)
    ours, theirs = socket.socketpair()
    order: list[bytes | str] = []

    def tick() -> bool:
        order.append("tick")
        if order.count("tick") == 3:
            theirs.sendall(b"c\nd")
        return order.count("tick") < 3

    with ours, theirs:
        for line in lines(ours, b"a\nb\n", tick):
            order.append(line)  # noqa: PERF402 - ticks come in between
    assert order == [b"a", b"b", "tick", "tick", "tick", b"c"], "what has come is read to its end"


def test_the_first_lines_are_read_and_the_rest_kept() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.to_line(engine().message()) + b"{}\n")
        theirs.sendall(b'{}\n{"v"')
        assert first_lines(ours) == (engine(), b'{}\n{}\n{"v"')
        theirs.sendall(b"{}\n{}\n{}\n")
        with pytest.raises(ValueError, match="version None"):
            first_lines(ours)
        theirs.sendall(b"{}\n{}\n")
        theirs.close()
        with pytest.raises(ValueError, match="ended before"):
            first_lines(ours)


def test_it_needs_neither_vllm_nor_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import kvobs.export.__main__, kvobs.export.otlp_metrics"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_started_by_hand_it_says_who_starts_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvobs.export"], capture_output=True, text=True, check=False, timeout=50
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
