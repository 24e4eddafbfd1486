"""What makes spans of records, in memory."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvobs.export.span_export import SpanConverter

MODEL = {"gen_ai.request.model": "tiny"}


class Converter:
    """A converter, where its spans go, and what it reported as lost."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        self.memory = InMemorySpanExporter()
        self.lost: dict[str, int] = {}
        self.converter = SpanConverter(exporter or self.memory, MODEL, self._drop)

    def _drop(self, where: str, n: int) -> None:
        self.lost[where] = self.lost.get(where, 0) + n

    def convert(self, *groups: Sequence[Any], engine: int = 0) -> int:
        return len(self.converter.convert(groups, engine))

    def again(self) -> None:
        """Forget what was."""
        self.send()
        self.memory.clear()
        self.lost.clear()

    def send(self) -> None:
        self.converter._processor.force_flush()

    def sent(self) -> list[ReadableSpan]:
        self.send()
        return list(self.memory.get_finished_spans())


Make = Callable[..., Converter]


class Hanging(SpanExporter):
    """Stands for a collector that does not answer before ``may_go`` is set."""

    def __init__(self) -> None:
        self.is_called, self.may_go = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_called.set()
        self.may_go.wait(30)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.may_go.wait(30)
