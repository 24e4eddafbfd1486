"""What records in a process is built from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvobs.schema.options import Options
from kvobs.telemetry import telemetry
from kvobs.telemetry.timeline import flight

if TYPE_CHECKING:
    import pytest


def test_a_recording_holds_the_options_by_which_loads_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(flight, "begin", lambda *_, settings: begun.append(settings))
    telemetry.build(["a"], Options(load_policy="longest", lookup_timeout_ms=5), None, None, rank=0)
    assert begun == [{"load_policy": "longest", "min_tokens": {}, "wait_for": "all", "lookup_timeout_ms": 5}]
