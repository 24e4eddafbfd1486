"""Every part of a page has its place, no two overlap, and its version names all that readers depend on."""

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvobs.page import layout
from kvobs.page.layout import (
    FAN_OUTS,
    HEAD,
    LAYER_HOOKS,
    MARKS,
    NAME,
    RAISED_CLASS,
    RING_BYTES,
    ROW,
    ROWS,
    SPAN_BYTES,
    WORD,
    Layout,
)
from kvobs.page.writer import describe, plain, size_of
from kvobs.schema import signals
from kvobs.vllm_api.hooks import HOOKS


def parts(at: Layout) -> Iterator[range]:
    """Yield the words of each part, in their order."""
    yield from (range(word, word + 1) for word in range(RAISED_CLASS))
    yield range(RAISED_CLASS, RAISED_CLASS + NAME // WORD)
    yield from (range(at.fan_outs(hook), at.fan_outs(hook) + 2) for hook in LAYER_HOOKS)
    for connector in range(at.connectors):
        yield from (range(at.marks(connector, hook), at.marks(connector, hook) + 2) for hook in HOOKS)
    yield range(at.counts, at.counts + at.slots)
    yield range(at.rows, at.rows + at.row_count * ROW)
    for ring, size in enumerate(SPAN_BYTES):
        yield range(at.spans(ring), at.spans(ring) + RING_BYTES + size // WORD)
    yield range(at.ring, at.words)


@pytest.mark.parametrize("connectors", [0, 1, 3, 1000])
@pytest.mark.parametrize("calls", [1, 1 << 16])
def test_the_parts_of_a_page_follow_each_other(connectors: int, calls: int) -> None:
    at, end = Layout(connectors, calls), 0
    for part in parts(at):
        assert part.start == end
        end = part.stop
    assert (end, len(range(at.ring, at.words))) == (at.words, 3 * calls)
    assert at.row_count - ROWS == connectors * len(signals.DYNAMIC_COUNTERS), "a row for further values of each"
    assert (RAISED_CLASS + NAME // WORD, FAN_OUTS + 2 * len(LAYER_HOOKS)) == (FAN_OUTS, MARKS)


def test_a_page_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CALLS", 1 << 16)
    assert size_of(describe(plain(["one", "two", "three"]), 0)) < 2.5 * 2**20


@pytest.mark.parametrize("size", range(40))
def test_words_begin_at_a_multiple_of_their_size(size: int) -> None:
    assert layout.first(bytes(size)) % WORD == 0
    assert 0 <= layout.first(bytes(size)) - HEAD.size - size < WORD


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kvobs.schema.signals.TABLE_DIGEST", 0),
        ("kvobs.page.description.FIELDS", ("pid",)),
        ("kvobs.page.calls.WORDS", 4),
        ("kvobs.schema.spans.Record._fields", ("name",)),
        ("kvobs.vllm_api.hooks.HOOKS", {"start_load_kv": HOOKS["start_load_kv"]}),
    ],
)
def test_the_version_is_another_one_where_anything_is(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> object:
        spec = importlib.util.spec_from_file_location("layout_again", layout.__file__)
        assert spec is not None
        assert spec.loader is not None
        monkeypatch.setitem(sys.modules, spec.name, module := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
        return module.VERSION

    assert version() == layout.VERSION
    monkeypatch.setattr(name, value)
    assert version() != layout.VERSION
