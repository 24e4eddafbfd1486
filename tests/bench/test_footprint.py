"""The calls of a step: within their bars, and listed."""

import pytest

from tests.bench import footprint


def test_no_path_is_over_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert footprint.main([]) == 0, capsys.readouterr().out


def test_calls_are_listed_below_the_one_that_made_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert footprint.main(["--calls", "decode step", "--router", "stock"]) == 0
    lines = [line.split("  vllm/")[0] for line in capsys.readouterr().out.splitlines()]
    clear = lines.index("MultiConnector.clear_connector_metadata")
    assert lines[clear + 1] == "  KVConnectorBase_V1.clear_connector_metadata"


def test_values_over_their_bar_are_marked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [footprint.Call(f"<kvobs: {name}>", 1, name, 0) for name in ("a", "b", "b", "a")]
    monkeypatch.setattr(footprint, "path_of", lambda name, router: calls)
    monkeypatch.setattr(footprint, "BARS", {"build": footprint.Footprint(4, 2, 3)})
    assert footprint.main([]) == 0
    monkeypatch.setattr(footprint, "BARS", {"build": footprint.Footprint(4, 2, 2)})
    assert footprint.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-2].endswith("4      2      3        0   4 / 2 / 2  OVER")
