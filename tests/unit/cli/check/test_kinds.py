"""Each kind of finding has a row, an input that has it, and one that does not: docs/check.md shows them."""

from pathlib import Path

import pytest

from docs import kinds
from docs.kinds import KINDS, NIXL, kind_of, main, texts

pytestmark = pytest.mark.usefixtures("bare_machine")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.wrong])
def test_the_wrong_example_has_this_finding_and_the_right_one_has_not(name: str) -> None:
    kind = KINDS[name]
    wrong, right = ([(each[0], kind_of(*each)) for each in texts(text)] for text in (kind.wrong, kind.right or NIXL))
    assert (kind.level, name) in wrong, wrong
    assert name not in [found for _, found in right], right
    assert "" not in [found for _, found in (*wrong, *right)]


def test_a_report_on_files_counts_by_reason_and_fails_without_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("a.json", kinds.router(kinds.CPU)),
        ("b.sh", KINDS["tier"].wrong),
        ("c", KINDS["variable"].wrong),
    ):
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:3]) == ["     1  fine", "     1  mistake", "     1  not known"]
    assert "     1  mistake: tier" in lines
    monkeypatch.setattr(kinds, "KINDS", {"tier": KINDS["tier"]})
    assert main([str(tmp_path)]) == 1
    assert "NO ROW" in capsys.readouterr().out
