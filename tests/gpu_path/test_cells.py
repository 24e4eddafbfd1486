"""Real engines on vLLM's default path for GPUs, and on the three others: answers, counts, and what is left."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu_path.cells import PUBLISH, SERVED, Cell, Found, publish

ALL_GO_WELL = ("reuse", "streams", "preemptions")
ARRANGEMENTS = (
    Cell(scenarios=ALL_GO_WELL),
    Cell(router="alone", stores=("host",)),
    Cell(router="alone", stores=("disk",), scenarios=ALL_GO_WELL),
    Cell(router="stock", stores=("host", "disk")),
    Cell(router="kvobs", stores=("host", "disk")),
    Cell(router="kvobs", stores=("disk", "host"), scenarios=ALL_GO_WELL),
)
DEFAULT = (
    *ARRANGEMENTS,
    Cell(router="kvobs", stores=("host", "disk"), scenarios=("preemptions",), extra="priority"),
    Cell(router="kvobs", stores=("host", "disk"), scenarios=ALL_GO_WELL, extra="speculation"),
)
"""Of the path that vLLM takes on GPUs by default: V2 and asynchronous."""
OTHERS = tuple(
    replace(cell, is_v2=is_v2, is_async=is_async, scenarios=tuple(served))
    for is_v2, is_async in ((True, False), (False, True), (False, False))
    for cell in ARRANGEMENTS
    # On V1 ExampleConnector looks for a resumed request's prompt and answer in its files, where prompts are only.
    if (served := [name for name in cell.scenarios if is_v2 or cell.stores[:1] != ("disk",) or name != "preemptions"])
)
QUICK = [cell for cell in OTHERS if (cell.router, cell.scenarios) == ("kvobs", SERVED)]
CELLS = DEFAULT + (OTHERS if os.environ.get(PUBLISH) else tuple(QUICK))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_answers_as_the_base_and_kvobs_counts_what_connectors_count(
    cell: Cell, model: Path, tmp_path: Path, base: Found
) -> None:
    found = cell.run(model, tmp_path)
    publish(cell, found, base)
    assert found.ended == ""
    assert [name for scenario in cell.scenarios for name in found.wrong(base, scenario)] == []
    assert found.left == []
    if cell.router == "kvobs":
        assert found.kvobs == found.counted
    if cell.stores:
        loads = {name: counted[1] for name, counted in found.counted.items()}
        assert loads["OffloadingConnector" if cell.stores[0] == "host" else "ExampleConnector"] > 0
    assert found.preemptions > 0 or "preemptions" not in cell.scenarios
    assert found.while_loading > 0 or "host" not in cell.stores[:1]
    assert found.failed_loads > 0 or "async failures" not in cell.scenarios
    assert found.drafted > 0 or cell.extra != "speculation"
