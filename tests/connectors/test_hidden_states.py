"""ExampleHiddenStatesConnector: only tensor-parallel rank 0 saves, so one report of two ranks is all that will come.

Its scheduler side is real, and of its workers' the lock files and the reports. Stood in for: the speculative model, and
the copy of the hidden states on a CUDA stream.
"""

import copy
import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

from kvobs.testing import BLOCK, Script
from tests.connectors.engine import Beside

FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
HELD = "FINISHED_LENGTH_CAPPED"


def _install(patch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """Put the stand-ins in place; return the events at the ends of the copies that workers will make, by request."""
    copies: dict[str, SimpleNamespace] = {}
    build = ExampleHiddenStatesConnector.__init__
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=[1]))

    def built(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        config = copy.copy(vllm_config)
        config.speculative_config = SimpleNamespace(draft_model_config=draft)
        build(self, config, role, kv_cache_config)
        self._is_tp_rank_zero = config.parallel_config.rank == 0

    def submit(self: Any, pending: Any) -> None:
        if self._is_tp_rank_zero:
            self._req_copy_events[pending.req_id] = copies.setdefault(
                pending.req_id, SimpleNamespace(query=lambda: False)
            )

    patch.setattr(ExampleHiddenStatesConnector, "__init__", built)
    patch.setattr(ExampleHiddenStatesConnector, "_submit_async_write", submit)
    return copies


def _build(router: str, folder: Path, sibling: Script, *, is_first: bool, ranks: int) -> Beside:
    extra = {"shared_storage_path": str(folder)}
    config = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return Beside(router, config, sibling, is_first=is_first, ranks=ranks)


def _left(engine: Beside) -> list[str]:
    books = ("_pending_saves", "_request_filenames", "_lock_fds", "_req_copy_events")
    routers = (engine.connector, *engine.workers)
    return [line for router in routers for line in engine.left_in(engine.real(router), *books)]


def _is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@FIRST
@pytest.mark.parametrize(("router", "ranks"), [("stock", 1), ("kvobs", 1), ("kvobs", 2)])
@pytest.mark.parametrize("order", ["copied saved", "saved copied", "copied"])
def test_blocks_are_free_after_all_saves_though_one_rank_reports(
    order: str, router: str, ranks: int, *, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = _install(monkeypatch)
    sibling = Script("sibling", promises={"r"} if "saved" in order else set())
    sibling.offers["r"] = (2 * BLOCK, False)
    engine = _build(router, tmp_path, sibling, is_first=is_first, ranks=ranks)
    engine.add("r", max_tokens=1)
    engine.step()
    lock = tmp_path / "r.safetensors.lock"
    assert _is_locked(lock)
    engine.run(3)
    for what in order.split():
        assert engine.status("r") == HELD
        if what == "copied":
            copies["r"].query = lambda: True
        for rank in range(ranks if what == "saved" else 0):
            sibling.say(rank, saved="r")
        engine.step()
    assert (engine.status("r"), _is_locked(lock)) == ("gone", False)
    engine.run(3)
    assert _left(engine) == []


@pytest.mark.parametrize(("router", "status"), [("stock", HELD), ("kvobs", "gone")])
def test_stock_waits_for_ever(router: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = _install(monkeypatch)
    engine = _build(router, tmp_path, Script("sibling"), is_first=True, ranks=2)
    engine.add("r", max_tokens=1)
    engine.run(3)
    copies["r"].query = lambda: True
    engine.run(20)
    assert engine.status("r") == status


@FIRST
@pytest.mark.parametrize("router", ["stock", "kvobs"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_aborted_request_is_saved_if_it_ever_ran(
    at: int, router: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = _install(monkeypatch)
    engine = _build(router, tmp_path, Script("sibling"), is_first=is_first, ranks=1)
    engine.add("r", max_tokens=9)
    engine.run(at)
    engine.abort("r")
    engine.run(2)
    assert list(copies) == (["r"] if at else [])
    for each in copies.values():
        each.query = lambda: True
    engine.run(3)
    assert _left(engine) == []
