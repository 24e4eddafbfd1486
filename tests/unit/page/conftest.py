"""Each test has a folder of pages to itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs.log import forget
from tests.support.page_files import page_folder


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    forget()
    with page_folder() as made:
        yield made
