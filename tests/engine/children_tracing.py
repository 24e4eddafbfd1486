"""A steered child that traces itself, as a child with instrumentation of its own does."""

from typing import Any

from opentelemetry import trace

from .children_steered import SteeredChild

SPAN = "a child's own lookup"


class TracingChild(SteeredChild):
    """Makes a span of each lookup, with whatever tracer its process has."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        with trace.get_tracer(__name__).start_as_current_span(SPAN):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
