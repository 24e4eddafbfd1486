"""Failed synchronous loads, of which vLLM makes wrong answers or no engine: kvobs must not add to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_path.cells import FAILING, ISOLATED, RECOMPUTED, Cell, Found, publish

REASONS = {
    "V2": "vLLM 0.32's V2 runner goes on with the blocks of a failed load: wrong answers",
    "V1": "vLLM 0.32's V1 runner with async scheduling ends the engine after a failed load: IndexError",
}


def _faulty(cell: Cell) -> Any:
    return pytest.param(
        cell, id=str(cell), marks=pytest.mark.xfail(raises=AssertionError, reason=REASONS[cell.path[:2]])
    )


@pytest.mark.parametrize("cell", [_faulty(cell) for cell in FAILING.chosen])
def test_failed_synchronous_loads_are_computed(cell: Cell, model: Path, tmp_path: Path, base: Found) -> None:
    """vLLM's own fault, with each router and without: the day it is mended, this test fails."""
    _assert_right(cell, model, tmp_path, base)


def test_failed_synchronous_loads_are_computed_where_vllm_can(model: Path, tmp_path: Path, base: Found) -> None:
    found = _assert_right(RECOMPUTED, model, tmp_path, base)
    assert found.failed_loads > 0


def test_an_isolated_connector_that_raises_spoils_no_answer(model: Path, tmp_path: Path, base: Found) -> None:
    """Under V2 it loads nothing within a step: its exception would be a failed load, and wrong answers in silence."""
    found = _assert_right(ISOLATED, model, tmp_path, base)
    lookups, loads, tokens = found.kvobs["ExampleConnector"]
    assert (lookups > 0, loads, tokens) == (True, 0, 0)


def _assert_right(cell: Cell, model: Path, folder: Path, base: Found) -> Found:
    found = cell.run(model, folder)
    publish(cell, found, base)
    assert (found.ended, found.wrong(base, cell.scenarios[0]), found.left) == ("", [], [])
    return found
