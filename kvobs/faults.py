"""Contain kvobs's own faults: telemetry never raises into vLLM, and never fails without a trace.

A fault is counted by the place where it happened, logged once per place, and raised on only under pytest.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from kvobs.notices import once

P = ParamSpec("P")
T = TypeVar("T")

_counts: Counter[str] = Counter()


def contain(where: str) -> None:
    """Take care of the exception being handled, in an except block.

    ``where`` is a label value of kvobs_internal_errors_total.
    """
    _counts[where] += 1
    with suppress(Exception):  # a filter of the deployment's own logging may raise
        once(
            f"fault:{where}",
            logging.ERROR,
            "a fault inside kvobs's telemetry (%s); serving goes on without what was being measured. Further ones are "
            "counted in kvobs_internal_errors_total only",
            where,
            exc_info=True,
        )
    if is_under_pytest():
        raise  # noqa: PLE0704 - the exception that the caller is handling


def contained(where: str) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Return a decorator that contains what a function raises: its answer is None then."""

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
    """Return whether a test is watching, in this process or in one that started it."""
    return "PYTEST_CURRENT_TEST" in os.environ


def are_waiting() -> bool:
    """Return whether there are faults that nobody has taken."""
    return bool(_counts)


def take() -> dict[str, int]:
    """Return the faults of this process since the last call, by place; whoever takes them reports them."""
    if not _counts:
        return {}
    taken = dict(_counts)
    _counts.clear()
    return taken
