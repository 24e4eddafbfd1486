"""vLLM's entry point: with ``KVOBS_ENABLE=1`` the name ``MultiConnector`` stands for kvobs's class, without any key."""

import os

from kvobs.notices import log

VARIABLE = "KVOBS_ENABLE"
_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}


def register() -> None:
    """Put kvobs's class behind vLLM's registered name, if the environment asks for it.

    vLLM calls this in every process, some of them more than once.
    """
    if not is_enabled(os.environ.get(VARIABLE, "")):
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def load() -> type:
        from kvobs.connector import MultiConnector

        return MultiConnector

    KVConnectorFactory._registry["MultiConnector"] = load


def is_enabled(value: str) -> bool:
    """Read the variable; anything but a clear yes leaves vLLM as it is."""
    word = value.strip().lower()
    if word not in _ON | _OFF:
        log.warning("%s is %r: kvobs stays off. Allowed: 1 or 0", VARIABLE, value)
    return word in _ON
