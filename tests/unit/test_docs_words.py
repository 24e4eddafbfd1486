"""Pages are in plain English: without the words of the list in docs/contributing.md."""

import re

import pytest

from tests.support.pages import TEXTS, Mention, paragraphs

AVOIDED = (
    r"\bbeside\b",
    r"\bby (?:itself|themselves)\b",
    r"\bnobody\b",
    r"(?:^|[.:;] )(?:None|none) (?:is|are|was|were|of)\b",
    r"(?:^|[.:;] )(?:Those|those) of\b",
    r"\w, too(?=[.:;]|$)",
    r"\bmistakes?\b",
    r"\b(?:goes|go|going|went) on\b",
    r"\b(?:it|page|log|table|line|option|variable|connector|command|kvobs) (?:says|tells)\b",
    r"\b(?:a|the|its) begin\b",
    r"\bcan't be had\b",
)
CODE = re.compile(r"`[^`]*`")
UNREAD = ("docs/changelog.md", "docs/decisions/", "docs/check.md", "docs/admission.md")
"""History, reasons as they were given, and pages about the output of `kvobs check`, which has its own words."""
PROSE = {page: text for page, text in TEXTS.items() if not page.startswith(UNREAD)}
RULES = re.compile(r"^## English\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
"""The list itself."""


def avoided(text: str) -> list[str]:
    """Return the words of the list in a text's prose, each with what surrounds it."""
    parts = [CODE.sub("`", part) for part in paragraphs(text)]
    return [part[max(0, found.start() - 30) : found.end() + 20] for part in parts for found in _found(part)]


def _found(part: str) -> list[re.Match[str]]:
    return [found for pattern in AVOIDED for found in re.finditer(pattern, part)]


FOUND = [Mention(page, words) for page, text in PROSE.items() for words in avoided(RULES.sub("", text))]


def test_pages_have_none_of_the_words() -> None:
    assert [str(found) for found in FOUND] == []


@pytest.mark.parametrize(
    "text",
    [
        "A process beside the engine.",
        "It starts by itself.",
        "The port that nobody reaches.",
        "None of them is called.",
        "Alerts fire. Those of a rank end.",
        "It is counted, too.",
        "A mistake stops it.",
        "The engine goes on.",
        "The log says why.",
        "From the begin.",
        "It can't be had.",
    ],
)
def test_a_word_of_the_list_is_found(text: str) -> None:
    assert len(avoided(text)) == 1


def test_code_and_parts_of_words_are_not_prose() -> None:
    assert avoided("Alongside it runs `connector beside`, too few.\n\n    nobody\n") == []


def test_only_the_list_itself_is_left_out() -> None:
    assert [page for page, text in TEXTS.items() if RULES.search(text)] == ["docs/contributing.md"]
