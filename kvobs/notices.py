"""Log through vLLM's own handler, and say each thing once."""

import logging

# Under vLLM's logger, whose handler and level every deployment has already configured.
log = logging.getLogger("vllm.kvobs")

_said: set[str] = set()
_SAID_AT_MOST = 1024


def once(key: str, level: int, message: str, *args: object, exc_info: bool = False) -> bool:
    """Log ``message`` unless ``key`` was logged before in this process; return whether it was logged."""
    if key in _said or len(_said) >= _SAID_AT_MOST:
        return False
    _said.add(key)
    log.log(level, message, *args, exc_info=exc_info)
    return True


def forget() -> None:
    """Forget what was said; for tests."""
    _said.clear()
