"""Run a command, or wait, and look at the engines meanwhile."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import typer

from kvobs.cli.output import fail
from kvobs.export.texts import printable

LOOK_S = 0.5
"""Between two looks for engines that a command has started."""
NOT_FOUND, NOT_EXECUTABLE, SIGNALLED = 127, 126, 128
"""Exit statuses, as a shell has them."""


def wait(seconds: float, look: Callable[[], None]) -> None:
    """Wait for so long, or until Ctrl-C."""
    until = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
            look()


def run(command: Sequence[str], look: Callable[[], None]) -> int:
    """Run a command, looking at the engines meanwhile; return its exit status as a shell does.

    Ctrl-C reaches it, and is its to answer; SIGTERM is passed on.
    """
    with _passing_on() as started:
        try:
            process = subprocess.Popen(command)
        except OSError as error:
            fail(f"{printable(command[0])} can't be run: {error.strerror}")
            status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise typer.Exit(status) from None
        started(process)
        while True:
            try:
                status = process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                look()
                continue
            return status if status >= 0 else SIGNALLED - status


@contextmanager
def _passing_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to a command inside the ``with`` block, which is to be named."""
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came before it was there

    def terminate(number: int, _frame: object) -> None:
        early.append(number)
        for process in processes:
            process.send_signal(number)

    def started(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        for number in early[:1]:
            process.send_signal(number)

    # A handler, unlike SIG_IGN, is not inherited by the command.
    handlers: dict[int, Any] = {signal.SIGTERM: terminate}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handlers[signal.SIGINT] = lambda *_: None
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
