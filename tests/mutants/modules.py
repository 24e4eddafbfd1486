"""The modules in which faults are made, and the tests that are run against them."""

from pathlib import Path, PurePosixPath

NOT_IN_AN_ENGINE = {"cli", "demo", "testing", "deviations"}
"""Packages and modules that run neither in an engine nor in the exporter: no faults are made in them."""

ELSEWHERE = {"demo", "dashboards"}
"""Folders of unit tests that find nothing in these modules."""


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
