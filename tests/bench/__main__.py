"""``make bench``: what kvobs costs, against budgets; exit status 1 when one is missed by more than the noise.

A run of all parts writes its tables into ``docs/performance.md``, and draws the picture there; with ``--publish`` a run
of some parts replaces theirs.
"""

import argparse
import logging
import sys
from collections.abc import Callable

from rich.console import Console

from docs import pages
from tests.bench import (
    aggregating,
    calls,
    copying,
    endtoend,
    exporter,
    gain,
    growth,
    page,
    picture,
    reuse,
    steps,
    tracing,
    verify,
)
from tests.bench.report import Part, Verdict, merged, table


def main() -> int:
    logging.disable(logging.WARNING)
    console, progress = Console(width=120, highlight=False), Console(stderr=True, highlight=False, style="dim")
    measures: dict[str, Callable[[], Part]] = {
        "step": steps.measure,
        "yardstick": calls.measure_machine,
        "calls": calls.measure,
        "growth": lambda: growth.measure(progress.print),
        "page": page.measure,
        "reuse": reuse.measure,
        "verify": verify.measure,
        "aggregating": aggregating.measure,
        "copying": copying.measure,
        "tracing": tracing.measure,
        "endtoend": lambda: endtoend.measure(options.rounds or endtoend.ROUNDS, progress.print),
        "exporter": lambda: exporter.measure(options.rounds or exporter.ROUNDS, progress.print),
    }
    # Is about what loads gain, not about what kvobs costs, and writes a table elsewhere.
    on_request: dict[str, Callable[[], Part]] = {
        "gain": lambda: gain.measure(options.rounds or gain.ROUNDS, progress.print),
    }
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure what kvobs costs.")
    about = f"{', '.join(measures)}, which all run without any; {', '.join(on_request)}"
    parser.add_argument("parts", nargs="*", metavar="PART", help=about)
    usual = ", ".join(f"{part.ROUNDS} of {part.__name__.rpartition('.')[2]}" for part in (gain, endtoend, exporter))
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds of the parts on real engines ({usual})")
    parser.add_argument("--publish", action="store_true", help="write the tables of these parts into the page")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(measures | on_request):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    parts: list[Part] = []
    try:
        for name in options.parts or measures:
            progress.print(f"{name} ...")
            parts.append((measures | on_request)[name]())
    finally:  # a part that fails must not take the others' numbers with it
        if parts:
            console.print(table(parts))
    if is_whole(options) or options.publish:
        published = picture.PAGE.read_text(encoding="utf-8")
        others = "" if is_whole(options) else published[pages.measured(published, "bench")]
        pages.write(picture.PAGE, "bench", merged(others, parts))
        picture.draw()
        console.print("The tables are in docs/performance.md, and the picture shows them.")
    return 1 if any(line.verdict is Verdict.MISSED for part in parts for line in part.lines) else 0


def is_whole(options: argparse.Namespace) -> bool:
    """Return whether all parts run, with as many rounds as usual: such a run is published."""
    return not options.parts and options.rounds is None


if __name__ == "__main__":
    sys.exit(main())
