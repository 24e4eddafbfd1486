"""Test a KV connector in vLLM's real scheduler without a model, or in a real server with a tiny one.

``docs/testing.md`` has an example, under kvobs and under vLLM's own router, in one process. Needs vLLM, and no test
framework; no engine imports it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvobs.testing.rig import BLOCK, ROUTERS, Rig, cache_config, engine_config, transfer_config
    from kvobs.testing.scripted import Loaded, Script, ScriptedConnector, Shown, entry_of

__all__ = [
    "BLOCK",
    "ROUTERS",
    "Loaded",
    "Rig",
    "Script",
    "ScriptedConnector",
    "Shown",
    "cache_config",
    "engine_config",
    "entry_of",
    "transfer_config",
]


def __getattr__(name: str) -> Any:
    """Import vLLM's scheduler on first use: the demo starts servers without it."""
    if name in __all__:
        from kvobs.testing import rig, scripted

        return getattr(rig if hasattr(rig, name) else scripted, name)
    raise AttributeError(f"module 'kvobs.testing' has no attribute {name!r}")
