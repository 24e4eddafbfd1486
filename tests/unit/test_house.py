"""The measures of the house: small packages of a known shape, and the real one."""

from graphlib import CycleError
from pathlib import Path

import pytest

from docs import house
from docs.house import NEVER, NO_CIRCLES, Measure, arrows, broken_walls, floors, for_operators, measures, modules, room


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


@pytest.mark.parametrize(
    ("never", "broken"),
    [
        ({"low": ("top",)}, {}),
        ({"top": ("low",)}, {"top": {"low"}}),
        ({"top": ("middle",)}, {"top": {"middle", "middle.first"}}),
        ({"top": ("middle.",)}, {"top": {"middle.first"}}),
        ({"middle": ("lo",)}, {}),
        ({"middle": ("low",)}, {"middle.first": {"low"}, "middle.second": {"low"}}),
    ],
)
def test_an_import_that_may_never_be_is_found(
    never: dict[str, tuple[str, ...]], broken: dict[str, set[str]], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "NEVER", never)
    assert broken_walls() == broken


def test_folders_of_a_room_that_import_each_other_are_found(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "NEVER", {})
    monkeypatch.setattr(house, "NO_CIRCLES", {"middle"})
    for name, others in {"a.one": ["b.two"], "b.two": ["b.one"], "b.one": ["c.one"], "c.one": ["a.two"]}.items():
        path = package / "middle" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"import kvobs.middle.{other}\n" for other in others))
    (package / "middle/a/two.py").write_text("from kvobs import low\n")
    assert broken_walls() == {
        "middle.a.one": {"middle.b.two"},
        "middle.b.one": {"middle.c.one"},
        "middle.c.one": {"middle.a.two"},
    }


def test_walls_stand_between_rooms_that_exist() -> None:
    places = {place.rstrip(".") for places in NEVER.values() for place in places}
    assert {*NEVER, *places, *NO_CIRCLES} <= {room(name) for name in modules()}


def test_the_house_is_measured() -> None:
    found = {name: value for name, value, _ in measures()}
    assert found["kvobs, lines"] > found["in an engine, lines"] > 1000
    assert found["kvobs, files"] == len(modules())
    assert len(found) == 10
    assert min(found.values()) > 1


def test_pages_for_operators_are_those_of_the_index() -> None:
    names = [page.name for page in for_operators()]
    assert {"quickstart.md", "on-call.md"} < set(names)
    assert not {"changelog.md", "architecture.md", "runbook.md"} & set(names)
    assert all(page.exists() for page in for_operators())


def test_a_size_above_its_aim_is_printed_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "broken_walls", dict)
    monkeypatch.setattr(house, "measures", lambda: [Measure("rooms", 101, 100)])
    assert house.main() == 0
    assert capsys.readouterr().out == f"{'rooms':20}     101  aim 100\n"


def test_broken_walls_are_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(house, "NEVER", {"top": ("middle",)})
    assert house.main() == 1
    assert capsys.readouterr().out.startswith("top must not import middle, middle.first\nkvobs, lines")
