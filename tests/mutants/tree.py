"""A copy of the project's tree in a temporary folder, in which a module may be changed."""

from __future__ import annotations

import py_compile
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
