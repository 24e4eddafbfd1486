"""Connectors for tests on real servers, loaded by ``"kv_connector_module_path": "tests.engine.connectors"``.

The server needs the repository root on its ``PYTHONPATH``; its workers inherit it.
"""

from typing import Any

from opentelemetry import trace

from .connectors_counting import CountingConnector
from .connectors_stats import IdleConnector
from .connectors_steered import SteeredConnector

__all__ = ["SPAN", "CountingConnector", "IdleConnector", "SilentStatsConnector", "SteeredConnector", "TracingConnector"]

SPAN = "a connector's own lookup"


class SilentStatsConnector(CountingConnector):
    """Returns stats that nothing exports: it has no Prometheus class."""

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> None:
        return None


class TracingConnector(SteeredConnector):
    """Makes a span of each lookup, with whatever tracer its process has, as a connector that traces itself does."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with trace.get_tracer(__name__).start_as_current_span(SPAN):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
