"""Judge many lives, one seed each, and put into numbers what happened in them."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvobs import log
from tests.transparency.comparator import Verdict, judge
from tests.transparency.life import from_seed

FAULTS_KEPT = 20
SEEDS = range(160)
"""The lives that every run of the suite looks at."""


@dataclass
class Findings:
    """What came of many lives."""

    lives: int = 0
    calls: int = 0  # that were compared
    seen: Counter[str] = field(default_factory=Counter)  # what happened in the parts that were compared
    stock: Counter[str] = field(default_factory=Counter)  # by cause: how vLLM's own class came through
    faults: list[str] = field(default_factory=list)
    faulty: int = 0

    def add(self, verdict: Verdict) -> None:
        self.lives += 1
        self.calls += verdict.compared
        self.seen.update(verdict.kvobs.seen)
        self.seen["ended by a connector's exception"] += verdict.stock.raised is not None
        if verdict.cause is not None:
            self.stock[f"{verdict.cause.value}: {verdict.stock_end}"] += 1
        elif verdict.stock_end not in ("lived", "ended by a connector"):
            self.stock[f"vLLM's scheduler, with any router: {verdict.stock_end}"] += 1
        if verdict.fault is not None:
            self.faulty += 1
            if len(self.faults) < FAULTS_KEPT:
                self.faults.append(f"seed {verdict.life.seed}, {verdict.fault}")


def sweep(seeds: Iterable[int]) -> Findings:
    """Live and compare the lives of these seeds; what they log is dropped."""
    findings = Findings()
    for verdict in _judged(seeds):
        findings.add(verdict)
    return findings


def first_faulty(seeds: Iterable[int]) -> Verdict | None:
    """Return the verdict on the first life that differs, if one does."""
    return next((verdict for verdict in _judged(seeds) if verdict.fault is not None), None)


def _judged(seeds: Iterable[int]) -> Iterator[Verdict]:
    with quiet():
        for seed in seeds:
            yield judge(from_seed(seed))


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what is logged: vLLM logs every failed load."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        log.forget()
