"""Cutters of spans, and a folder for the pages of a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SpanExporter

from kvobs.export import span_export
from tests.support.contexts import no_otel_variables
from tests.support.converters import Converter, Make
from tests.support.page_files import page_folder


@pytest.fixture(autouse=True, scope="module")
def folder() -> Iterator[Path]:
    """Let all pages of a module's tests be in a new folder."""
    with page_folder() as made:
        yield made


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes converters, and closes them."""
    no_otel_variables(monkeypatch)
    made: list[Converter] = []

    def make(exporter: SpanExporter | None = None) -> Converter:
        made.append(Converter(exporter))
        return made[-1]

    yield make
    monkeypatch.setattr(span_export, "CLOSING_S", 0.1)
    for one in made:
        one.converter.close()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Converter]:
    """Return a converter for many examples: ``again`` makes it as new."""
    with pytest.MonkeyPatch.context() as patch:
        no_otel_variables(patch)
        mine = Converter()
    yield mine
    mine.converter.close()
