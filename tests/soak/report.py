"""What a soak found, as one result of each part and as tables."""

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from docs import pages
from tests.soak.ledger import Ledger
from tests.soak.memory import MIB, Sample, growth, warm


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
        self.faults += ledger.seen
        self.completed += ledger.completed
        self.lost += len(ledger.awaited) + len(ledger.running)
        self.doubled += ledger.doubled
        self.series += len(ledger.expected)

    @property
    def mistakes(self) -> list[str]:
        """Return what must not be."""
        counts = (("lost", self.lost), ("doubled", self.doubled))
        found = [*self.wrong, *(f"{n} completions {what}" for what, n in counts if n)]
        for who, samples in self.memory.items():
            size, objects = growth(samples)
            if size / MIB > self.budgets.get(who, self.budget_mib) or objects > self.budget_objects:
                found.append(f"{who}: grown by {size / MIB:.1f} MiB and {objects} objects")
        return found


def markdown(results: Iterable[Result]) -> str:
    """Return each part's counts and memory as Markdown."""
    return "\n\n".join(
        f"**{result.title}**\n\n{pages.table(['', ''], _counts(result))}\n\n{pages.table(MEMORY, [*_memory(result)])}"
        for result in results
    )


MEMORY = ["memory of", "MiB when warm", "MiB at the end", "MiB grown", "objects grown"]


def _counts(result: Result) -> list[list[str]]:
    counts: dict[str, float] = {
        "requests": result.requests,
        **{f"  ended: {how}": n for how, n in sorted(result.ends.items())},
        **{f"  {name}": n for name, n in sorted(result.faults.items())},
        "completions of loads and saves": result.completed,
        "  lost": result.lost,
        "  doubled": result.doubled,
        "series of metrics compared with the ledger": result.series,
        "seconds": result.seconds,
    }
    return [[name, f"{n:,.0f}"] for name, n in counts.items()]


def _memory(result: Result) -> Iterator[list[str]]:
    for who, samples in result.memory.items():
        (size, objects), first, last = growth(samples), warm(samples)[0], samples[-1]
        held = [f"{first.resident / MIB:,.1f}", f"{last.resident / MIB:,.1f}", f"{size / MIB:+,.1f}"]
        yield [who, *held, f"{objects:+,}" if objects else ""]
