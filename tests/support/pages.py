"""Read the pages as tests compare them with the code: their texts, what a pattern finds, their prose, their samples."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from docs.pages import ROOT, pages

TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages()}
RUNBOOK = "dashboards/runbook.md"
ALL_TEXTS = {**TEXTS, RUNBOOK: (ROOT / RUNBOOK).read_text(encoding="utf-8")}

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_GENERATED = re.compile(r"<!-- (?:\[\[\[cog|run:) .*?<!-- (?:\[\[\[end\]\]\]|end) -->", re.DOTALL)


class Mention(NamedTuple):
    """Something that a page names."""

    page: str
    what: str

    def __str__(self) -> str:
        return f"{self.page}: {self.what}"


def mentions(pattern: str, texts: Mapping[str, str] = TEXTS) -> list[Mention]:
    """Return what a pattern's group finds in each page, each once."""
    return sorted(
        {Mention(page, what) for page, text in texts.items() for what in re.findall(pattern, text, re.MULTILINE)}
    )


def every(pattern: str, texts: Mapping[str, str] = TEXTS) -> list[Mention]:
    """Return the same, and fail where there is nothing: then the pattern is wrong."""
    found = mentions(pattern, texts)
    assert found, f"nothing in the pages is like {pattern}"
    return found


def paragraphs(text: str) -> list[str]:
    """Return a page's paragraphs and list items, without code blocks, generated parts and line breaks."""
    text = _GENERATED.sub("", _FENCE.sub("", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-|]|\d\.) )", text)
    return [" ".join(part.split()) for part in parts if part.strip() and not part.lstrip("\n").startswith("    ")]


def sample(page: str, beginning: str) -> list[str]:
    """Return the lines that are indented from the one with this beginning on, without indentation and empty lines."""
    lines = ALL_TEXTS[page].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    ") and line.strip().startswith(beginning))
    last = next((i for i in range(first, len(lines)) if lines[i] and not lines[i].startswith("    ")), len(lines))
    return [line[4:].rstrip() for line in lines[first:last] if line.strip()]


def not_printed(shown: Iterable[str], printed: Iterable[str]) -> list[str]:
    """Return the lines of a sample that a command did not print, in their order.

    Numbers and widths may differ; "..." in a sample stands for anything.
    """
    rest = [_comparable(line) for line in printed]
    missing = []
    for line in shown:
        pattern = ".*".join(map(re.escape, _comparable(line).split("...")))
        at = next((i for i, other in enumerate(rest) if re.fullmatch(pattern, other)), None)
        if at is None:
            missing.append(line)
        else:
            del rest[: at + 1]
    return missing


def _comparable(line: str) -> str:
    return re.sub(r"\d[\d,.]*", "0", re.sub("─+", "─", " ".join(line.split())))
