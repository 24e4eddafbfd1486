"""The rooms of the house and its measures."""

from docs.house import PACKAGE, floors, for_operators, measures, purpose


def test_rooms_have_floors_and_a_purpose() -> None:
    rooms = [room for floor in floors() for room in floor]
    assert rooms[0] in {"clock", "log", "vllm_api", "state"}
    assert rooms[-1] == "demo"
    assert purpose("cli").startswith("Implement the command `kvobs`: ")
    assert [room for room in rooms if not purpose(room).endswith(".")] == []


def test_the_house_is_measured() -> None:
    found = {name: value for name, value, _ in measures()}
    assert found["kvobs, lines"] > found["in an engine, lines"] > 1000
    assert found["kvobs, files"] == len(list(PACKAGE.rglob("*.py")))
    assert found["rooms"] == sum(map(len, floors())) + 1  # with kvobs/__init__.py
    assert found["arrows"] > found["rooms"]
    assert len(found) == 9


def test_pages_for_operators_are_those_of_the_index() -> None:
    names = [page.name for page in for_operators()]
    assert {"quickstart.md", "on-call.md"} < set(names)
    assert not {"changelog.md", "architecture.md", "runbook.md"} & set(names)
    assert all(page.exists() for page in for_operators())
