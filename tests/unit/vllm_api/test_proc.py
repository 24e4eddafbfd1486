"""A process's name may hold anything, and its fields are found behind it."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvobs.vllm_api import proc
from kvobs.vllm_api.proc import cores_of_parent, start_time, stat


def test_this_process_has_a_state_and_its_parent() -> None:
    name, (state, parent, *_) = stat(os.getpid())
    assert name == Path("/proc/self/comm").read_text().rstrip("\n")
    assert (state, int(parent)) == ("R", os.getppid())


def test_a_name_may_look_like_the_fields() -> None:
    name = b") S 1 (x) \xe6\x8e"  # cut by the kernel within a character
    code = f"open('/proc/self/comm', 'wb').write({name!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found, (_, parent, *_) = stat(process.pid)
        assert (found, int(parent)) == (name.decode(errors="replace"), os.getpid())
        process.communicate(b"\n")


def test_a_thread_that_shares_its_core_waits_for_the_other() -> None:
    cores, thread = os.sched_getaffinity(0), threading.get_native_id()
    try:
        os.sched_setaffinity(0, {min(cores)})  # of both
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
            before = proc.run_delay_ns(thread)
            while proc.run_delay_ns(thread) == before:
                pass
            busy.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert proc.run_delay_ns(2**30) == 0, "there is none"


@pytest.mark.parametrize(
    ("words", "port"),
    [("serve m --port 8001", 8001), ("m --port=8002", 8002), ("serve m", 8000), ("serve m --config f.yaml", None),
     ("m", None), ("serve m --port x", None), ("serve m --port", None)],
)  # fmt: skip
def test_a_server_has_the_port_of_its_command_line(words: str, port: int | None) -> None:
    command = [sys.executable, "-c", "print(flush=True); input()", *words.split()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert proc.served_port(process.pid) == port
        process.communicate(b"\n")
    assert proc.served_port(process.pid) is None


def test_a_process_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError, match=str(process.pid)):
        stat(process.pid)


def test_a_process_has_a_start_time_until_its_end() -> None:
    ours: Any = start_time(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert int(start_time(process.pid) or 0) >= int(ours)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert (stat(process.pid)[1][0], start_time(process.pid)) == ("Z", None)
    process.communicate()
    assert start_time(process.pid) is None


@pytest.mark.parametrize(
    ("state", "flags", "found"),
    [
        ("S", "4194304", ""),
        ("R", "4194564", "ending"),
        ("Z", "0", "ending"),
        ("T", "0", "stopped"),
        ("t", "0", "stopped"),
    ],
)
def test_a_stopped_or_ending_one_is_seen(state: str, flags: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "stat", lambda _: ("name", [state, *["1"] * 5, flags, *["0"] * 45]))
    assert (proc.is_ending(1), proc.is_stopped(1)) == (found == "ending", found == "stopped")


def test_each_server_has_a_launch_that_its_next_life_has_too() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    lives = [subprocess.Popen([*command, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for port in "112"]
    for life in lives:
        assert life.stdout is not None
        life.stdout.read(1)  # the kernel has its command line a moment after the process has begun
    first, second, other = (proc.launch(life.pid) for life in lives)
    for life in lives:
        life.communicate(b"\n")
    assert (first == second != other, len(first), proc.launch(lives[0].pid)) == (True, 32, "")


def test_the_cores_are_those_of_whoever_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores_of_parent() == os.sched_getaffinity(os.getppid())
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    assert cores_of_parent() == os.sched_getaffinity(0), "it has ended"
