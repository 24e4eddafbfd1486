"""A folder for the pages of a test, in shared memory: what a process keeps in its own memory is gone with it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvobs.page import files


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


def share_folder(patch: pytest.MonkeyPatch, at: Path) -> None:
    """Let the Python processes that this one starts have its folder, and not that of this user's other engines."""
    (at / "sitecustomize.py").write_text(
        f"import pathlib\nfrom kvobs.page import files\nfiles.folder = lambda: pathlib.Path({str(files.folder())!r})\n"
    )
    patch.setenv("PYTHONPATH", str(at))
