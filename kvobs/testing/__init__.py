"""Test a KV connector in vLLM's real scheduler, under kvobs or vLLM's own router, in one process and without a model.

``docs/testing.md`` has an example. Needs vLLM, and no test framework; kvobs itself never imports it.
"""

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
