"""A steered connector that counts every call it gets, by itself, and leaves its counts where a test can read them.

Option in ``kv_connector_extra_config``, beside those of ``SteeredConnector``: ``counts``, an existing folder, in which
each process keeps one file up to date, with the time at which it counted.
"""

import inspect
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvobs.testing.model import write_json

from .connectors_stats import ExportsCalls
from .connectors_steered import SteeredConnector

WRITTEN_EVERY_S = 0.05

# Counted in the connector's own stats too. Not the hooks of every step: an engine that waits makes 600 steps a second.
EXPORTED = {"on_new_request", "get_num_new_matched_tokens", "request_finished_all_groups", "register_kv_caches"}

# Left as vLLM's base class has them: the engine asks them again and again while it is idle.
LEFT_EMPTY = {"has_pending_push_work", "has_pending_block_frees"}


class CountingConnector(ExportsCalls, SteeredConnector):
    """Does what each request's plan says, and counts the calls that others make; its calls to itself don't count."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._calls: dict[str, int] = {}
        self._is_inside = False
        super().__init__(vllm_config, role, kv_cache_config)
        engine = re.search(r"_dp(\d+)$", self._kv_transfer_config.engine_id or "")
        folder = Path(self._kv_transfer_config.get_from_extra_config("counts", ""))
        path = folder / f"{self._who}-{os.getpid()}.json"
        whose = {"engine": engine[1] if engine else "0", "who": self._who}
        threading.Thread(target=self._keep_writing, args=(path, whose), daemon=True).start()

    def _keep_writing(self, path: Path, whose: dict[str, str]) -> None:
        while True:
            write_json(path, {**whose, "at": time.monotonic(), "calls": dict(self._calls)})
            time.sleep(WRITTEN_EVERY_S)


def counted(hook: str) -> Callable[..., Any]:
    def call(self: CountingConnector, *args: Any, **kwargs: Any) -> Any:
        inherited = getattr(super(CountingConnector, self), hook)
        if self._is_inside:
            return inherited(*args, **kwargs)
        self._calls[hook] = self._calls.get(hook, 0) + 1
        if hook in EXPORTED:
            self._count(hook)
        self._is_inside = True
        try:
            return inherited(*args, **kwargs)
        finally:
            self._is_inside = False

    return call


for base in (KVConnectorBase_V1, SupportsHMA):
    for name, member in vars(base).items():
        if inspect.isfunction(member) and not name.startswith("_") and name not in LEFT_EMPTY:
            setattr(CountingConnector, name, counted(name))


def calls_counted(folder: Path, engine: str = "0", since: float = 0.0) -> Counter[tuple[str, str]]:
    """Return the calls of one engine's connectors by (who, hook), who being "scheduler" or "worker<rank>".

    They were counted since that time of this machine's clock.
    """
    calls: Counter[tuple[str, str]] = Counter()
    for path in folder.glob("*.json"):
        while (counts := json.loads(path.read_text()))["at"] < since:
            time.sleep(WRITTEN_EVERY_S)
        if counts["engine"] == engine:
            calls.update({(counts["who"], hook): n for hook, n in counts["calls"].items()})
    return calls
