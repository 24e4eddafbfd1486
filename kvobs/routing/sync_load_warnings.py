"""Warn at a connector's first synchronous load that vLLM would not recompute it."""

from collections.abc import Mapping

from kvobs.log import log
from kvobs.schema.findings import Finding
from kvobs.state.events import Observer
from kvobs.state.transfers import Load


class SyncLoadWarnings(Observer):
    """Logs each connector's warning once: a class does not always show before that it loads synchronously."""

    def __init__(self, warnings: Mapping[int, Finding]) -> None:
        self._warnings = dict(warnings)

    def admitted(self, request_id: str, load: Load) -> None:
        if not load.is_async and (warning := self._warnings.pop(load.child, None)) is not None:
            log.warning("%s", warning)
