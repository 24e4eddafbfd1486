"""The example of ``docs/testing.md``: a connector and its tests, as files that run."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from docs.pages import FOLDER

PAGE = (FOLDER / "testing.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
TESTS = re.findall(r"^def (test_\w+)\(\):", FILES["test_my_connector"], re.MULTILINE)


@contextmanager
def imported(folder: Path) -> Iterator[ModuleType]:
    """Write the files to a folder and import their tests; at the end neither is importable any more."""
    for module, text in FILES.items():
        (folder / f"{module}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield import_module("test_my_connector")
    finally:
        sys.path.remove(str(folder))
        for module in FILES:
            sys.modules.pop(module, None)
