"""A best-effort connector that fails in the hook that a file names, on the rank that it names, while it is there.

Options in ``kv_connector_extra_config``, beside those of ``SteeredConnector``: ``order``, the file: a hook, or a hook
and a rank; ``failed``, a folder that gets an empty file ``<hook>`` for each hook that has failed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvobs.vllm_api.hooks import HOOKS, Cadence, Side

from .connectors_steered import SteeredConnector

FAILING = tuple(
    hook.name
    for hook in HOOKS.values()
    if hook.cadence is not Cadence.ONCE and hook.side is not Side.CONFIG and hasattr(SteeredConnector, hook.name)
)


class FailingConnector(SteeredConnector):
    """Does what each request's plan says, unless there is an order to fail."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        self._order, self._failed = Path(option("order", "")), Path(option("failed", ""))

    def fail_if_ordered(self, hook: str) -> None:
        try:
            ordered, *rank = self._order.read_text().split()
        except (OSError, ValueError):
            return
        if ordered == hook and rank in ([], [str(self._rank)]):
            (self._failed / hook).touch()
            raise ConnectionError(f"ordered to fail in {hook}")


def _failing(hook: str) -> Callable[..., Any]:
    def call(self: FailingConnector, *args: Any, **kwargs: Any) -> Any:
        self.fail_if_ordered(hook)
        return getattr(super(FailingConnector, self), hook)(*args, **kwargs)

    return call


for _hook in FAILING:
    setattr(FailingConnector, _hook, _failing(_hook))
