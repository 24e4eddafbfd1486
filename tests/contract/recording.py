"""Scripted connectors that note every hook call, whatever hooks the vLLM at hand has.

Import this module after anything that changes vLLM's base classes.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from kvobs.testing import ScriptedConnector

from .members import public_members


class Call(NamedTuple):
    """One call of a hook of one child."""

    hook: str
    args: tuple[Any, ...]


def _noting(name: str) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorded.append(Call(name, (*args, *kwargs.values())))
        return getattr(ScriptedConnector, name)(self, *args, **kwargs)

    return hook


_HOOKS: Any = {name: _noting(name) for name, member in public_members().items() if inspect.isfunction(member)}


class Recording(ScriptedConnector):
    """Notes its calls in ``recorded``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.recorded: list[Call] = []
        super().__init__(vllm_config, role, kv_cache_config)

    vars().update(_HOOKS)
