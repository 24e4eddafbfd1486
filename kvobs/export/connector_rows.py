"""A row for each server and for each of its connectors, from one scrape or two; `--json` has the same fields."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvobs.export.numbers import RUNNING, TTFT, WAITING, Numbers, Owner, Scrape, by_owner, change, has_restarted
from kvobs.schema import signals
from kvobs.schema.percentiles import quantile
from kvobs.schema.signals import Signal
from kvobs.schema.verdicts import FEW_TOKENS, IDLE, LOADABLE_SHARE, POLL_S, SERVES_OTHERS, UNSERVED_H, judge
from kvobs.vllm_api.hooks import SCHEDULER_HOOKS


@dataclass(frozen=True)
class ConnectorRow:
    """One connector's numbers and state. Without an earlier scrape rates are totals. None: no data."""

    engine: str
    connector: str
    connector_class: str
    lookups_per_s: float
    hit_share: float | None
    """Of the requests that were answered or timed out; one that vLLM looked up again counts once an answer."""
    loads_per_s: float  # successful ones
    load_tokens_per_s: float
    load_bytes_per_s: float  # over all ranks
    save_tokens_per_s: float | None  # that it stored, summed over media; None: it does not report it
    evicted_tokens_per_s: float | None  # the same of what it forgot
    stored_tokens: int | None  # that it holds, summed over media; None: it does not report it
    capacity_tokens: int | None  # its size, if its options state it
    lost_to_shorter_offer_per_s: float  # tokens beyond the offer of the connector that was chosen
    load_p50_s: float | None
    load_p99_s: float | None
    load_mean_s: float | None
    scheduler_s_per_s: float  # time that the scheduler spent in it
    load_stall_s_per_s: float  # summed over ranks, as for saves
    save_stall_s_per_s: float
    estimated_loads_per_s: float  # loads with a known saving
    prefills_seen: int  # since the engine's start: the number that the estimate could learn from
    gain_s_per_s: float | None  # time that its loads saved, less the time that requests waited for them
    failed_loads_per_s: float
    exceptions_per_s: float
    skew_p99_s: float | None
    slowest_rank: str | None  # the rank that most often finished last
    slowest_rank_share: float | None
    loads_open: int
    saves_held: int
    oldest_s: float  # age of the oldest lookup, load, resume or promised save in progress; 0 without any
    quarantined: bool
    call: str | None  # the call into it that is in progress for longest
    call_s: float | None
    state: str = IDLE.name
    state_by: str = ""  # the measure by which it is in this state, and its value
    state_value: float = 0.0

    @property
    def stall_s_per_s(self) -> float:
        """How long steps waited for it, for loads and saves."""
        return self.load_stall_s_per_s + self.save_stall_s_per_s

    @property
    def errors_per_s(self) -> float:
        """Exceptions out of it, and loads that failed."""
        return self.exceptions_per_s + self.failed_loads_per_s


@dataclass(frozen=True)
class Server:
    """A server: versions, cost of kvobs, and its connectors; or the error."""

    address: str
    error: str | None = None
    model: str = ""
    vllm_version: str = ""
    kvobs_version: str = ""
    seconds: float | None = None  # between the two scrapes; None: all since the server's start
    telemetry_s_per_s: float | None = None
    internal_errors: int = 0  # since the server's start
    running: int | None = None  # requests, by vLLM's own metrics, as is what follows; an exporter does not have them
    waiting: int | None = None
    ttft_p50_s: float | None = None  # time to the first token
    ttft_p99_s: float | None = None
    connectors: tuple[ConnectorRow, ...] = ()
    seen_share: float | None = None
    """Of the prompts' tokens in full blocks; an LRU cache of the following size would serve half of it."""
    half_within_tokens: float | None = None
    local_cache_tokens: int | None = None


def server_row(address: str, before: Scrape | None, after: Scrape) -> Server:
    """Return a server's row between two scrapes, or since its start."""
    seconds = max(after.at_s - before.at_s, 1e-3) if before else None
    values = change(before.values if before else None, after.values)
    now, grown, vllm = (Numbers.of(series.items()) for series in (after.values, values, after.vllm))
    vllm_before = before.vllm if before is not None and not has_restarted(before.values, after.values) else None
    ttft = Numbers.of(change(vllm_before, after.vllm).items())
    seen_share = _seen_share(grown)
    connectors = [(owner, numbers) for owner, numbers in by_owner(values).items() if owner[1]]
    return Server(
        address,
        model=", ".join(sorted({dict(labels).get("model_name", "") for _, labels in after.values} - {""})),
        vllm_version=now.label(signals.BUILD_INFO, "vllm_version"),
        kvobs_version=now.label(signals.BUILD_INFO, "version"),
        seconds=seconds,
        telemetry_s_per_s=grown.total(signals.OVERHEAD_SECONDS) / (seconds or 1),
        internal_errors=int(now.total(signals.INTERNAL_ERRORS)),
        running=_integer(vllm, RUNNING),
        waiting=_integer(vllm, WAITING),
        ttft_p50_s=quantile(ttft.buckets(TTFT), 0.5),
        ttft_p99_s=quantile(ttft.buckets(TTFT), 0.99),
        connectors=tuple(
            _judge(
                _connector_row(owner, numbers, seconds or 1), numbers, grown, now, vllm, is_change=seconds is not None
            )
            for owner, numbers in sorted(connectors, key=_sort_key)
        ),
        seen_share=seen_share,
        half_within_tokens=grown.percentile(signals.REUSE_DISTANCE, seen_share / 2) if seen_share else None,
        local_cache_tokens=_integer(now, signals.LOCAL_CACHE_TOKENS.name),
    )


def _seen_share(numbers: Numbers) -> float | None:
    every, largest = numbers.total(signals.REUSE_DISTANCE, "_count"), signals.REUSE_DISTANCE.buckets[-1]
    buckets = numbers.by_name.get(f"{signals.REUSE_DISTANCE.name}_bucket", ())
    return sum(n for has, n in buckets if float(has.get("le", "inf")) == largest) / every if every else None


def _integer(numbers: Numbers, name: str) -> int | None:
    return int(numbers.sum(name)) if name in numbers.by_name else None


def _sort_key(entry: tuple[Owner, Numbers]) -> tuple[int, str, int, str, str]:
    """Sort engines by their number, and connectors as they are configured; a shorter number is smaller."""
    (engine, connector), numbers = entry
    index = numbers.label(signals.CONNECTOR_INFO, "index")
    return len(engine), engine, len(index), index, connector


def _connector_row(owner: Owner, numbers: Numbers, seconds: float) -> ConnectorRow:
    answers = {outcome: numbers.total(signals.LOOKUPS, outcome=outcome) for outcome in ("hit", "miss", "timeout")}
    answered = sum(answers.values())
    ranks = {rank: n for rank, n in numbers.by_label(signals.SLOWEST_RANK, "rank").items() if n > 0}
    slowest = max(ranks, key=lambda rank: ranks[rank], default=None)
    gain_s = numbers.total(signals.PREFILL_SAVED) - numbers.total(signals.LOAD_WAITED)
    calls = [(age, call_site(labels)) for labels, age in numbers.by_name.get(signals.CALL_IN_PROGRESS.name, ())]
    call_s, call = max(calls, default=(None, None))
    return ConnectorRow(
        *owner,
        numbers.label(signals.CONNECTOR_INFO, "class"),
        lookups_per_s=answered / seconds,
        hit_share=answers["hit"] / answered if answered else None,
        loads_per_s=numbers.total(signals.LOADS, outcome="ok") / seconds,
        load_tokens_per_s=numbers.total(signals.LOAD_TOKENS) / seconds,
        load_bytes_per_s=numbers.total(signals.LOAD_BYTES) / seconds,
        save_tokens_per_s=_reported(numbers, signals.SAVE_TOKENS, seconds),
        evicted_tokens_per_s=_reported(numbers, signals.EVICTED_TOKENS, seconds),
        stored_tokens=_integer(numbers, signals.STORED_TOKENS.name),
        capacity_tokens=_integer(numbers, signals.CAPACITY_TOKENS.name),
        lost_to_shorter_offer_per_s=numbers.total(signals.UNUSED_HIT_TOKENS, reason="other_chosen") / seconds,
        load_p50_s=numbers.percentile(signals.LOAD_DURATION, 0.5),
        load_p99_s=numbers.percentile(signals.LOAD_DURATION, 0.99),
        load_mean_s=numbers.mean(signals.LOAD_DURATION),
        scheduler_s_per_s=_in_scheduler(numbers, "_sum") / seconds,
        load_stall_s_per_s=numbers.total(signals.LOAD_STALL, "_sum") / seconds,
        save_stall_s_per_s=numbers.total(signals.SAVE_STALL, "_sum") / seconds,
        estimated_loads_per_s=numbers.total(signals.ESTIMATED_LOADS) / seconds,
        prefills_seen=0,
        gain_s_per_s=gain_s / seconds if numbers.values(signals.LOAD_WAITED) else None,
        failed_loads_per_s=numbers.total(signals.LOADS, outcome="failed") / seconds,
        exceptions_per_s=numbers.total(signals.CALL_ERRORS) / seconds,
        skew_p99_s=numbers.percentile(signals.RANK_SKEW, 0.99),
        slowest_rank=slowest,
        slowest_rank_share=ranks[slowest] / sum(ranks.values()) if slowest is not None else None,
        loads_open=int(numbers.total(signals.IN_FLIGHT, kind="load")),
        saves_held=int(numbers.total(signals.IN_FLIGHT, kind="save")),
        oldest_s=max(numbers.values(signals.OLDEST_IN_FLIGHT), default=0.0),
        quarantined=any(numbers.values(signals.QUARANTINED)),
        call=call,
        call_s=call_s,
    )


def _reported(numbers: Numbers, signal: Signal, seconds: float) -> float | None:
    """Return a counter's rate over all its series; None without any."""
    return numbers.total(signal) / seconds if numbers.values(signal) else None


def call_site(labels: Mapping[str, str]) -> str:
    """Return which call it is, and where."""
    rank = labels.get("rank", "?")
    return f"{labels.get('hook')} on {f'rank {rank}' if rank.isdecimal() else rank}"


def _in_scheduler(numbers: Numbers, part: str) -> float:
    return sum(numbers.total(signals.CALL_DURATION, part, hook=hook) for hook in SCHEDULER_HOOKS)


def _never_serves(row: ConnectorRow, numbers: Numbers, now: Numbers) -> bool:
    """Return whether a connector that stores has served nothing since the engine's start, long ago, and could have."""
    engine, of = row.engine, {"engine": row.engine, "connector": row.connector}
    is_old = 0 < now.total(signals.START_TIME, engine=engine) < time.time() - UNSERVED_H * 3600
    stores = numbers.label(signals.CONNECTOR_INFO, "role") == "kv_both"
    stores &= not re.fullmatch(SERVES_OTHERS, row.connector_class)
    is_asked = any(now.total(signals.LOOKUPS, outcome=outcome, **of) for outcome in ("hit", "miss"))
    loadable = now.total(signals.LOADABLE_TOKENS, engine=engine)
    could = loadable > LOADABLE_SHARE * now.total(signals.REUSE_DISTANCE, "_count", engine=engine)
    return is_old and stores and is_asked and could and not now.total(signals.ADMITTED_TOKENS, **of)


def _thrash_share(row: ConnectorRow, now: Numbers) -> float:
    """Return how much of what a store evicts is asked for again, since the engine's start; 0 if it loads more.

    The store must evict now. With several media a lower one keeps what a higher one evicts.
    """
    of = {"engine": row.engine, "connector": row.connector}
    followed = now.total(signals.FOLLOWED_EVICTIONS, **of)
    media = sum(of.items() <= has.items() for has, _ in now.by_name.get(signals.SAVE_TOKENS.name, ()))
    if not followed or media > 1 or (row.evicted_tokens_per_s or 0) < FEW_TOKENS:
        return 0.0
    share = now.total(signals.REUSED_EVICTIONS, **of) / followed
    lost = share * now.total(signals.EVICTED_TOKENS, **of)
    return share if now.total(signals.LOAD_TOKENS, **of) < lost else 0.0


def _judge(
    row: ConnectorRow, numbers: Numbers, grown: Numbers, now: Numbers, vllm: Numbers, *, is_change: bool
) -> ConnectorRow:
    """Return a row with its state, from its numbers, all connectors' numbers, and what its engine has learned."""
    engine = row.engine
    failures = numbers.total(signals.CALL_ERRORS) + numbers.total(signals.LOADS, outcome="failed")
    in_flight = grown.total(signals.IN_FLIGHT, engine=engine)
    waits = in_flight > grown.total(signals.IN_FLIGHT, engine=engine, kind="save")
    computes = is_change and grown.total(signals.STEP_SECONDS, engine=engine) > 0
    polls = waits and not computes and _in_scheduler(numbers, "_sum") < POLL_S * _in_scheduler(numbers, "_count")
    ages = numbers.by_label(signals.OLDEST_IN_FLIGHT, "kind")
    state, state_by, value = judge(
        {
            "ended": max(numbers.values(signals.ENGINE_ENDED), default=0),
            "call": row.call_s,
            **ages,
            "awaiting_schedule": None if computes else ages.get("awaiting_schedule"),
            "corrupt_blocks": now.total(signals.CORRUPT_BLOCKS, engine=engine, connector=row.connector),
            "quarantined": row.quarantined,
            "failing_share": failures / max(failures + numbers.total(signals.LOADS, outcome="ok"), 1),
            "scheduler_share": row.scheduler_s_per_s if is_change and not polls else None,
            "load_p99": row.load_p99_s,
            "thrash_share": _thrash_share(row, now),
            "never_serves": _never_serves(row, numbers, now),
            "time_in_calls": numbers.total(signals.CALL_DURATION, "_sum"),
            "in_progress": numbers.total(signals.IN_FLIGHT),
            "requests": vllm.sum(RUNNING, engine=engine) + vllm.sum(WAITING, engine=engine),
        }
    )
    prefills = int(now.total(signals.ESTIMATE_PREFILLS, engine=engine))
    return replace(row, state=state.name, state_by=state_by, state_value=value, prefills_seen=prefills)
