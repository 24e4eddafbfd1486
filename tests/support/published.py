"""Rows that tests write into a file of results while others do the same; a table of the documentation shows them."""

import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_row(results: Path, title: str, row: Any, titles: Iterable[str] | None = None) -> None:
    """Write one row, in the order of these titles, and drop rows with any other; without titles in that of letters."""
    with results.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        rows = json.loads(file.read() or "{}") | {title: row}
        file.truncate(0)
        order = [each for each in titles if each in rows] if titles is not None else sorted(rows)
        file.write(json.dumps({each: rows[each] for each in order}, indent=1) + "\n")
