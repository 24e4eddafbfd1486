"""Find words that a reader stumbles over, and name better ones: ``python -m docs.words`` prints those in the pages.

The texts of the program are its strings of several words, docstrings and comments: ``tests/unit/test_words.py`` fails
for such a word in one of them. Code in backticks is not read.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from docs.pages import ROOT, pages

WORDS: dict[str, str] = {
    r"beside": "next to, alongside, in addition to, a separate",
    r"by (?:it|them)sel(?:f|ves)": "automatically, separately",
    r"nobody": "the passive, or who it is: no client, no process",
    r"none (?:of|is|are|has|have|does|do|was|were)": "no, with its noun",
    r"those of": "the noun again",
    r"(?<=,) too": "also, before the verb",
    r"mistakes?": "error",
    r"go(?:es|ing)? on|went on": "continue, keep running",
    r"says?|said|tells?|told": "report, show, log, name",
    r"(?:an?|the|its|their) begin|begin of": "start",
    r"to be had|can't be had": "available",
    r"in the place of": "instead of",
    r"ends? the (?:engine|start)": "crash the engine, stop startup",
    r"of (?:its|their) own(?=[.,;:)]|$)": "separate, or leave it out",
    r"the other way round": "vice versa",
}
"""Words, as regular expressions without their ends, and what to write instead."""

_FIND = {re.compile(rf"(?<!\w)(?:{word})(?!\w)".replace(" ", r"\s+"), re.IGNORECASE): word for word in WORDS}
_CODE = re.compile(r"^```.*?^```|(?<=\n\n) {4}.*?(?=\n\S)|(`+)[^`]+?\1", re.MULTILINE | re.DOTALL)
PROGRAM = (ROOT / "kvobs", ROOT / "dashboards")
UNREAD = (ROOT / "dashboards" / "preview",)
RUNBOOK = ROOT / "dashboards" / "runbook.md"


class Text(NamedTuple):
    """A text in a file, from a line on."""

    path: Path
    line: int
    text: str


class Found(NamedTuple):
    """A word that has a better one."""

    where: str
    word: str
    better: str

    def __str__(self) -> str:
        return f"{self.where}: {self.word!r}; better: {self.better}"


def find(texts: Iterable[Text]) -> Iterator[Found]:
    """Yield the words of the list in these texts, with file and line."""
    for path, line, text in texts:
        shown = _CODE.sub(lambda code: "\n" * code[0].count("\n") or "`", text)
        for pattern, word in _FIND.items():
            for found in pattern.finditer(shown):
                at = line + shown.count("\n", 0, found.start())
                place = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
                yield Found(f"{place}:{at}", " ".join(found[0].split()), WORDS[word])


def program() -> list[Path]:
    """Return the files of the program whose texts are read."""
    paths = (path for folder in PROGRAM for path in sorted(folder.rglob("*.py")))
    return [path for path in paths if not any(path.is_relative_to(folder) for folder in UNREAD)]


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the strings of several words, the docstrings and the blocks of comments of a Python file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(path, node.lineno, node.value)
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and block[-1][0] != token.start[0] - 1:
                yield _block(path, block)
                block = []
            block.append((token.start[0], token.string.lstrip("#!: ")))
    if block:
        yield _block(path, block)


def _block(path: Path, block: list[tuple[int, str]]) -> Text:
    return Text(path, block[0][0], "\n".join(text for _, text in block))


def main() -> None:
    """Print the words of the list that are still in the pages, and how many there are."""
    read = [*pages(), RUNBOOK]
    found = list(find(Text(page, 1, page.read_text(encoding="utf-8")) for page in read))
    for each in found:
        print(each)  # noqa: T201
    counts = Counter(each.better for each in found)
    print(f"{len(found)} words in pages have better ones: {dict(counts.most_common())}")  # noqa: T201


if __name__ == "__main__":
    main()
