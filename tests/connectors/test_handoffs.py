"""Connectors that hand KV over, a prefill and a decode engine each, beside an offloading sibling."""

from __future__ import annotations

import pytest

from tests.connectors.handoff import Handoff, MooncakePD, NixlPush, build_pair, live_as_a_pair


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
@pytest.mark.parametrize("router", ["stock", "kvobs"])
@pytest.mark.parametrize("cls", [Handoff, NixlPush, MooncakePD])
def test_what_is_handed_over_is_right_and_nothing_is_left(
    cls: type[Handoff], router: str, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = build_pair(cls, router, monkeypatch, 1, is_first=is_first)
    endings = live_as_a_pair(prefill, decode, cls, 1)
    assert [line for ending in endings for line in ending.faults] == []
    assert not is_first or endings[1].loaded["decode"] > 20
