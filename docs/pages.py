"""Read the pages and fill the parts of them that are generated.

A generated part stands between two comments, which a reader of the rendered page does not see::

    <!-- table: metrics -->
    ...
    <!-- end -->

``table`` parts are made from the code by ``python -m docs``; ``run`` parts are written by the command that measures.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
DECISIONS = FOLDER / "decisions"
_END = "<!-- end -->"
_BEGIN = re.compile(r"^<!-- (table|run): ([a-z-]+) -->$", re.MULTILINE)


def pages() -> list[Path]:
    """Return the README and all pages of ``docs/``, those of decisions last."""
    return [ROOT / "README.md", *sorted(FOLDER.glob("*.md")), *sorted(DECISIONS.glob("*.md"))]


def parts(text: str, kind: str = "table") -> list[str]:
    """Return the names of a page's generated parts of one kind."""
    return [found[2] for found in _BEGIN.finditer(text) if found[1] == kind]


def part(text: str, kind: str, name: str) -> str:
    """Return the content of one generated part of a page; ValueError if the page has no such part."""
    return _split(text, kind, name)[1]


def fill(text: str, kind: str, name: str, content: str) -> str:
    """Return the page with new content in one generated part.

    Raises:
        ValueError: the page has no such part, or the part has no end.
    """
    before, _, after = _split(text, kind, name)
    return f"{before}{content.rstrip()}\n{after}"


def _split(text: str, kind: str, name: str) -> tuple[str, str, str]:
    """Return what is before, in and after a generated part; the comments around it are not part of it."""
    begin = f"<!-- {kind}: {name} -->\n"
    before, found, rest = text.partition(begin)
    content, end, after = rest.partition(_END)
    if not found or not end:
        raise ValueError(f"the page has no part between {begin.strip()!r} and {_END!r}")
    return before + begin, content, end + after


def write(page: Path, kind: str, name: str, content: str) -> None:
    """Fill one generated part of a page in its file."""
    page.write_text(fill(page.read_text(encoding="utf-8"), kind, name, content), encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
