"""Contain kvobs's internal errors: telemetry never raises into vLLM, and its errors are always reported.

An error is counted by place, logged once per place, and re-raised only under pytest.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from kvobs.log import once
from kvobs.schema.signals import Where

P = ParamSpec("P")
T = TypeVar("T")

_counts: defaultdict[str, int] = defaultdict(int)  # `+=` changes no threads here, with a Counter it may


def contain(where: Where) -> None:
    """Count and log the exception that is being handled; call it in an except block."""
    _counts[where] += 1
    with suppress(Exception):  # a filter of the deployment's own logging may raise
        text = (
            "internal error in kvobs's telemetry (%s). Serving is not affected, but this measurement is lost. "
            "Further errors are only counted (kvobs_internal_errors_total)"
        )
        once(f"fault:{where}", logging.ERROR, text, where, exc_info=True)
    if is_under_pytest():
        raise  # noqa: PLE0704 - the exception that the caller is handling


def contained(where: Where) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Return a decorator that contains a function's exceptions: it then returns None."""

    def decorate(function: Callable[P, T]) -> Callable[P, T | None]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
            try:
                return function(*args, **kwargs)
            except Exception:
                contain(where)
                return None

        return call

    return decorate


def is_under_pytest() -> bool:
    """Return whether this process, or one that started it, runs under pytest."""
    return "PYTEST_CURRENT_TEST" in os.environ


def take() -> dict[str, int]:
    """Return this process's errors since the last call, by place; the caller must report them."""
    return {where: _counts.pop(where) for where in list(_counts)}  # each at once: another thread may count meanwhile
