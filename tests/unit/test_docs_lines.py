"""Each line of a log that a page quotes is one that the code writes, as each text of a command's output is."""

import re

import pytest

from tests.support.messages import is_written
from tests.support.pages import ALL_TEXTS, Mention, paragraphs

COMMANDS = {"cog", "curl", "docker", "helm", "jq", "kubectl", "kvobs", "make", "pip", "python", "sum"}
LEAST_WORDS = 3  # fewer are a name


def quoted(text: str) -> list[str]:
    """Return the lines that a page quotes: in a sentence, and in a block that follows a sentence about the log."""
    spans = [span for part in paragraphs(text) for span in re.findall(r"`([a-z][a-z']* [^`]*)`", part)]
    lines = [span for span in spans if len(span.split()) >= LEAST_WORDS and span.split()[0] not in COMMANDS]
    blocks = re.findall(r"\blog\b[^.`]*:\n\n((?: {4}.*\n)+)", text)
    return [*lines, *(" ".join(block.split()) for block in blocks)]


QUOTED = [Mention(page, line) for page, text in ALL_TEXTS.items() for line in quoted(text)]


def test_lines_are_found() -> None:
    assert {line.page for line in QUOTED} >= {"docs/exporter.md", "docs/on-call.md"}
    assert any(len(line.what.split()) > 20 for line in QUOTED), "the block in docs/exporter.md"


@pytest.mark.parametrize("line", QUOTED, ids=str)
def test_a_quoted_line_is_written_by_the_code(line: Mention) -> None:
    assert is_written(line.what)


@pytest.mark.parametrize(
    "line",
    [
        "kvobs's exporter ended",
        "kvobs's exporter ended (killed by signal 9); it is started again in 1 s, and no count is lost",
        "kvobs's exporter (pid 7) ended by itself. It is started again in 1 s, and no count is lost",
    ],
)
def test_a_line_that_the_code_does_not_write_is_found(line: str) -> None:
    assert not is_written(line)
