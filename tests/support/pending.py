"""A signal whose handler raises, as vLLM's of SIGTERM does, and that waits for the first Python code."""

import ctypes
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


class Signalled(SystemExit):
    """Raised by the handler."""


@contextmanager
def handled() -> Iterator[None]:
    """Install the handler."""

    def handle(*_: object) -> None:
        raise Signalled

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def sender(arguments: int) -> Any:
    """Return a C function of so many arguments that sends the signal; in contrast to ``os.kill`` it runs no handler."""
    kill = ctypes.PyDLL(None)["kill"]
    kill.argtypes = [ctypes.c_int, ctypes.c_int, *[ctypes.py_object] * arguments]
    return kill


def sent(kill: Any) -> Callable[..., Any]:
    """Return a call of such a function."""
    return partial(kill, os.getpid(), signal.SIGUSR1)


@contextmanager
def in_collections(*callbacks: Callable[[str, Any], object]) -> Iterator[None]:
    """Send the signal as each collection begins, and call only these after it; only ``gc.collect`` begins one."""
    before = gc.callbacks[:]  # hypothesis has one in Python
    gc.disable()
    phases = type("Phases", (), {"start": property(sent(sender(1))), "stop": None})()
    gc.callbacks[:] = [partial(getattr, phases), *callbacks]
    try:
        with handled():
            yield
    finally:
        gc.callbacks[:] = before
        gc.enable()
