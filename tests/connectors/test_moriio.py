"""MoRIIO beside a sibling that saves: blocks are free once, after both, and neither takes the other's reports back."""

from __future__ import annotations

import pytest

from kvobs.testing import Script
from tests.connectors.moriio import Prefill

FIRST = pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
RANKS = pytest.mark.parametrize("ranks", [1, 2])
HELD = "FINISHED_LENGTH_CAPPED"

BOTH, OURS = ("stock", "kvobs"), ("kvobs",)
RIGHT = {
    "acknowledged, then saved": (BOTH, "r", "prefill 2:held acknowledge:held saved:gone"),
    "saved, then acknowledged": (BOTH, "r", "prefill 2:held saved:held acknowledge:gone"),
    "no decode engine wants it": (OURS, "r", "add 2:held saved:gone wait wait"),
    "acknowledged early": (BOTH, "", "prefill-long 2 acknowledge:RUNNING 4:gone"),
    "acknowledged early, saved at last": (OURS, "r", "prefill-long 2 acknowledge 4:held saved:gone"),
    "never acknowledged": (BOTH, "", "prefill 5:held wait:gone"),
    "acknowledged too late": (BOTH, "", "prefill 2 wait:gone acknowledge wait prefill 2:held acknowledge:gone"),
    "given up, and saved at last": (OURS, "r", "prefill 2 wait:held 3:held saved:gone wait"),
}
"""By name: with which routers, what the sibling saves, and what happens to a request, with its status then."""

CASES = [
    pytest.param(name, router, read, id=f"{name}-{router}-{'read' if read else 'write'}")
    for name, (routers, _, life) in RIGHT.items()
    for router in routers
    for read in ((True,) if "wait" in life else (True, False))
]
"""vLLM 0.33 gives nothing up in write mode."""

WRONG_IN_STOCK = {
    "the sibling's save is taken back": "add 2 saved wait wait wait:held",
    "free when acknowledged early": "prefill-long 2 acknowledge 4:gone",
    "free when given up": "prefill-long 2 4 wait:gone",
}


def _live(
    life: str, router: str, saves: str, patch: pytest.MonkeyPatch, *, is_first: bool, read: bool, ranks: int = 1
) -> Prefill:
    sibling = Script("sibling", promises=set(saves.split()))
    engine = Prefill(router, patch, sibling, is_first=is_first, read=read, ranks=ranks)
    for happening in life.split():
        what, _, status = happening.partition(":")
        match what:
            case "add":
                engine.add("r", max_tokens=1)
            case "prefill" | "prefill-long":
                engine.prefill("r", max_tokens=1 if what == "prefill" else 4)
            case "acknowledge":
                engine.acknowledge("r")
            case "saved":
                engine.saved("r")
            case "wait":
                engine.wait()
            case _:
                engine.run(int(what))
        assert not status or engine.status("r") == {"held": HELD}.get(status, status), happening
    return engine


@FIRST
@RANKS
@pytest.mark.parametrize(("name", "router", "read"), CASES)
def test_blocks_are_free_once_after_both(
    name: str, router: str, ranks: int, *, read: bool, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, saves, life = RIGHT[name]
    engine = _live(life, router, saves, monkeypatch, is_first=is_first, read=read, ranks=ranks)
    engine.run(3)
    assert engine.left == []


@FIRST
@pytest.mark.parametrize("name", WRONG_IN_STOCK)
def test_stock_frees_too_early_or_never(name: str, is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _live(WRONG_IN_STOCK[name], "stock", "r", monkeypatch, is_first=is_first, read=True)
