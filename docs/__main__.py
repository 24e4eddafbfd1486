"""Write the generated tables into the pages, or with ``--check`` list the pages that differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.pages import ROOT, fill, pages, parts
from docs.tables import TABLES


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check all pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 where a page differs")
    is_check = parser.parse_args(arguments).check
    differing = {page: new for page in pages() if (new := generated(page)) != page.read_text(encoding="utf-8")}
    for page, new in differing.items():
        if not is_check:
            page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'differs from what `make lint FIX=1` writes' if is_check else 'written'}")  # noqa: T201
    return 1 if is_check and differing else 0


def generated(page: Path) -> str:
    """Return a page's text with all its tables made anew."""
    text = page.read_text(encoding="utf-8")
    for name in parts(text):
        text = fill(text, "table", name, TABLES[name]())
    return text


if __name__ == "__main__":
    sys.exit(main())
