"""Child connectors for tests on real servers, loaded by ``"kv_connector_module_path": "tests.engine.children"``.

The server needs the repository root on its ``PYTHONPATH``; its workers inherit it.
"""

from .children_counting import CountingChild
from .children_stats import IdleChild, SilentStatsChild, StatsChild
from .children_steered import SteeredChild
from .children_tracing import TracingChild

__all__ = ["CountingChild", "IdleChild", "SilentStatsChild", "StatsChild", "SteeredChild", "TracingChild"]
