"""Serve hundreds of thousands of requests with every fault there is: the suite ``soak``; 1 if anything is wrong.

A run of all parts writes its tables into ``docs/reliability.md``.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from rich.console import Console

from docs import pages
from tests.soak import inprocess, isolated, lives, server
from tests.soak.report import Result, markdown

Part = Callable[[int, int, Callable[[str], None]], Result]

PARTS: dict[str, tuple[Part, int]] = {
    "inprocess": (inprocess.run, 200_000),
    "isolated": (isolated.run, 20_000),
    "lives": (lives.run, 2_000),
    "server": (server.run, 20_000),
    "exporter": (partial(server.run, has_exporter=True), 5_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Serve with faults for a long time.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; without any: all")
    usual = ", ".join(f"{n:,} {name}" for name, (_, n) in PARTS.items())
    parser.add_argument("--requests", type=int, metavar="N", help=f"how many, of each part (usually {usual})")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    logging.disable(logging.CRITICAL)  # vLLM logs every failed load
    console = Console(width=120, highlight=False)
    progress = Console(width=160, highlight=False, style="dim", stderr=True)
    results = []
    for name in options.parts or PARTS:
        part, usually = PARTS[name]
        results.append(part(options.requests or usually, options.seed, progress.print))
        console.print(markdown(results[-1:]), markup=False)
    if is_whole(options):
        pages.write(pages.FOLDER / "reliability.md", "soak", markdown(results))
        console.print("The tables are in docs/reliability.md, too.")
    mistakes = [f"{result.title}: {mistake}" for result in results for mistake in result.mistakes]
    for mistake in mistakes:
        console.print(mistake, style="bold red")
    return 1 if mistakes else 0


def is_whole(options: argparse.Namespace) -> bool:
    """Return whether all parts serve as many requests as usual: only such a run is published."""
    return not options.parts and options.requests is None


if __name__ == "__main__":
    sys.exit(main())
