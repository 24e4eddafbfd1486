"""Count the Python calls of a step, against bars: ``python -m tests.bench.footprint``; ``--calls`` lists them in order.

vLLM's scheduler, one worker and the aggregator run in one process around two connectors that do nothing, with default
options. Each Python function that ``sys.setprofile`` sees entered is a call; a generator is entered for each item.
Counted is the router's code: for kvobs its files and what it generates, for stock vLLM's code for connectors. The
connectors, constructors of dataclasses and named tuples, and vLLM's code beneath kvobs are not; the last has a column.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import vllm

import kvobs
from kvobs.page import files
from kvobs.testing import BLOCK, Rig, Script


class Footprint(NamedTuple):
    """The size of a path: its calls, their files, and its hops from one file to another; the first call is one."""

    calls: int
    files: int
    hops: int


BARS = {
    "decode step": Footprint(calls=44, files=15, hops=30),
    "load's first step": Footprint(calls=156, files=33, hops=116),
    # Hooks are bound again at the first step, and the start computes where its numbers go: 150 calls; what follows
    # evicted blocks, misses and a pair's first requests is built: 110.
    "build": Footprint(calls=1240, files=69, hops=590),
}
"""The most that kvobs's paths may be, as Python 3.11 counts, without the calls of the compiled probe.

The aims are 60/12/36, 140/18/90 and 1000/40/480. With the probe in Python the step has 44 calls more, the load 40.
"""

KVOBS, VLLM = (str(Path(str(package.__file__)).parent) for package in (kvobs, vllm))
# How the file names of each router's code begin.
PREFIXES = {"kvobs": (f"{KVOBS}/", "<kvobs"), "stock": (f"{VLLM}/distributed/kv_transfer/",)}
NO_ROUTER = (f"{KVOBS}/testing/", f"{KVOBS}/demo/")


class Call(NamedTuple):
    """A function that was entered, and in how many others' calls."""

    file: str
    line: int
    name: str
    depth: int

    def is_of(self, router: str) -> bool:
        return self.file.startswith(PREFIXES[router]) and not self.file.startswith(NO_ROUTER)

    def __str__(self) -> str:
        file = self.file.removeprefix(VLLM.removesuffix("vllm")).removeprefix(KVOBS.removesuffix("kvobs"))
        return f"{'  ' * self.depth}{self.name}  {file}:{self.line}"


def calls_of(act: Callable[[], object]) -> list[Call]:
    """Return the calls of both routers' code, in order."""
    found: list[Call] = []
    depth = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal depth
        code = frame.f_code
        call = Call(code.co_filename, code.co_firstlineno, code.co_qualname, depth)
        if event in ("call", "return") and any(map(call.is_of, PREFIXES)):
            depth += 1 if event == "call" else -1
            found.extend([call] * (event == "call"))

    gc.disable()  # kvobs notes each pause
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


def footprint(files: list[str]) -> Footprint:
    return Footprint(len(files), len(set(files)), len(list(groupby(files))))


def build(router: str) -> Rig:
    return Rig(router, Script("loader", offers={"loads": (4 * BLOCK, True)}), Script("other"))


def decode_step(router: str) -> list[Call]:
    """Return the calls of a step in which a request gets a token, and connectors have nothing to do."""
    rig = build(router)
    rig.add("decodes", max_tokens=50)
    rig.run(6)
    return calls_of(rig.step)


def first_step_of_load(router: str) -> list[Call]:
    """Return the calls of the step that looks a request up, gives it blocks, and lets a worker begin to load them."""
    rig = build(router)
    rig.add("computed")
    rig.run(5)
    rig.add("loads")
    return calls_of(rig.step)


PATHS: dict[str, Callable[[str], list[Call]]] = {
    "decode step": decode_step,
    "load's first step": first_step_of_load,
    "build": lambda router: calls_of(lambda: build(router)),
}


def path_of(name: str, router: str) -> list[Call]:
    build(router)  # imports what comes late
    with (  # kvobs looks through this user's pages in memory, and through the processes that started this one
        tempfile.TemporaryDirectory(dir=files.SHARED_MEMORY) as folder,
        mock.patch.object(files, "SHARED_MEMORY", Path(folder)),
        mock.patch("os.getppid", return_value=1),
    ):
        # The shortest of five: what is due by a clock may fall into one.
        return min((PATHS[name](router) for _ in range(5)), key=len)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or the calls; return 1 if a path of kvobs is over its bar."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.footprint", description="Count the calls of a step.")
    parser.add_argument("--calls", choices=PATHS, help="list this path's calls, each below the one that made it")
    parser.add_argument("--router", choices=PREFIXES, default="kvobs", help="whose calls are listed (kvobs)")
    options = parser.parse_args(arguments)
    if options.calls:
        print(*path_of(options.calls, options.router), sep="\n")
        return 0
    over = False
    print(f"{'':20}{'router':8}{'calls':>7}{'files':>7}{'hops':>7}{'in vLLM':>9}   at most")
    for name, bar in BARS.items():
        for router in PREFIXES:
            calls = path_of(name, router)
            found = footprint([call.file for call in calls if call.is_of(router)])
            line = f"{name:20}{router:8}{found.calls:7,}{found.files:7}{found.hops:7}"
            if router == "kvobs":
                missed = any(value > most for value, most in zip(found, bar, strict=True))
                over = over or missed
                line += f"{len(calls) - found.calls:9}   {bar.calls:,} / {bar.files} / {bar.hops}{'  OVER' * missed}"
            print(line)
    return int(over)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
