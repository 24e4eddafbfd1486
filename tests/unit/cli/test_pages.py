"""Pages are found with their engine's id, whose name has its model and port as far as they are known."""

import pytest

from kvobs.cli.pages import engine_name, pages
from kvobs.page.description import EngineInfo
from tests.support.page_files import page_folder
from tests.support.written import Pages


def test_pages_of_several_engines_are_found_and_bad_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    with page_folder() as folder:
        first = Pages(None, 0)
        second = Pages(None, of=first, index=1)
        (folder / "x-0-rank1-1-1.page").write_bytes(bytes(4096))
        found = [(engine, page.rank) for engine, page in pages()]
    assert found == [(f"{first.server[:8]}-0", None), (f"{first.server[:8]}-0", 0), (f"{second.server[:8]}-1", None)]
    assert "x-0-rank1-1-1.page is skipped: its process has not written it yet" in capsys.readouterr().err.replace(
        "\n", ""
    )


@pytest.mark.parametrize(
    ("model", "port", "name"),
    [("m", 80, "m, port 80 (e-0)"), ("m", None, "m (e-0)"), ("", 80, "e-0"), ("\x1b[1m", None, r"\x1b[1m (e-0)")],
)
def test_names(model: str, port: int | None, name: str) -> None:
    assert engine_name("e-0", EngineInfo((), model=model, port=port)) == name
