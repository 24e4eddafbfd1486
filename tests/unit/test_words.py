"""The texts of the program are without the words that a reader stumbles over; what finds these words finds each."""

import re
from pathlib import Path

import pytest

from docs.pages import ROOT, pages
from docs.words import PROGRAM, RUNBOOK, UNREAD, WORDS, Text, find, program, texts_of

SENTENCES = {
    "beside": "An exporter runs beside the engine.",
    "by itself": "It starts by itself.",
    "By\nthemselves": "They start in a row. By\nthemselves they stop.",
    "nobody": "The exporter answers nobody: no certificate",
    "none is": "Of three loads none is done.",
    "those of": "The blocks are those of another engine.",
    "too": "It is logged, too.",
    "mistakes": "2 mistakes, 1 warning",
    "goes on": "The engine goes on.",
    "says": "The log says why.",
    "its begin": "From its begin to its end.",
    "can't be had": "a text that can't be had",
    "in the place of": "TCP in the place of RDMA",
    "ends the engine": "This ends the engine.",
    "of its own": "It has a thread of its own.",
    "the other way round": "or the other way round",
}


PYTHON = """'''Run one
beside another.'''

# It goes
# on.
beside = 1  # nobody
log(
    "a mistake "
    "in a text", f"{x} says"
)
mistakes = {"mistakes": 1}
"""


@pytest.mark.parametrize(("word", "text"), SENTENCES.items(), ids=str)
def test_each_word_is_found_with_its_line_and_a_better_one(word: str, text: str) -> None:
    (found,) = find([Text(ROOT / "docs/a.md", 7, text)])
    assert found.word == " ".join(word.split())
    assert found.better in WORDS.values()
    assert found.where == "docs/a.md:7"
    assert str(found) == f"docs/a.md:7: {found.word!r}; better: {found.better}"


def test_every_word_of_the_list_has_a_sentence() -> None:
    found = {each.better for text in SENTENCES.values() for each in find([Text(ROOT / "a.md", 1, text)])}
    assert found == set(WORDS.values())


@pytest.mark.parametrize(
    "text",
    [
        "It has the labels of its own host.",
        "too many of them; tomorrow; foregoing",
        "Call ``say()`` or `Finding.says`, and see\n```\nnobody says it\n```\n",
        "The output:\n\n    2 mistakes\n    it goes on\n\nIt continues.",
        "It begins, and the load begins.",
    ],
)
def test_good_sentences_and_code_are_left_alone(text: str) -> None:
    assert not list(find([Text(ROOT / "a.md", 1, text)]))


def test_strings_docstrings_and_comments_are_read_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(PYTHON)
    found = [(each.where.removeprefix(f"{path}:"), each.word) for each in find(texts_of(path))]
    assert sorted(found) == [("2", "beside"), ("4", "goes on"), ("6", "nobody"), ("8", "mistake"), ("9", "says")]


def test_all_of_the_program_is_read() -> None:
    read = program()
    assert {folder for folder in PROGRAM if any(path.is_relative_to(folder) for path in read)} == set(PROGRAM)
    assert ROOT / "kvobs/routing/scheduler.py" in read
    assert ROOT / "dashboards/connector_alerts.py" in read
    assert all(folder.is_dir() for folder in UNREAD)


@pytest.mark.parametrize("path", [RUNBOOK, *pages()], ids=lambda path: path.name)
def test_pages_have_none_of_these_words(path: Path) -> None:
    found = list(map(str, find([Text(path, 1, path.read_text(encoding="utf-8"))])))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", program(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_texts_of_the_program_have_none_of_these_words(path: Path) -> None:
    found = list(map(str, find(texts_of(path))))
    assert not found, "\n".join(found)


def test_the_name_of_a_test_has_60_characters_at_most() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    names = re.findall(r"\bdef (test_\w+)", "\n".join(texts))
    assert names
    assert not [name for name in names if len(name) > 60]
