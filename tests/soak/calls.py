"""Call the compiled probe at random for an hour, in threads, in forks, in processes that are killed: nothing leaks.

python -m tests.soak.calls --minutes 60
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from kvobs import faults
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.page.reader import pages
from kvobs.probe.layer_calls import ARGUMENTS, LayerCall, LayerCalls
from kvobs.probe.native import choice
from kvobs.probe.recorder import Recorder
from kvobs.schema.signals import CALL_DURATION, SERIES, Scope, word
from tests.engine.serving import eventually
from tests.soak.memory import Sample, growth, sample
from tests.support.numbers import numbers
from tests.support.watched import NAMES, begin, config

HOOKS = ("start_load_kv", "wait_for_save", "get_finished")
THREADS, A_ROUND, AT_MOST = 4, 20_000, 1 << 20
"""At most so many bytes and, of a hundred times fewer, objects may be more at the end."""


class Calls:
    """Makes random calls: they return, raise, are ended, or call again."""

    def __init__(self, engine: str, rank: int) -> None:
        self.recorder = Recorder(len(NAMES), 100_000, NAMES, page=begin(engine, rank, contained=(0, 1)))
        targets = [LayerCall(i, self.act) for i in range(len(NAMES))]
        self.made: list[Callable[..., Any]] = [LayerCalls(hook, targets, self.recorder).fan_out for hook in ARGUMENTS]
        self.made += [self.recorder.timed(index, hook, self.act) for hook in HOOKS for index in range(len(NAMES))]
        self.acted = [0] * THREADS
        self.local = threading.local()

    def act(self, *args: Any, **kwargs: Any) -> Any:
        self.acted[self.local.number] += 1
        way = self.local.random.random()
        if way < 0.01:
            raise OSError if way < 0.008 else KeyboardInterrupt
        if way < 0.02:
            with suppress(OSError, KeyboardInterrupt):
                self.made[-1]("inner", key=args)
        return kwargs

    def run(self, number: int, seed: int, calls: int) -> None:
        self.local.number, self.local.random = number, random.Random(seed)
        for _ in range(calls):
            with suppress(OSError, KeyboardInterrupt):
                self.local.random.choice(self.made)("layer")

    @property
    def counted(self) -> int:
        """How many calls are counted in the page."""
        counts = numbers(self.recorder).counts
        slots = (word(index, series.first + i) for index in range(len(NAMES)) for series, i in _CALLS)
        return sum(counts.get(slot, 0) for slot in slots)

    def in_threads(self, seed: int, calls: int = A_ROUND) -> None:
        threads = [threading.Thread(target=self.run, args=(n, seed * THREADS + n, calls)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


_CALLS = [
    (series, i)
    for series in SERIES[Scope.CONNECTOR]
    if series.signal is CALL_DURATION
    for i in range(CALL_DURATION.sum_offset)
]


def killed(seed: int) -> list[str]:
    """Fork a process that makes random calls in threads, kill it, and return the torn records of its page."""
    engine, begun = f"soak-{uuid4()}", time.perf_counter_ns()
    if not (pid := os.fork()):
        calls = Calls(engine, 0)
        if not os.fork():  # as connectors' own helpers are; it has the page, too
            time.sleep(0.05)
            os._exit(0)
        calls.in_threads(seed, sys.maxsize)
    of_engine = partial(pages, Identity.of(config(engine)).server)
    assert eventually(lambda: any(page.records() for _, page in of_engine())), "it calls nothing"
    time.sleep(random.Random(seed).random())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ((name, page),) = of_engine()
    now = time.perf_counter_ns()
    (files.folder() / name).unlink()
    ends = ((record, record.begin_ns + record.spent_ns) for record in page.records())
    torn = [record for record, end in ends if not begun < record.begin_ns <= end < now]
    return [f"a page has {torn[:3]} of {len(page.records()):,}"] if torn else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.calls", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    logging.disable(logging.CRITICAL)  # of slow calls: the threads wait for each other
    until = time.monotonic() + parser.parse_args().minutes * 60
    calls, wrong, samples, rounds = Calls(f"soak-{uuid4()}", 1), list[str](), list[Sample](), 0
    while time.monotonic() < until and not wrong:
        calls.in_threads(rounds)
        wrong += killed(rounds)
        rounds += 1
        samples.append(sample(sum(calls.acted)))
    if calls.counted != sum(calls.acted):
        wrong.append(f"{calls.counted:,} calls were counted of {sum(calls.acted):,}")
    if lost := faults.take():
        wrong.append(f"internal errors: {lost}")
    size, objects = growth(samples)
    if size > AT_MOST or objects > AT_MOST // 100:
        wrong.append(f"{size:,} bytes and {objects:,} objects more at the end")
    print(f"{choice()}: {sum(calls.acted):,} calls, {rounds:,} processes killed, {size:,} bytes more", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
