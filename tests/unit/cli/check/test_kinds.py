"""Each kind of finding has a row, an input that has it, and one that does not: docs/findings.md shows them."""

from pathlib import Path

import pytest

from docs.kinds import main, of_example
from kvobs.schema import kinds
from kvobs.schema.findings import Kind
from kvobs.schema.kinds import CPU, HOLES, KINDS, NIXL, TIER, router

pytestmark = pytest.mark.usefixtures("bare_machine")

WITHOUT = {
    *(kinds.NO_PLACE, kinds.PORT_IN_USE, kinds.NO_LISTENING),
    *(kinds.NO_VLLM, kinds.OTHER_PLUGIN, kinds.NO_IMPORT, kinds.NO_CLASS, kinds.RAISES, kinds.LAYOUTS_OF_SOME),
}
"""Kinds without examples: they depend on ports of the machine, on ``--place``, or on an import."""


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind not in WITHOUT])
def test_only_the_wrong_example_has_this_finding(name: str) -> None:
    kind = KINDS[name]
    wrong, right = ([found[:2] for found in of_example(text)] for text in (kind.wrong, kind.right or NIXL))
    assert (kind.level, name) in wrong, wrong
    assert name not in [found for _, found in right], right


def test_each_name_is_of_one_kind_and_a_few_have_no_example() -> None:
    assert len(KINDS) == sum(isinstance(each, Kind) for each in vars(kinds).values())
    assert {kind for kind in KINDS.values() if not kind.wrong} == WITHOUT


def test_a_report_on_files_counts_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.json", router(CPU)), ("b.sh", TIER.wrong), ("c", HOLES.wrong)):
        (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:3]) == ["     1  error", "     1  fine", "     1  not known"]
    assert "     1  error: tier" in lines
