"""What a soak found, as one result of each part and as tables."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from docs import pages
from tests.soak.memory import MIB, Sample, growth, warm

if TYPE_CHECKING:
    from tests.soak.ledger import Ledger


class Growth(NamedTuple):
    """What one process, or one life in it, held when it was warm and at the end."""

    who: str
    first_mib: float
    last_mib: float
    mib: float
    objects: int


@dataclass
class Result:
    """What one part of the soak found."""

    title: str
    budget_mib: float  # that each process may grow once it is warm
    budgets: dict[str, float] = field(default_factory=dict)  # of single processes, where they differ
    budget_objects: int = 500
    requests: int = 0
    seconds: float = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    lost: int = 0
    doubled: int = 0
    series: int = 0  # of the metrics that were compared
    wrong: list[str] = field(default_factory=list)  # what differs
    memory: dict[str, list[Sample]] = field(default_factory=dict)
    grown_types: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Take the time of a part in this process, whose memory is looked at inside the ``with`` block."""
        begin = time.monotonic()
        gc.collect()
        gc.freeze()  # what is imported already is neither counted nor looked through again and again
        try:
            yield
        finally:
            gc.unfreeze()
        self.seconds = time.monotonic() - begin

    def take(self, ledger: Ledger) -> None:
        """Add the books of one life that is over."""
        self.requests += sum(ledger.ends.values())
        self.ends += ledger.ends
        self.faults += ledger.faults
        self.completed += ledger.completed
        self.lost += ledger.lost + len(ledger.running)
        self.doubled += ledger.doubled
        self.series += len(ledger.expected)

    @property
    def growths(self) -> Iterator[Growth]:
        for who, samples in self.memory.items():
            size, objects = growth(samples)
            first = warm(samples)[0]
            yield Growth(who, first.resident / MIB, samples[-1].resident / MIB, size / MIB, objects)

    @property
    def mistakes(self) -> list[str]:
        """Return what must not be."""
        counts = (("lost", self.lost), ("doubled", self.doubled))
        found = [*self.wrong, *(f"{n} completions {what}" for what, n in counts if n)]
        for grown in self.growths:
            if grown.mib > self.budgets.get(grown.who, self.budget_mib) or grown.objects > self.budget_objects:
                types = ", ".join(f"{n} {name}" for name, n in self.grown_types.get(grown.who, ()))
                found.append(f"{grown.who}: grown by {grown.mib:.1f} MiB and {grown.objects} objects: {types}")
        return found


def markdown(results: Iterable[Result]) -> str:
    """Return each part's counts and memory as Markdown."""
    found = []
    for result in results:
        counts = pages.table(["", ""], [list(row) for group in _counts(result) for row in group])
        found.append(f"**{result.title}**\n\n{counts}\n\n{pages.table(list(MEMORY), _memory(result))}")
    return "\n\n".join(found)


MEMORY = ("memory of", "MiB when warm", "MiB at the end", "MiB grown", "objects grown")


def _counts(result: Result) -> Iterator[list[tuple[str, str]]]:
    """Yield what was counted, in groups: requests, faults, completions."""
    ends = {f"  ended: {how}": n for how, n in sorted(result.ends.items())}
    yield [(name, f"{n:,}") for name, n in {"requests": result.requests, **ends}.items()]
    yield [(f"  {name}", f"{n:,}") for name, n in sorted(result.faults.items())]
    yield [
        ("completions of loads and saves", f"{result.completed:,}"),
        ("  lost", f"{result.lost:,}"),
        ("  doubled", f"{result.doubled:,}"),
        ("series of metrics compared with the ledger", f"{result.series:,}"),
        ("seconds", f"{result.seconds:,.0f}"),
    ]


def _memory(result: Result) -> list[list[str]]:
    return [
        [who, f"{first:,.1f}", f"{last:,.1f}", f"{mib:+,.1f}", f"{objects:+,}" if objects else ""]
        for who, first, last, mib, objects in result.growths
    ]
