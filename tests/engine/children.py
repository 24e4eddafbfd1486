"""Child connectors for tests on real servers, loaded by ``"kv_connector_module_path": "tests.engine.children"``.

The server needs the repository root on its ``PYTHONPATH``; its workers inherit it.
"""

from typing import Any

from opentelemetry import trace

from .children_counting import CountingChild
from .children_stats import IdleChild
from .children_steered import SteeredChild

__all__ = ["SPAN", "CountingChild", "IdleChild", "SilentStatsChild", "SteeredChild", "TracingChild"]

SPAN = "a child's own lookup"


class SilentStatsChild(CountingChild):
    """Returns stats that nothing exports: it has no Prometheus class."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> None:
        return None


class TracingChild(SteeredChild):
    """Makes a span of each lookup, with whatever tracer its process has, as a connector that traces itself does."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with trace.get_tracer(__name__).start_as_current_span(SPAN):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
