"""List what `kvobs check` finds in docs/findings.md, and report on many files by the same kinds.

``python -m docs.kinds FOLDER`` checks each file below a folder, and prints by reason how many are fine, have findings,
or are not known here. Exit status 1: a file ended the check.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from unittest.mock import patch

from docs.pages import table
from kvobs.export import listening
from kvobs.schema.findings import Kind, Level
from kvobs.schema.kinds import KINDS, MODEL

_LISTS = {Level.MISTAKE: "errors", Level.WARNING: "warnings", Level.UNKNOWN: "unknown"}


def findings(given: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the level, kind, text and fix of each finding in a text or a file."""
    from typer.testing import CliRunner

    from kvobs.cli import app

    result = CliRunner().invoke(app, ["check", given, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        yield "ended", "", repr(result.exception), ""
    for answer in map(json.loads, result.stdout.splitlines()):
        for level, name in _LISTS.items():
            for each in answer[name]:
                yield level, each["kind"], f"{each['path']}: {each['found']}", each["fix"]


def of_example(given: str) -> list[tuple[str, str, str, str]]:
    """Return what is found in an example of a kind, beside the model's file that some need."""
    with TemporaryDirectory() as folder, chdir(folder):
        model = Path("model/config.json")
        model.parent.mkdir()
        model.write_text(json.dumps(MODEL), encoding="utf-8")
        return list(findings(given))


def kinds_table() -> str:
    """Return the kinds as a table, with what is reported of the wrong example."""
    rows = [[f"`{kind.name}`", kind.looks_at, kind.level, *map(_short, _example(kind))] for kind in KINDS.values()]
    return table(["kind", "looks at", "level", "reports, for example", "fix"], rows)


def _example(kind: Kind) -> tuple[str, str]:
    """Return what is reported of the wrong example of a kind, and its fix; of one without an example their patterns."""
    with patch.object(listening, "listen"):  # the page does not depend on the ports of this machine
        found = (each[2:] for each in of_example(kind.wrong) if each[1] == kind.name)
        return next(found, (kind.says, kind.fix))


def _short(text: str) -> str:
    """Return a text as a cell, with its first words where it is long."""
    return shorten(text, 150, placeholder=" ...").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Check each file below the folders, and print the reasons; return the exit status."""
    states, reasons, ended = Counter[str](), Counter[tuple[str, str]](), list[str]()
    for path in (path for folder in arguments for path in sorted(Path(folder).rglob("*")) if path.is_file()):
        found = list(findings(str(path)))
        levels = {level for level, *_ in found}
        states[next((level for level in ("ended", *_LISTS) if level in levels), "fine")] += 1
        reasons.update({(level, kind) for level, kind, *_ in found})
        ended += [f"{path}: {text}" for level, _, text, _ in found if level == "ended"]
    lines = [f"{number:6}  {state}" for state, number in states.most_common()]
    lines += [f"{number:6}  {level}: {kind}" for (level, kind), number in reasons.most_common()]
    print("\n".join([*lines, *ended]))  # noqa: T201 it is a report
    return bool(ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
