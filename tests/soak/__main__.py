"""``make soak``: hundreds of thousands of requests with every fault there is; exit status 1 when anything is wrong.

A run of all parts writes its tables into ``docs/reliability.md``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from rich.console import Console

from docs import pages
from tests.soak.report import Result, markdown, tables

Part = Callable[[int, int, Callable[[str], None]], Result]


def in_process(requests: int, seed: int, report: Callable[[str], None]) -> Result:
    from tests.soak import inprocess

    return inprocess.run(requests, seed, report)


def best_effort(requests: int, seed: int, report: Callable[[str], None]) -> Result:
    from tests.soak import isolated

    return isolated.run(requests, seed, report)


def on_a_server(requests: int, seed: int, report: Callable[[str], None]) -> Result:
    from tests.soak import server

    return server.run(requests, seed, report)


def with_exporter(requests: int, seed: int, report: Callable[[str], None]) -> Result:
    from tests.soak import server

    return server.run(requests, seed, report, has_exporter=True)


PARTS: dict[str, tuple[Part, int]] = {
    "inprocess": (in_process, 200_000),
    "isolated": (best_effort, 20_000),
    "server": (on_a_server, 20_000),
    "exporter": (with_exporter, 5_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Serve with faults for a long time.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; without any: all")
    usual = ", ".join(f"{n:,} {name}" for name, (_, n) in PARTS.items())
    parser.add_argument("--requests", type=int, metavar="N", help=f"how many, of each part (usually {usual})")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random (%(default)s)")
    parser.add_argument("--plot", type=Path, default="build/soak.png", help="where the picture goes (%(default)s)")
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
        for table in tables(results[-1:]):
            console.print(table)

    from tests.soak.plot import draw

    draw(results, options.plot)
    console.print(f"Memory as a picture: {options.plot}")
    if is_whole(options):
        pages.write(pages.FOLDER / "reliability.md", "run", "soak", markdown(results))
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
