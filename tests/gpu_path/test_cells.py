"""Real engines on vLLM's default path for GPUs, and on the three others: answers, counts, and what is left."""

from pathlib import Path

import pytest

from tests.gpu_path.cells import SERVED, SERVING, Cell, Found, publish


@pytest.mark.parametrize("cell", SERVING.chosen, ids=str)
def test_a_cell_answers_as_its_base_and_counts_as_its_connectors(
    cell: Cell, model: Path, tmp_path: Path, base: Found
) -> None:
    found = cell.run(model, tmp_path)
    publish(cell, found, base)
    assert found.ended == ""
    assert [name for scenario in cell.scenarios for name in found.wrong(base, scenario)] == []
    assert found.left == []
    if cell.router == "kvobs":
        assert found.kvobs == found.counted
        assert set(found.verified) == {"match"}, found.verified
    if cell.stores:
        loads = {name: counted[1] for name, counted in found.counted.items()}
        assert loads["OffloadingConnector" if cell.stores[0] == "host" else "ExampleConnector"] > 0
    assert found.preemptions > 0 or "preemptions" not in cell.scenarios
    assert found.while_loading > 0 or cell.scenarios != SERVED
    assert found.failed_loads > 0 or "async failures" not in cell.scenarios
    assert found.drafted > 0 or cell.extra != "speculation"
