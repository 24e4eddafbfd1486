"""Compute lookups, offers and loads of each connector between two readings of /metrics, and render them as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from prometheus_client.samples import Sample
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvobs.schema import signals
from kvobs.schema.signals import no_estimate

OUTCOMES = signals.LOOKUPS.labels["outcome"]
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "in vLLM's own cache",
    "external_kv_transfer": "loaded by the connectors",
}
"""vLLM's own labels of the sources of prompt tokens."""


@dataclass(frozen=True)
class ConnectorTotals:
    """One connector's numbers: lookups and loads by outcome, loads over both modes."""

    name: str
    lookups: Mapping[str, int]
    offered: int
    lost: int
    """Tokens beyond the offer of the connector that loaded."""
    loads: Mapping[str, int]
    loaded: int
    load_s: float
    """Total time of its loads, each on the slowest rank."""
    load_stall_s: float
    """Time the engine's steps waited for its loads, and for its saves."""
    save_stall_s: float
    saved_s: float = 0
    """Estimated time of computing what it loaded, and the time that requests waited, of loads with an estimate."""
    waited_s: float = 0
    estimated: int = 0

    @property
    def load_ms(self) -> float:
        return 1e3 * self.load_s / self.loads["ok"] if self.loads["ok"] else 0

    @property
    def asked(self) -> int:
        """Return the number of requests that it has answered, with a hit or without."""
        return self.lookups["hit"] + self.lookups["miss"]


def totals_of(name: str, before: Sequence[Sample], after: Sequence[Sample]) -> ConnectorTotals:
    """Return a connector's numbers between two readings, summed over engines; zeros for one without series."""

    def count(signal: signals.Signal, **labels: str) -> int:
        return int(_growth(before, after, signal.name, connector=name, **labels))

    def seconds(signal: signals.Signal) -> float:
        return _growth(before, after, f"{signal.name}_sum", connector=name)

    return ConnectorTotals(
        name=name,
        lookups={outcome: count(signals.LOOKUPS, outcome=outcome) for outcome in OUTCOMES},
        offered=count(signals.OFFERED_TOKENS),
        lost=count(signals.UNUSED_HIT_TOKENS, reason="other_chosen"),
        loads={outcome: count(signals.LOADS, outcome=outcome) for outcome in signals.LOADS.labels["outcome"]},
        loaded=count(signals.LOAD_TOKENS),
        load_s=seconds(signals.LOAD_DURATION),
        load_stall_s=seconds(signals.LOAD_STALL),
        save_stall_s=seconds(signals.SAVE_STALL),
        saved_s=_growth(before, after, signals.PREFILL_SAVED.name, connector=name),
        waited_s=_growth(before, after, signals.LOAD_WAITED.name, connector=name),
        estimated=count(signals.ESTIMATED_LOADS),
    )


def sources(before: Sequence[Sample], after: Sequence[Sample]) -> dict[str, int]:
    """Return source -> number of prompt tokens, by vLLM's own metrics."""
    return {words: int(_growth(before, after, PROMPT_TOKENS, source=source)) for source, words in SOURCES.items()}


def _growth(before: Sequence[Sample], after: Sequence[Sample], name: str, **labels: str) -> float:
    """Return by how much the samples with this name and these labels, and any others, grew between two readings."""
    wanted = labels.items()
    old, new = (sum(s.value for s in part if s.name == name and wanted <= s.labels.items()) for part in (before, after))
    return new - old


def table(rows: Sequence[ConnectorTotals]) -> Table:
    """Return a table with one connector per row; columns of outcomes without any count are omitted."""
    outcomes = [outcome for outcome in OUTCOMES
                if outcome in ("hit", "miss") or any(row.lookups[outcome] for row in rows)]  # fmt: skip
    failed = any(row.loads[outcome] for row in rows for outcome in ("failed", "aborted"))
    columns = ["", "lookups", *(OUTCOME_TITLES[outcome] for outcome in outcomes), "offered", "loaded", "loads",
               *(["failed"] if failed else []), LOST]  # fmt: skip
    out = Table(title="Lookups, offers and loads by connector", title_justify="left", title_style="bold",
                box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for column in columns:
        unit = "\ntokens" if column in ("offered", "loaded") else ""
        out.add_column(column + unit, justify="left" if column == "" else "right", no_wrap=True, vertical="bottom")
    for row in rows:
        cells = [row.asked, *(row.lookups[outcome] for outcome in outcomes), row.offered, row.loaded, row.loads["ok"],
                 *([row.loads["failed"] + row.loads["aborted"]] if failed else []), row.lost]  # fmt: skip
        out.add_row(row.name, *(f"{cell:,}" for cell in cells))
    return out


LOST = "lost to a\nshorter\noffer"
OUTCOME_TITLES = dict(zip(OUTCOMES, ("hits", "misses", "not\nyet", "timed\nout", "not\nread"), strict=True))

LEGEND = (
    "lookups  requests that the connector has answered\n"
    "offered  what the connector could have loaded\n"
    "lost     to a shorter offer: what it offered beyond the offer of the connector that loaded"
)


def time_line(rows: Iterable[ConnectorTotals]) -> str:
    """Return a line with each connector's mean load duration, and the time that steps waited for it."""
    parts = []
    for row in rows:
        loads = f"{row.load_ms:,.0f} ms per load, " if row.loads["ok"] else ""
        stalls = f"{1e3 * row.load_stall_s:,.0f} ms for its loads and {1e3 * row.save_stall_s:,.0f} ms for its saves"
        parts.append(f"{row.name} {loads}model steps waited {stalls}")
    return f"Time: {'; '.join(parts)}."


def gain_line(rows: Iterable[ConnectorTotals], prefills: int) -> str:
    """Return a line with the time that each connector's loads saved and took; ``prefills`` could be learned from."""
    parts = []
    for row in rows:
        if row.estimated:
            of = f"{row.estimated:,} of {row.loads['ok'] + row.loads['failed']:,} loads have an estimate"
            parts.append(f"{row.name} saved {row.saved_s:,.2f} s, requests waited {row.waited_s:,.2f} s ({of})")
        elif row.loads["ok"]:
            parts.append(f"{row.name} {no_estimate(prefills)}")
    return f"Gain: {'; '.join(parts)}." if parts else ""


def prefills(samples: Sequence[Sample]) -> int:
    """Return how many prefills the estimate of computing has learned from."""
    return int(_growth((), samples, signals.ESTIMATE_PREFILLS.name))


def source_line(tokens: Mapping[str, int]) -> str:
    """Return a line with the share of each source; they add up to 100 %."""
    whole = sum(tokens.values())
    ends = [round(100 * end / max(1, whole)) for end in accumulate(tokens.values(), initial=0)]
    parts = ", ".join(f"{end - begin} % {words}" for words, (begin, end) in zip(tokens, pairwise(ends), strict=True))
    return f"Of {whole:,} prompt tokens: {parts}."


def evidence(shown_by: Iterable[signals.Signal], samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the lines of /metrics that these have, with connector and own labels; a histogram as its mean."""
    sums: dict[tuple[str, str], float] = {}
    for sample in samples:
        for signal in shown_by:
            labels = ", ".join(f'{name}="{sample.labels[name]}"' for name in ("connector", *signal.labels)
                               if name in sample.labels)  # fmt: skip
            if signal.kind is not signals.Kind.HISTOGRAM and sample.name == signal.name and sample.value:
                yield f"{signal.name}{{{labels}}} {sample.value:g}"
            elif sample.name in (f"{signal.name}_sum", f"{signal.name}_count"):
                sums[sample.name, labels] = sums.get((sample.name, labels), 0) + sample.value
    for (name, labels), count in sums.items():
        if name.endswith("_count") and count:
            total = sums[f"{name.removesuffix('_count')}_sum", labels]
            yield f"{name.removesuffix('_count')}{{{labels}}} {total / count:.3g} s on average, {count:g} times"
