"""A command is run as a shell would, and looked after meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import typer

from kvobs.cli.summary import runs
from kvobs.cli.summary.runs import run, wait


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "status"),
    [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_status_is_the_commands_as_a_shell_has_it(code: str, status: int) -> None:
    assert run(python(code), lambda: None) == status


def test_the_engines_are_looked_at_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOOK_S", 0.02)
    looks: list[int] = []
    assert run(python("import time; time.sleep(0.3)"), lambda: looks.append(1)) == 0
    assert len(looks) > 2


@pytest.mark.parametrize(("what", "status"), [("no-such-command-x", 127), ("/etc/passwd", 126)])
def test_what_can_not_be_run_is_named(what: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as error:
        run([what], lambda: None)
    assert error.value.exit_code == status
    assert f"{what} can't be run: " in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 7)])
def test_signals_are_the_commands_to_answer(number: signal.Signals, status: int, tmp_path: os.PathLike[str]) -> None:
    """Ctrl-C reaches the whole process group: here the command sends it to both. This process goes on."""
    begun = os.path.join(tmp_path, "begun")
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        f"open({begun!r}, 'w').close()\n"
        f"number = signal.Signals({int(number)})\n"
        "os.kill(os.getppid(), number)\n"
        "if number == signal.SIGINT: os.kill(os.getpid(), number)\n"
        "time.sleep(30)\n"
    )
    before = signal.getsignal(number)
    assert run(python(code), lambda: None) == status
    assert os.path.exists(begun)
    assert signal.getsignal(number) is before


def test_an_early_signal_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def late(command: list[str]) -> "subprocess.Popen[bytes]":
        os.kill(os.getpid(), signal.SIGTERM)
        return popen(command)

    monkeypatch.setattr(subprocess, "Popen", late)
    assert run(python("import time; time.sleep(30)"), lambda: None) == 143


def test_a_command_answers_ctrl_c_as_if_it_ran_alone() -> None:
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    assert run(python(code), lambda: None) == 1


def test_a_wait_ends_with_its_time_or_with_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LOOK_S", 0.01)
    looks: list[int] = []
    wait(0.05, lambda: looks.append(1))
    assert looks
    begin = time.monotonic()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    wait(30, lambda: None)
    assert time.monotonic() - begin < 30
