"""Wait for what another thread or process does."""

import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Wait until this is true, and return it; while there is no answer it is not.

    The time is long: a machine that others share may stand still for a while.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError, HTTPException):
            if found := condition():
                return found
        time.sleep(0.02)
    return condition()
