"""The picture of a decode step shows the published figures."""

from tests.bench import picture


def test_its_figures_are_those_of_the_table() -> None:
    assert picture.describe() in picture.PICTURE.read_bytes(), "python -m tests.bench.picture"


def test_every_case_has_its_bars() -> None:
    assert {len(added) for routers in picture.figures().values() for added in routers.values()} == {3}
