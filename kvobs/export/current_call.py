"""See from another thread which call into a connector is in progress, at no cost to the call."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

from kvobs.telemetry.recording.recorder import WALL_OFFSET, Recorder


class CurrentCall(NamedTuple):
    """A call in progress: the connector's position, the hook, and the beginning in ns since the epoch."""

    child: int
    hook: str
    began_ns: int


def current_call(thread: int) -> CurrentCall | None:
    """Return the call into a connector that this thread is in, if any; of nested ones the outermost.

    A recorded call has its connector, hook and beginning in local variables, and a blocked thread's stack can be read.
    """
    found = None
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is _RECORDED:
            names = frame.f_locals
            if "start" in names:
                found = CurrentCall(names["child"], names["hook"], names["start"] + WALL_OFFSET)
        frame = frame.f_back
    return found


def _code_of(function: CodeType, name: str) -> CodeType:
    """Return the code of a function that is defined within another one."""
    return next(code for code in function.co_consts if isinstance(code, CodeType) and code.co_name == name)


_RECORDED = _code_of(Recorder.timed.__code__, "recorded")
