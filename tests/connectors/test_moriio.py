"""MoRIIO beside a sibling that saves: blocks are free once, after both, and neither takes the other's reports back."""

from __future__ import annotations

import pytest

from kvobs.testing import Script
from tests.connectors.moriio import Prefill

FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
MODES = pytest.mark.parametrize("read", [True, False], ids=["read", "write"])
BOTH = pytest.mark.parametrize("router", ["stock", "kvobs"])
HELD = "FINISHED_LENGTH_CAPPED"


def _build(
    router: str,
    patch: pytest.MonkeyPatch,
    *,
    is_first: bool = True,
    read: bool = True,
    ranks: int = 1,
    saves: str = "r",
) -> Prefill:
    sibling = Script("sibling", promises=set(saves.split()))
    return Prefill(router, patch, sibling, is_first=is_first, read=read, ranks=ranks)


@BOTH
@MODES
@FIRST
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", ["acknowledged saved", "saved acknowledged"])
def test_blocks_are_free_after_both(
    order: str, ranks: int, *, is_first: bool, read: bool, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _build(router, monkeypatch, is_first=is_first, read=read, ranks=ranks)
    engine.prefill("r")
    engine.run(2)
    for what in order.split():
        assert engine.status("r") == HELD
        engine.acknowledge("r") if what == "acknowledged" else engine.saved("r")
    assert engine.status("r") == "gone"
    engine.run(3)
    assert engine.left == []


@FIRST
def test_a_siblings_save_is_not_taken_back(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _build("kvobs", monkeypatch, is_first=is_first)
    engine.add("r", max_tokens=1)  # no decode engine wants it: MoRIIO promises nothing
    engine.run(2)
    assert engine.status("r") == HELD
    engine.saved("r")
    assert engine.status("r") == "gone"
    engine.wait()
    engine.wait()
    assert engine.left == []


@FIRST
def test_stock_loses_a_siblings_save(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _build("stock", monkeypatch, is_first=is_first)
    engine.add("r", max_tokens=1)
    engine.run(2)
    engine.saved("r")
    for _ in range(3):
        engine.wait()
    assert engine.status("r") == HELD


@BOTH
@MODES
def test_an_early_acknowledgement_is_kept(read: bool, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _build(router, monkeypatch, read=read, saves="")
    engine.prefill("r", max_tokens=4)
    engine.run(2)
    engine.acknowledge("r")
    assert engine.status("r") == "RUNNING"
    engine.run(4)
    assert engine.status("r") == "gone"
    assert engine.left == []


@MODES
@FIRST
def test_an_early_acknowledgement_waits_for_the_siblings_save(
    is_first: bool, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _build("kvobs", monkeypatch, is_first=is_first, read=read)
    engine.prefill("r", max_tokens=4)
    engine.run(2)
    engine.acknowledge("r")
    engine.run(4)
    assert engine.status("r") == HELD
    engine.saved("r")
    engine.run(2)
    assert engine.status("r") == "gone"
    assert engine.left == []


@BOTH
def test_what_is_never_acknowledged_is_given_up(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _build(router, monkeypatch, saves="")
    engine.prefill("r")
    engine.run(5)
    assert engine.status("r") == HELD
    engine.wait()
    assert engine.status("r") == "gone"
    assert engine.left == []


@BOTH
@FIRST
def test_a_late_acknowledgement_harms_nothing(is_first: bool, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _build(router, monkeypatch, is_first=is_first, saves="")
    engine.prefill("r")
    engine.run(2)
    engine.wait()
    assert engine.status("r") == "gone"
    engine.acknowledge("r")
    engine.wait()
    engine.prefill("next")
    engine.run(2)
    engine.acknowledge("next")
    engine.run(2)
    assert engine.left == []


@FIRST
@pytest.mark.parametrize("is_early", [True, False], ids=["early", "given up"])
def test_stock_frees_blocks_that_a_sibling_still_saves(
    is_early: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _build("stock", monkeypatch, is_first=is_first)
    engine.prefill("r", max_tokens=4)
    engine.run(2)
    if is_early:
        engine.acknowledge("r")
    engine.run(4)
    if not is_early:
        engine.wait()
    assert engine.status("r") == "gone"


@FIRST
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_given_up_is_held_while_the_sibling_saves(
    ranks: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _build("kvobs", monkeypatch, is_first=is_first, ranks=ranks)
    engine.prefill("r")
    engine.run(2)
    engine.wait()
    engine.run(3)
    assert engine.status("r") == HELD


@FIRST
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_given_up_waits_for_the_siblings_save(
    ranks: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _build("kvobs", monkeypatch, is_first=is_first, ranks=ranks)
    engine.prefill("r")
    engine.run(2)
    engine.wait()
    assert engine.status("r") == HELD
    engine.saved("r")
    assert engine.status("r") == "gone"
    engine.wait()
    assert engine.left == []
