"""The texts that the code can write, as a test compares them with the lines that a page quotes."""

import ast
import errno
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.pages import ROOT

_VALUE = "\0"
_CONVERSION = re.compile(r"%[-+#0-9.]*[a-z]")
_SYSTEMS = {os.strerror(number) for number in errno.errorcode}
FEW_WORDS = 2
"""A value of more words than these is a message by itself."""


@cache
def messages(folder: str) -> frozenset[str]:
    """Return the texts in a folder's modules without docstrings; a null character stands for each value."""
    return frozenset(text for path in (ROOT / folder).rglob("*.py") for text in _literals(path))


def _literals(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else _VALUE for part in node.values)
            yield _CONVERSION.sub(_VALUE, "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield _CONVERSION.sub(_VALUE, node.value)


def is_written(text: str, folder: str = "kvobs") -> bool:
    """Return whether a text is a message of the code, or the beginning of one, which may end with "..."."""
    beginning = text.removesuffix("...").rstrip()
    return any(
        message.partition(_VALUE)[0].startswith(beginning) or _is_whole(message, text, folder)
        for message in messages(folder)
    )


def _is_whole(message: str, text: str, folder: str) -> bool:
    parts = message.split(_VALUE)
    if not re.search(r"[a-z]{2}", "".join(parts)) or not all(part in text for part in parts):
        return False
    found = re.fullmatch("(.*?)".join(map(re.escape, parts)), text)
    return found is not None and all(
        len(value.split()) <= FEW_WORDS or value in _SYSTEMS or is_written(value, folder) for value in found.groups()
    )
