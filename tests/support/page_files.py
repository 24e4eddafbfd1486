"""A folder for the pages of a test, in shared memory: what a process keeps in its own memory is gone with it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvobs.page import files

FOLDER = files.folder
"""Returns the folder of this user's engines."""


@contextmanager
def page_folder() -> Iterator[Path]:
    """Let all pages be in a new folder, which begins with the first page."""
    with pytest.MonkeyPatch.context() as patch:
        room = Path(tempfile.mkdtemp(prefix="kvobs-test-", dir=files.SHARED_MEMORY))
        patch.setattr(files, "folder", lambda: room / "pages")
        try:
            yield room / "pages"
        finally:
            shutil.rmtree(room)
