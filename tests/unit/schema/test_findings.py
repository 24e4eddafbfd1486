"""Findings are one readable line each, whatever is in a configuration."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.schema import kinds
from kvobs.schema.findings import Finding, cut, show


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (Finding("a.b", "found 3"), "a.b: found 3"),
        (Finding("a.b", "found 3", "1 or 2"), "a.b: found 3, allowed: 1 or 2"),
        (Finding("a.b", "found 3", fix="use 1"), "a.b: found 3. Fix: use 1."),
        (Finding("a.b", "found \n\x1b\u2028", "1", "use 1"), r"a.b: found \n\x1b\u2028, allowed: 1. Fix: use 1."),
    ],
)
def test_a_finding_is_one_line(finding: Finding, text: str) -> None:
    assert str(finding) == text


@given(st.text(), st.text(), st.text(), st.text())
def test_a_finding_is_printable(path: str, found: str, allowed: str, fix: str) -> None:
    assert str(Finding(path, found, allowed, fix)).isprintable()


def test_an_unknown_key_is_taken_for_the_most_similar_one() -> None:
    known = ("names", "best_effort")
    near, other = (kinds.UNKNOWN_OPTION.near(f"kvobs.{key}", key, known) for key in ("name", "x"))
    assert near == Finding("kvobs.name", "unknown option", "'names', 'best_effort'", "use 'names'")
    assert other.fix == "remove it"
    found = [kinds.UNKNOWN_KEY.near(key, key, known, kinds.MISSPELT_KEY).kind for key in ("name", "x")]
    assert found == [kinds.MISSPELT_KEY, kinds.UNKNOWN_KEY]


def test_long_text_is_cut() -> None:
    assert cut("x" * 80) == "x" * 80
    assert cut("x" * 81) == "x" * 80 + "..."
    assert show("x" * 99) == "'" + "x" * 79 + "..."
