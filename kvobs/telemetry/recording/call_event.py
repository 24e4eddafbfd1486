"""The event recorded for a slow, failed or traced call, and the protocol of its consumer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kvobs.telemetry.requests.trace_context import TraceContext


class CallEvent(NamedTuple):
    """One slow, failed or traced call.

    Times are ns since the epoch. ``subject`` is the call's first argument, or its step; ``error`` the exception's
    class; ``more`` further span attributes. With ``is_many`` it summarizes several calls.
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
    """The consumer of call events."""

    traces_all: bool  # whether it gets every call, not only slow and failed ones
    step: Any  # the common subject of the running step's calls

    def note(self, noticed: CallEvent) -> None: ...

    def join_step(self, trace: TraceContext | None, loads: Mapping[int, Sequence[TraceContext]]) -> None: ...
