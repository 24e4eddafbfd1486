"""Distinguish exceptions that must end the process from a library's exceptions, whatever they derive from."""

import inspect
import signal
from collections.abc import Iterator
from functools import partial
from types import CodeType
from typing import Any


def must_pass(error: BaseException) -> bool:
    """Return whether this exception must not be contained: it ends the process, as requested from outside.

    That is KeyboardInterrupt, and the SystemExit that a signal handler has raised: vLLM's worker makes one of SIGTERM,
    once. The handler's frame is in the traceback then. A SystemExit passes too where that can't be seen: if a handler
    is not written in Python.
    """
    if isinstance(error, Exception):
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, SystemExit):
        return False
    codes = {_code_of(handler) for handler in map(signal.getsignal, signal.valid_signals()) if _may_exit(handler)}
    return None in codes or not codes.isdisjoint(_codes_in(error))


def _may_exit(handler: Any) -> bool:
    """Return whether a handler may raise SystemExit: not the system's, nor the one that raises KeyboardInterrupt."""
    return not isinstance(handler, signal.Handlers) and handler is not signal.default_int_handler


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a handler; None if it can't be known."""
    while isinstance(handler, partial):
        handler = handler.func
    if not inspect.isroutine(handler):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004 - its code is needed
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _codes_in(error: BaseException) -> Iterator[CodeType]:
    """Yield the code of each frame that an exception has passed, and of those that it was raised for."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        left += [each.__cause__, each.__context__]
        entry = each.__traceback__
        while entry is not None:
            yield entry.tb_frame.f_code
            entry = entry.tb_next
