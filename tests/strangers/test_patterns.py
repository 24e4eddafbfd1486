"""Every pattern with both routers: the answers are those that the page shows, and kvobs's are never worse."""

import os
from typing import Any

import pytest

from tests.strangers.patterns import PATTERNS, PUBLISH, RESULTS, Pattern, published, row
from tests.support.published import write_row
from tests.transparency.sweep import quiet

TITLES = [pattern.what for pattern in PATTERNS]


@pytest.mark.parametrize("pattern", PATTERNS, ids=TITLES)
def test_answers_are_those_of_the_page_and_never_worse(pattern: Pattern) -> None:
    with quiet():
        found: dict[str, Any] = row(pattern)
    if os.environ.get(PUBLISH):
        write_row(RESULTS, pattern.what, found, TITLES)
    assert found["kvobs"]["right"] >= found["stock"]["right"]
    assert found["kvobs"]["ended"] == ""
    assert found == published()[pattern.what], "make test-all ONLY=strangers writes it"


def test_the_page_has_these_patterns() -> None:
    assert list(published()) == TITLES
