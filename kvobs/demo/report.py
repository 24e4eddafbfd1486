"""What each child was asked, offered and loaded between two readings of /metrics, as a table."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.samples import Sample
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvobs.signals import (
    ADMITTED_TOKENS,
    FORGONE_TOKENS,
    LOAD_DURATION,
    LOAD_STALL,
    LOAD_TOKENS,
    LOADS,
    LOOKUPS,
    OFFERED_TOKENS,
    SAVE_STALL,
    Signal,
)

OUTCOMES = LOOKUPS.labels["outcome"]
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "in vLLM's own cache",
    "external_kv_transfer": "loaded by the children",
}
"""vLLM's own account of where prompt tokens came from."""


@dataclass(frozen=True)
class Child:
    """One child's share of what happened."""

    name: str
    lookups: Mapping[str, int]
    """By outcome."""
    offered: int
    admitted: int
    forgone: int
    loads: Mapping[str, int]
    """By outcome, over both modes."""
    loaded: int
    load_s: float
    """How long all its loads took together, each on the slowest rank."""
    waited_s: float
    """How long the engine's steps waited for its loads and saves."""

    @property
    def load_ms(self) -> float:
        """How long a load took on average; 0 without any."""
        return 1e3 * self.load_s / self.loads["ok"] if self.loads["ok"] else 0

    @property
    def asked(self) -> int:
        """How many lookups it got, repeats included."""
        return sum(self.lookups.values())


def children(names: Iterable[str], before: Iterable[Sample], after: Iterable[Sample]) -> list[Child]:
    """Return what each named child did between two readings, summed over engines; a child unheard of did nothing."""
    grown = growth(before, after)
    return [
        Child(
            name=name,
            lookups={outcome: total(grown, LOOKUPS, connector=name, outcome=outcome) for outcome in OUTCOMES},
            offered=total(grown, OFFERED_TOKENS, connector=name),
            admitted=total(grown, ADMITTED_TOKENS, connector=name),
            forgone=total(grown, FORGONE_TOKENS, connector=name),
            loads={o: total(grown, LOADS, connector=name, outcome=o) for o in LOADS.labels["outcome"]},
            loaded=total(grown, LOAD_TOKENS, connector=name),
            load_s=seconds(grown, LOAD_DURATION, connector=name),
            waited_s=seconds(grown, LOAD_STALL, connector=name) + seconds(grown, SAVE_STALL, connector=name),
        )
        for name in names
    ]


def sources(before: Iterable[Sample], after: Iterable[Sample]) -> dict[str, int]:
    """Return how many prompt tokens came from where, in words, by vLLM's own account."""
    grown = growth(before, after)
    return {
        words: sum(int(value) for (name, labels), value in grown.items()
                   if name == "vllm:prompt_tokens_by_source_total" and ("source", source) in labels)
        for source, words in SOURCES.items()
    }  # fmt: skip


Series = tuple[str, frozenset[tuple[str, str]]]


def growth(before: Iterable[Sample], after: Iterable[Sample]) -> dict[Series, float]:
    """Return by how much each series grew."""
    grown: dict[Series, float] = defaultdict(float)
    for sign, samples in ((1, after), (-1, before)):
        for sample in samples:
            grown[sample.name, frozenset(sample.labels.items())] += sign * sample.value
    return grown


def total(grown: Mapping[Series, float], signal: Signal, **labels: str) -> int:
    """Sum the series of a counter that carry these labels, whatever else they carry."""
    return int(_sum(grown, signal.name, labels))


def seconds(grown: Mapping[Series, float], signal: Signal, **labels: str) -> float:
    """Sum the observations of a histogram's series that carry these labels."""
    return _sum(grown, f"{signal.name}_sum", labels)


def _sum(grown: Mapping[Series, float], wanted_name: str, labels: Mapping[str, str]) -> float:
    return sum(value for (name, has), value in grown.items() if name == wanted_name and labels.items() <= set(has))


# --- for people


def table(rows: Sequence[Child]) -> Table:
    """Lay the children out, one a row; a column for an outcome that nobody had is left out."""
    outcomes = [outcome for outcome in OUTCOMES
                if outcome in ("hit", "miss") or any(row.lookups[outcome] for row in rows)]  # fmt: skip
    failed = any(row.loads[outcome] for row in rows for outcome in ("failed", "aborted"))
    columns = ["child", "asked", *(OUTCOME_TITLES[outcome] for outcome in outcomes), "offered", "loaded", "loads"]
    columns += [*(["failed"] if failed else []), "forgone"]
    out = Table(title="What each child was asked, offered and loaded", title_justify="left", title_style="bold",
                box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for column in columns:
        unit = "\ntokens" if column in ("offered", "loaded", "forgone") else ""
        out.add_column(column + unit, justify="left" if column == "child" else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        cells = [row.asked, *(row.lookups[outcome] for outcome in outcomes), row.offered, row.loaded, row.loads["ok"]]
        cells += [*([row.loads["failed"] + row.loads["aborted"]] if failed else []), row.forgone]
        out.add_row(row.name, *(f"{cell:,}" for cell in cells))
    return out


OUTCOME_TITLES = {"hit": "hits", "miss": "misses", "pending": "not\nyet", "timeout": "timed\nout"}

LEGEND = (
    "asked    lookups, repeated while a request waits\n"
    "offered  what the child could have loaded\n"
    "forgone  what it offered beyond the child that loaded"
)


def time_line(rows: Iterable[Child]) -> str:
    """Say in one line how long each child's loads took, and what the engine's steps spent in its loads and saves."""
    parts = []
    for row in rows:
        loads = f"{row.load_ms:,.0f} ms a load, " if row.loads["ok"] else ""
        parts.append(f"{row.name} {loads}{1e3 * row.waited_s:,.0f} ms waited for by steps")
    return f"Time: {'; '.join(parts)}."


def source_line(tokens: Mapping[str, int]) -> str:
    """Say in one line where the prompt tokens came from."""
    whole = sum(tokens.values())
    parts = ", ".join(f"{round(100 * count / whole) if whole else 0} % {words}" for words, count in tokens.items())
    return f"Of {whole:,} prompt tokens: {parts}."
