"""Each rule of routing has a page with its reason and its tests, and each code in a comment or test names a page."""

import re
from pathlib import Path

import pytest

from docs.pages import DECISIONS, ROOT

PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(DECISIONS.glob("[nw]*.md"))}
CODE = re.compile(r"\b[NW][1-9][0-9]?\b|(?<=test_)w[1-9][0-9]?(?=_)")


def sources() -> list[Path]:
    """Return the files whose comments and names may have a rule's code."""
    return [path for folder in ("kvobs", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_every_code_names_a_page() -> None:
    named = {code.lower() for path in sources() for code in CODE.findall(path.read_text(encoding="utf-8"))}
    assert "w10" in named, "codes are found"
    assert named <= set(PAGES)


@pytest.mark.parametrize("code", PAGES)
def test_a_page_has_its_code_its_reason_and_its_tests(code: str) -> None:
    assert PAGES[code].startswith(f"# {code.upper()}: ")
    assert "\n## Why\n" in PAGES[code]
    tests = re.findall(r"^- `(tests/[\w/]+\.py)::(test_\w+)`$", PAGES[code].partition("\n## Proof\n")[2], re.MULTILINE)
    assert tests
    for path, name in tests:
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8")
