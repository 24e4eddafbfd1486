"""Cutters of spans, and a folder for the ends of engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from kvobs.export import engine_watch, span_export
from tests.support.contexts import no_otel_variables
from tests.support.cutters import Cutter, Make


@pytest.fixture(autouse=True)
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engine_watch, "folder", lambda: tmp_path / "ends")
    return tmp_path / "ends"


@pytest.fixture
def cutter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes cutters, and closes them."""
    no_otel_variables(monkeypatch)
    made: list[Cutter] = []

    def make(exporter: SpanExporter | None = None) -> Cutter:
        made.append(Cutter(exporter))
        return made[-1]

    yield make
    monkeypatch.setattr(span_export, "CLOSING_S", 0.1)
    for one in made:
        one.cutter.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Cutter]:
    """Return a cutter for many examples: ``again`` makes it as new."""
    with pytest.MonkeyPatch.context() as patch:
        no_otel_variables(patch)
        mine = Cutter()
    yield mine
    mine.cutter.close()
