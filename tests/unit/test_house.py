"""The measures of the house: small packages of a known shape, and the real one."""

from graphlib import CycleError
from pathlib import Path

import pytest

from docs import house
from docs.house import Measure, arrows, floors, measures, modules


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "__init__.py": "",
        "low.py": "import os\n",
        "middle/__init__.py": "",
        "middle/first.py": "from kvobs import low\nfrom kvobs.middle import second\n",
        "middle/second.py": "def late():\n    import kvobs.low\n",
        "top.py": "from kvobs.middle.first import late\nfrom kvobs import low, middle\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    return tmp_path


def test_rooms_floors_and_arrows_are_counted(package: Path) -> None:
    assert set(modules()) == {"", "low", "middle", "middle.first", "middle.second", "top"}
    assert arrows() == {"": set(), "low": set(), "middle": {"low"}, "top": {"low", "middle"}}
    assert floors(arrows()) == 3


def test_a_circle_is_an_error_that_names_it(package: Path) -> None:
    (package / "low.py").write_text("import kvobs.top\n")
    with pytest.raises(CycleError, match="top"):
        floors(arrows())


def test_the_house_is_measured() -> None:
    found = {name: value for name, value, _ in measures()}
    assert found["kvobs, lines"] > found["in an engine, lines"] > 1000
    assert found["kvobs, files"] == len(modules())
    assert len(found) == 9
    assert min(found.values()) > 1


@pytest.mark.parametrize(("value", "status", "verdict"), [(10, 0, "at most 10"), (11, 1, "at most 10  OVER")])
def test_measure_over_its_bar_is_marked(
    value: int, status: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "measures", lambda: [Measure("rooms", value, 10)])
    assert house.main() == status
    assert capsys.readouterr().out.split() == ["rooms", str(value), *verdict.split()]
