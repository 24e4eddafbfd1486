"""Calls that are more than a number, and who is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kvobs.context import TraceContext


class Noticed(NamedTuple):
    """A call that is more than a number: slow, failed, or wanted by those who trace every call.

    Times are ns since the epoch. ``subject`` is the call's first argument, or the step it belongs to; ``error`` the
    exception's class; ``more`` what else its span says. With ``is_many`` it stands for several calls.
    """

    child: int
    hook: str
    start_ns: int
    spent_ns: int
    is_slow: bool
    error: str = ""
    subject: Any = None
    more: Mapping[str, int | float] = MappingProxyType({})
    is_many: bool = False


class Tracer(Protocol):
    """What is told of calls that are more than a number."""

    traces_all: bool  # of each call, not of slow and failed ones only
    traces_layers: bool  # of each layer's, not of all in a step at once
    step: Any  # what calls of the running step have in common

    def note(self, noticed: Noticed) -> None: ...

    def join_step(self, trace: TraceContext | None, loads: Mapping[int, Sequence[TraceContext]]) -> None: ...
