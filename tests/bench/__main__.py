"""``make bench``: what kvobs costs, against budgets; exit status 1 when one is missed by more than the noise."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tests.bench import calls, endtoend, payload, steps, yardstick
from tests.bench.plot import draw
from tests.bench.report import Part, table


def main() -> int:
    logging.disable(logging.WARNING)
    console, progress = Console(width=120, highlight=False), Console(stderr=True, highlight=False, style="dim")
    measures: dict[str, Callable[[], Part]] = {
        "yardstick": yardstick.measure,
        "calls": calls.measure,
        "steps": steps.measure,
        "payload": payload.measure,
        "endtoend": lambda: endtoend.measure(options.rounds, progress.print),
    }
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measure what kvobs costs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(measures)}; without any: all")
    parser.add_argument("--plot", type=Path, default="build/bench.png", help="where the picture goes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=endtoend.ROUNDS, help="rounds of endtoend (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(measures):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")

    parts: list[Part] = []
    try:
        for name in options.parts or measures:
            progress.print(f"{name} ...")
            parts.append(measures[name]())
    finally:  # a part that fails must not take the others' numbers with it
        if parts:
            console.print(table(parts))
    draw(parts, options.plot)
    console.print(f"The same as a picture, with every round: {options.plot}")
    return 1 if any(line.missed for part in parts for line in part.lines) else 0


if __name__ == "__main__":
    sys.exit(main())
