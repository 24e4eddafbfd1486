"""The table of intended deviations: complete, proven, and the only thing that the comparison lets pass."""

import ast
import re
from pathlib import Path

import pytest

from docs.deviations import DEVIATIONS, Deviation
from kvobs.vllm_api.hooks import HOOKS
from tests.transparency.comparator import ALLOWED, FROM_HERE
from tests.transparency.record import Cause

REPOSITORY = Path(__file__).resolve().parents[2]

NOT_SEEN = {
    "empty-hooks-not-called": "a connector that records a call has no empty hook",
    "hooks-bound-at-the-first-step": "nothing replaces a hook of a recording connector",
    "block-copies-counted": "an operation is recorded as a callable",
    "all-are-reset": "no recording connector raises there",
    "bad-blocks-fail-the-load": "the lives have no bad blocks where vLLM itself ends on them",
    "open-lookups-polled": "the lives have the default options",
    "isolated-connectors-see-less": "the lives have the default options",
}
"""Deviations that cannot occur in the differential test; each has a test of its own."""


@pytest.mark.parametrize("row", DEVIATIONS, ids=lambda row: row.name)
def test_every_row_has_hooks_an_existing_test_and_full_sentences(row: Deviation) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", row.name)
    assert set() < set(row.hooks) <= set(HOOKS)
    assert all(text.endswith(".") for text in (row.differs, row.why, row.unasked))
    path, _, function = row.test.partition("::")
    tree = ast.parse((REPOSITORY / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert function.startswith("test_")


def test_the_comparison_allows_exactly_what_is_declared() -> None:
    assert sorted({*ALLOWED, *FROM_HERE.values(), *NOT_SEEN}) == sorted(row.name for row in DEVIATIONS)
    assert set(FROM_HERE) == set(Cause), "every cause of a mark has its deviation"
