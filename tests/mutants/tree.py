"""The modules in which faults are made, the tests that are run against them, and copies of the tree for that."""

from __future__ import annotations

import py_compile
import shutil
import subprocess
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]

NOT_IN_AN_ENGINE = {"cli", "demo", "testing", "deviations"}
"""Packages and modules that run neither in an engine nor in the exporter: no faults are made in them."""

ELSEWHERE = {"demo", "dashboards"}
"""Folders of unit tests that find nothing in these modules."""


def copy_tree(to: Path, root: Path = ROOT) -> None:
    """Copy the files of the working tree that git does not ignore, and compile the modules."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, to / name)
    for module in (to / "kvobs").rglob("*.py"):
        # By its content: a changed module may have the size and, within a second, the time of the one before.
        py_compile.compile(str(module), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def all_modules(root: Path) -> list[str]:
    """Return the paths of all modules that run in an engine or in the exporter."""
    return _files(root, "kvobs", "*.py", NOT_IN_AN_ENGINE)


def all_tests(root: Path) -> list[str]:
    """Return all files of tests that are run."""
    return _files(root, "tests/unit", "test_*.py", ELSEWHERE)


def own_tests(module: str) -> str:
    """Return the file of a module's own tests, found from its name."""
    path = PurePosixPath(module)
    return str(PurePosixPath("tests/unit") / path.parent.relative_to("kvobs") / f"test_{path.name}")


def _files(root: Path, folder: str, pattern: str, without: set[str]) -> list[str]:
    paths = [path.relative_to(root) for path in sorted((root / folder).rglob(pattern))]
    return [path.as_posix() for path in paths if not without & set(path.with_suffix("").parts)]
