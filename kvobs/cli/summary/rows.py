"""The numbers of each connector in a run, from the metrics before and after it; `--json` has the same fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.filesize import decimal

from kvobs.cli.scrapes import end_of
from kvobs.export.numbers import PROMPT_TOKENS, Numbers, Scrape, Series, change, has_restarted
from kvobs.export.texts import NONE, duration, percent
from kvobs.schema import signals
from kvobs.vllm_api.hooks import SCHEDULER_HOOKS

COMPUTED, LOCAL, EXTERNAL = "local_compute", "local_cache_hit", "external_kv_transfer"
"""vLLM's own labels of the sources of prompt tokens."""
_START = signals.START_TIME.name
LATER_S = 1.0
"""Two times of an engine's start that differ by more are of two engines."""


@dataclass(frozen=True)
class ConnectorSums:
    """One connector's numbers in a run, summed over engines and modes. None: no data."""

    connector: str
    lookups: int  # requests that it has answered, or that timed out
    hits: int
    hit_share: float | None
    pending: int
    timeouts: int
    not_read: int
    offered_tokens: int
    lost_tokens: int  # beyond the offer of the connector that was chosen
    loads: int  # that ended well
    failed_loads: int
    aborted_loads: int
    exceptions: int
    loaded_tokens: int
    loaded_bytes: int  # over all ranks
    bytes_per_s: float | None  # while a load runs
    load_p50_s: float | None
    load_p99_s: float | None
    load_mean_s: float | None
    load_stall_s: float  # summed over ranks, as that of saves
    save_stall_s: float
    estimated_loads: int
    saved_s: float | None  # of the loads with an estimate, as what follows
    waited_s: float | None
    scheduler_s: float
    missed_tokens: Mapping[str, int] = field(default_factory=dict)  # asked for and not offered, by reason
    corrupt_blocks: int = 0  # verified, over all ranks


class Measure(NamedTuple):
    """A number of each connector: its field, its title, how it is written, and what it means.

    One that is not essential is left out where no connector has more than 0.
    """

    field: str
    title: str
    show: Callable[[float], str]
    meaning: str
    is_essential: bool = False


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _bytes(number: float) -> str:
    return decimal(round(number)) if number else "0"


def _speed(number: float) -> str:
    return f"{_bytes(number)}/s"


MEASURES = (
    Measure("lookups", "lookups", _count, "requests that the connector answered or that timed out, each once", True),
    Measure("hits", "hits", _count, "lookups for which it had tokens"),
    Measure("hit_share", "hit share", percent, "hits divided by lookups", True),
    Measure("pending", "not yet", _count, "requests that it answered with 'not yet' at least once"),
    Measure("timeouts", "timed out", _count, "lookups that the option `lookup_timeout_ms` ended"),
    Measure("not_read", "not read", _count, "requests whose answer vLLM ignores, as for `prompt_logprobs`"),
    Measure("offered_tokens", "tokens offered", _count, "tokens that it could have loaded, once per request", True),
    Measure("lost_tokens", "  lost to a shorter offer", _count, "offered tokens beyond the chosen connector's offer"),
    Measure("loaded_tokens", "tokens loaded", _count, "tokens of successful loads", True),
    Measure("loaded_bytes", "bytes loaded", _bytes, "over all ranks"),
    Measure("bytes_per_s", "speed of a load", _speed, "bytes loaded divided by the durations of the loads"),
    Measure("loads", "loads", _count, "successful loads", True),
    Measure("failed_loads", "loads failed", _count, "their tokens were recomputed, or their requests failed", True),
    Measure("aborted_loads", "loads aborted", _count, "their requests ended first"),
    Measure("corrupt_blocks", "blocks with wrong bytes", _count, "found by [verify](verify.md), over all ranks"),
    Measure("exceptions", "exceptions", _count, "raised by the connector"),
    Measure("load_p50_s", "load p50", duration, "of successful loads, within 10 %"),
    Measure("load_p99_s", "load p99", duration, "the same"),
    Measure("load_mean_s", "load mean", duration, "exact"),
    Measure(
        "load_stall_s", "steps waited for loads", duration, "summed over ranks; every request in such a step waits"
    ),
    Measure("save_stall_s", "steps waited for saves", duration, "the same for saves"),
    Measure("estimated_loads", "loads with an estimate", _count, "loads that the next two rows cover"),
    Measure("saved_s", "  time saved", duration, "what computing their tokens would have taken"),
    Measure("waited_s", "  time paid", duration, "how long their requests waited for them"),
    Measure(
        "scheduler_s", "time in the scheduler", duration, "time in calls into it; no step is scheduled meanwhile", True
    ),
)
"""All numbers, in their order."""


MISSED = {
    "never_seen": "in new prompts",
    "beyond_prefix": "after the common prefix",
    "not_stored": "used before and not stored",
    "evicted": "evicted",
    "other_connector": "offered by another connector",
    "no_full_block": "less than a block or chunk",
    "unknown": "of other engines",
}
"""The reasons why tokens were not offered, in words."""


@dataclass(frozen=True)
class PromptTokens:
    """Where the tokens of all prompts came from, by vLLM's own metrics; what was loaded, by connector."""

    computed: int
    local_cache: int
    loaded: Mapping[str, int]

    @property
    def all(self) -> int:
        return self.computed + self.local_cache + sum(self.loaded.values())


@dataclass(frozen=True)
class ServerSums:
    """A server's numbers in a run; or of several with one model, in Prometheus."""

    server: str
    model: str = ""
    vllm_version: str = ""
    kvobs_version: str = ""
    seconds: float | None = None
    restarted: bool = False  # since the run's begin: all is since the start
    ended: str = ""  # that its engine has ended, and in what
    prefills_seen: int = 0  # since the start: so many could be learned from
    prompt_tokens: PromptTokens | None = None
    connectors: tuple[ConnectorSums, ...] = ()


NAMES = {
    *(signal.name + part
      for signal, part in (
          *((signals.LOAD_DURATION, part) for part in ("_bucket", "_sum", "_count")),
          *((signal, "_sum") for signal in (signals.CALL_DURATION, signals.LOAD_STALL, signals.SAVE_STALL)),
      )),
    *(signal.name
      for signal in (
          signals.LOOKUPS, signals.OFFERED_TOKENS, signals.UNUSED_HIT_TOKENS, signals.LOADS, signals.LOAD_TOKENS,
          signals.MISSED_TOKENS, signals.CORRUPT_BLOCKS,
          signals.LOAD_BYTES, signals.PREFILL_SAVED, signals.LOAD_WAITED, signals.ESTIMATED_LOADS, signals.CALL_ERRORS,
          signals.ESTIMATE_PREFILLS, signals.CONNECTOR_INFO, signals.BUILD_INFO, signals.START_TIME,
      )),
}  # fmt: skip
"""The metrics of kvobs that are read."""


def server_sums(server: str, readings: Sequence[tuple[Scrape | None, Scrape]], seconds: float | None) -> ServerSums:
    """Return what a server's metrics have grown by between two readings; without the first one since its start.

    Of several processes, whose labels may be the same, each has its pair. ``seconds`` is the time between.
    """
    grown: list[tuple[Series, float]] = []
    by_vllm: list[tuple[Series, float]] = []
    has_been_restarted = is_vllm_unknown = False
    for before, after in readings:
        restarted = before is not None and is_other_engine(before, after)
        has_been_restarted |= restarted
        start = before if not restarted else None
        grown += change(start.values if start else None, after.values).items()
        is_vllm_unknown |= bool(after.vllm) and start is not None and not start.vllm
        by_vllm += change(start.vllm if start else None, after.vllm).items()
    ours = [last.values for _, last in readings if last.values]
    now = Numbers.of(item for values in ours for item in values.items())
    by_connector: dict[str, list[tuple[Series, float]]] = {}
    for series, value in grown:
        if name := dict(series[1]).get("connector"):
            by_connector.setdefault(name, []).append((series, value))
    numbers = {name: Numbers.of(items) for name, items in by_connector.items()}
    connectors = tuple(
        connector_sums(name, numbers[name]) for name in sorted(numbers, key=lambda n: _place(numbers[n]))
    )
    return ServerSums(
        server,
        model=", ".join(sorted({dict(labels).get("model_name", "") for (_, labels), _ in grown} - {""})),
        vllm_version=now.label(signals.BUILD_INFO, "vllm_version"),
        kvobs_version=now.label(signals.BUILD_INFO, "version"),
        seconds=seconds,
        restarted=has_been_restarted,
        ended=end_of(ours[0]) if len(ours) == 1 else "",
        prefills_seen=int(now.total(signals.ESTIMATE_PREFILLS)),
        prompt_tokens=None if is_vllm_unknown else prompt_tokens(Numbers.of(by_vllm), connectors),
        connectors=connectors,
    )


def is_other_engine(before: Scrape, after: Scrape) -> bool:
    """Return whether an engine has started between two readings: its time of start differs, or a counter fell."""
    starts = ((after.values.get(series), at) for series, at in before.values.items() if series[0] == _START)
    prompted = ((after.vllm.get(series, n), n) for series, n in before.vllm.items() if series[0] == PROMPT_TOKENS)
    return (
        has_restarted(before.values, after.values)
        or any(now < then for now, then in prompted)
        or any(now is not None and abs(now - then) > LATER_S for now, then in starts)
    )


def since_start(after: Scrape) -> float | None:
    """Return the seconds from the start of the first of these engines until now."""
    starts = Numbers.of(after.values.items()).values(signals.START_TIME)
    return time.time() - min(starts) if starts else None


def _place(numbers: Numbers) -> tuple[int, str]:
    """Return where a connector is in the configuration; a shorter number is smaller."""
    index = numbers.label(signals.CONNECTOR_INFO, "index")
    return len(index), index


def connector_sums(name: str, numbers: Numbers) -> ConnectorSums:
    """Return a connector's numbers."""

    def count(signal: signals.Signal, **labels: str) -> int:
        return int(numbers.total(signal, **labels))

    lookups = {outcome: count(signals.LOOKUPS, outcome=outcome) for outcome in signals.LOOKUPS.labels["outcome"]}
    asked = lookups["hit"] + lookups["miss"] + lookups["timeout"]
    size, spent_s = count(signals.LOAD_BYTES), numbers.total(signals.LOAD_DURATION, "_sum")
    estimated = count(signals.ESTIMATED_LOADS)
    return ConnectorSums(
        name,
        lookups=asked,
        hits=lookups["hit"],
        hit_share=lookups["hit"] / asked if asked else None,
        pending=lookups["pending"],
        timeouts=lookups["timeout"],
        not_read=lookups["not_read"],
        offered_tokens=count(signals.OFFERED_TOKENS),
        lost_tokens=count(signals.UNUSED_HIT_TOKENS, reason="other_chosen"),
        loads=count(signals.LOADS, outcome="ok"),
        failed_loads=count(signals.LOADS, outcome="failed"),
        aborted_loads=count(signals.LOADS, outcome="aborted"),
        exceptions=count(signals.CALL_ERRORS),
        loaded_tokens=count(signals.LOAD_TOKENS),
        loaded_bytes=size,
        bytes_per_s=size / spent_s if size and spent_s else None,
        load_p50_s=numbers.percentile(signals.LOAD_DURATION, 0.5),
        load_p99_s=numbers.percentile(signals.LOAD_DURATION, 0.99),
        load_mean_s=numbers.mean(signals.LOAD_DURATION),
        load_stall_s=numbers.total(signals.LOAD_STALL, "_sum"),
        save_stall_s=numbers.total(signals.SAVE_STALL, "_sum"),
        estimated_loads=estimated,
        saved_s=numbers.total(signals.PREFILL_SAVED) if estimated else None,
        waited_s=numbers.total(signals.LOAD_WAITED) if estimated else None,
        scheduler_s=sum(numbers.total(signals.CALL_DURATION, "_sum", hook=hook) for hook in SCHEDULER_HOOKS),
        missed_tokens={reason: n for reason in MISSED if (n := count(signals.MISSED_TOKENS, reason=reason))},
        corrupt_blocks=count(signals.CORRUPT_BLOCKS),
    )


def prompt_tokens(vllm: Numbers, connectors: Iterable[ConnectorSums]) -> PromptTokens | None:
    """Return where prompt tokens came from; None if vLLM's metrics do not show it.

    vLLM counts what was loaded when the request's prompt is computed, without a connector: it is split up by the tokens
    that each has loaded, which are the same number where no load failed, or is under way.
    """
    if PROMPT_TOKENS not in vllm.by_name:
        return None
    external = round(vllm.sum(PROMPT_TOKENS, source=EXTERNAL))
    tokens = {row.connector: row.loaded_tokens for row in connectors if row.loaded_tokens}
    loaded: dict[str, int] = {}
    whole, before = sum(tokens.values()), 0
    for name, n in (tokens or {"connectors": 1}).items():
        before += n
        loaded[name] = round(external * before / (whole or 1)) - sum(loaded.values())
    return PromptTokens(
        round(vllm.sum(PROMPT_TOKENS, source=COMPUTED)),
        round(vllm.sum(PROMPT_TOKENS, source=LOCAL)),
        {name: n for name, n in loaded.items() if n},
    )


def written(measure: Measure, value: float | None) -> str:
    return NONE if value is None else measure.show(value)


def shown(rows: Sequence[ConnectorSums]) -> list[Measure]:
    """Return the measures that are essential, or more than 0 for a connector."""
    return [each for each in MEASURES if each.is_essential or any(getattr(row, each.field) for row in rows)]
