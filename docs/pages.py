"""List the pages, and write what a command measured into one of them.

What is measured stands between two comments, which a reader of the rendered page does not see::

    <!-- run: bench -->
    ...
    <!-- end -->

cog writes all other generated parts, by the calls that stand in the pages.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
DECISIONS = FOLDER / "decisions"


def pages() -> list[Path]:
    """Return the README and all pages of ``docs/``, those of decisions last."""
    return [ROOT / "README.md", *sorted(FOLDER.glob("*.md")), *sorted(DECISIONS.glob("*.md"))]


def measured(text: str, name: str) -> slice:
    """Return where a page has what a command measured; ValueError if it has no such part."""
    begin, end = f"<!-- run: {name} -->\n", "<!-- end -->"
    start = text.find(begin) + len(begin)
    stop = text.find(end, start)
    if start < len(begin) or stop < 0:
        raise ValueError(f"the page has no part between {begin.strip()!r} and {end!r}")
    return slice(start, stop)


def write(page: Path, name: str, content: str) -> None:
    """Write what a command measured into its part of a page."""
    text = page.read_text(encoding="utf-8")
    part = measured(text, name)
    page.write_text(f"{text[: part.start]}{content.rstrip()}\n{text[part.stop :]}", encoding="utf-8")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
