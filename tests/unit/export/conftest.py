"""Cutters of spans, and a folder for the pages of a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from kvobs.export import span_export
from tests.support.contexts import no_otel_variables
from tests.support.cutters import Cutter, Make
from tests.support.page_files import page_folder


@pytest.fixture(autouse=True, scope="module")
def folder() -> Iterator[Path]:
    """Let all pages of a module's tests be in a new folder."""
    with page_folder() as made:
        yield made


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
