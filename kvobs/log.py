"""Log through vLLM's own handler, and log repeated messages once."""

import logging
from collections.abc import Callable
from time import monotonic

# Under vLLM's logger, whose handler and level every deployment has already configured.
log = logging.getLogger("vllm.kvobs")

_logged: dict[str, set[str]] = {}  # by kind: the part of a key before its first colon
_KEYS_AT_MOST = 128  # keys of one kind: many keys of one kind do not silence the others
_KEY_AT_MOST = 256  # characters
_LINE_AT_MOST = 120
OUTAGES_APART_S = 600.0


def once(key: str, level: int, message: str, *args: object, exc_info: bool = False) -> bool:
    """Log ``message`` unless ``key`` was logged before in this process; return whether it was logged."""
    key = key[:_KEY_AT_MOST]
    logged = _logged.setdefault(key.partition(":")[0] if ":" in key else "", set())
    if key in logged or len(logged) >= _KEYS_AT_MOST:
        return False
    logged.add(key)
    log.log(level, message, *args, exc_info=exc_info)
    return True


class Outage:
    """Log that something fails, and that it works again: one such pair of lines in ten minutes at most."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._silent_until = clock()
        self._is_logged = False

    def begins(self, level: int, message: str, *args: object) -> None:
        """Note a failure; log it if it is the first for long."""
        if not self._is_logged and self._clock() >= self._silent_until:
            self._is_logged, self._silent_until = True, self._clock() + OUTAGES_APART_S
            log.log(level, message, *args)

    def ends(self, message: str, *args: object) -> None:
        """Note a success; log it if the failures before were logged."""
        if self._is_logged:
            self._is_logged = False
            log.info(message, *args)


def line(text: object, at_most: int = _LINE_AT_MOST) -> str:
    """Return external text in a form that is safe to show: control characters are escaped, and it is shortened."""
    try:
        begin = str(text)[: at_most + 1]
    except Exception:  # of a connector's own class
        begin = f"a value of type {type(text).__name__} whose str() failed"
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in begin)
    return shown if len(shown) <= at_most else shown[:at_most] + "..."


def forget() -> None:
    """Forget the logged keys; for tests."""
    _logged.clear()
