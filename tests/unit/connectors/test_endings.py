"""Which exceptions end the process: those that somebody outside asked for."""

import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvobs.connectors.endings import must_pass


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def caught(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError


def ends(*_: object) -> None:
    raise SystemExit


class Handler:
    """Is called, or has the method that is."""

    def __call__(self, *_: object) -> None:
        raise SystemExit

    def handle(self, *_: object) -> None:
        raise SystemExit


def library() -> None:
    raise SystemExit(2)


def by_signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def wrapped() -> None:
    """Clean up, as libraries do, and raise another."""
    try:
        by_signal()
    except SystemExit:
        raise SystemExit(3) from None


@pytest.mark.parametrize("handler", [ends, partial(ends, 1), Handler(), Handler().handle, lambda *_: ends()])
@pytest.mark.parametrize("how", [by_signal, wrapped])
def test_the_exit_of_a_signal_handler_passes(handler: Any, how: Callable[[], None]) -> None:
    signal.signal(signal.SIGUSR1, handler)
    assert must_pass(caught(how))
    assert not must_pass(caught(library)), "no handler is in its traceback"


def test_an_exit_passes_where_a_handler_can_not_be_seen() -> None:
    unseen: Any = threading.Lock().acquire  # not written in Python
    signal.signal(signal.SIGUSR1, unseen)
    assert must_pass(caught(library))


@pytest.mark.parametrize("error", [OSError(), CancelledError(), GeneratorExit(), BaseException(), SystemExit()])
def test_an_exception_of_a_library_does_not_pass(error: BaseException) -> None:
    assert not must_pass(error)


def test_ctrl_c_passes() -> None:
    assert must_pass(KeyboardInterrupt())
