"""Wait for what another thread or process does."""

import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until the condition is true, and return its value; a connection that fails is tried again.

    The time is long: a machine that others share may stand still for a while.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError, HTTPException):
            if found := condition():
                return found
        time.sleep(0.02)
    return condition()
