"""The table of kvobs's metrics: name, kind, help, labels and their closed sets of values, bucket bounds.

The recorder counts by slot, each a word of its process's page, and whoever serves the metrics reads these words: both
by this table. All metrics also have vLLM's own labels (``model_name``, ``engine``), and a connector's metrics the label
``connector``, the connector's name. Durations are nanoseconds inside kvobs, seconds in Prometheus.
"""

import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import product
from typing import Literal, get_args

from kvobs.vllm_api.hooks import HOOKS, Cadence, Hook, Side

__all__ = ["OPEN", "SIGNALS", "Kind", "Scope", "Signal"]


class Kind(Enum):
    """The type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(Enum):
    """The subject of a metric."""

    CONNECTOR = auto()  # a connector
    PROCESS = auto()  # kvobs itself: no ``connector`` label
    OUTSIDE = auto()  # a process, known or read from outside of it by whoever serves the metrics: without slots
    EXPORTER = auto()  # the exporter, which sets them itself: without slots, and not in vLLM's API server


OPEN: tuple[str, ...] = ()
"""Stands for a label's values that are known only at run time: few, and never ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """One metric; there is one object of each.

    ``labels`` maps a label's name to its closed set of values, or to ``OPEN``. ``bounds`` are a histogram's upper
    bounds in nanoseconds, or tokens, inclusive.
    """

    name: str
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bounds: tuple[int, ...] = ()
    scope: Scope = Scope.CONNECTOR

    @property
    def kind(self) -> Kind:
        """Return its type: a histogram has bounds, and a counter's name ends as Prometheus wants it."""
        if self.bounds:
            return Kind.HISTOGRAM
        return Kind.COUNTER if self.name.endswith("_total") else Kind.GAUGE

    @property
    def is_open(self) -> bool:
        """Whether a label's values are known at run time only: such a metric has no slots."""
        return OPEN in self.labels.values()

    @property
    def unit(self) -> float:
        """Return the factor from a page's number to Prometheus's."""
        return 1e-9 if "_seconds" in self.name else 1

    @property
    def buckets(self) -> list[float]:
        """Return a histogram's upper bounds for Prometheus."""
        return [bound / 1e9 if "_seconds" in self.name else float(bound) for bound in self.bounds]

    @property
    def is_narrow(self) -> bool:
        """Whether it uses the buckets of requests' durations."""
        return self.bounds is _REQUEST_BOUNDS

    @property
    def sum_offset(self) -> int:
        """Return the offset of a histogram's sum in its slots."""
        return len(self.bounds) + 1

    def bucket(self, ns: int) -> int:
        """Return the index of the bucket for a duration; the last one is above all bounds."""
        return bisect_left(self.bounds, ns)


@dataclass(frozen=True, slots=True)
class Series:
    """One combination of a signal's label values, and its position in the slot table.

    A histogram has a slot for each bucket, for the overflow above the last bound, and for the sum.
    """

    signal: Signal
    values: tuple[str, ...]
    first: int

    @property
    def width(self) -> int:
        """Return its number of slots."""
        return self.signal.sum_offset + 1 if self.signal.kind is Kind.HISTOGRAM else 1


def is_timed(hook: Hook) -> bool:
    """Return whether calls of this hook are timed: all but properties and hooks of the configuration."""
    return hook.side is not Side.CONFIG and not hook.is_property


OTHER = "other"
OTHER_VALUE = "_OTHER"  # OpenTelemetry's name for further values of an open set
UNKNOWN_VALUE = "unknown"  # of a label whose value is not known


def hook_label(name: str) -> str:
    """Return the value of the label ``hook``: the hook's own name, or "other" for hooks called once or on demand."""
    return OTHER if HOOKS[name].cadence is Cadence.ONCE else name


DIRECTIONS = ("h2d", "d2h")  # host to device, device to host
_MODES = ("sync", "async")
_TRANSFERS = ("load", "save")
_WAITS = ("lookup", "load", "awaiting_schedule", "save")
TIMED = {name: hook for name, hook in HOOKS.items() if is_timed(hook)}
_HOOKS = tuple(dict.fromkeys(map(hook_label, TIMED)))

PER_DOUBLING = 4
"""Buckets from a duration of a request to twice as much: each is 19 % wide, so that its middle is within 10 %."""


def _powers(*exponents: int) -> tuple[int, ...]:
    """Return bounds that are powers of two: the compiled probe counts by a duration's bits."""
    return tuple(2**k for k in exponents)


_REQUEST_BOUNDS = tuple(round(1e9 * 2 ** (k / PER_DOUBLING)) for k in range(-10 * PER_DOUBLING, 6 * PER_DOUBLING + 1))
# 66 us, 1 ms, and on: there is one such histogram per hook, and the order of magnitude is enough.
_CALL_BOUNDS = _powers(16, 20, 23, 26, 28, 30, 32)
_STALL_BOUNDS = _powers(14, 16, 18, *range(20, 27), 28, 30, 32)  # 16 us to 4 s; of two from 1 to 67 ms, a usual step
_REUSE_BOUNDS = _powers(*range(10, 26))  # tokens
_SKEW_BOUNDS = _powers(22, 24, *range(26, 31), 32)  # 4 ms to 4 s, in steps of two from 67 ms to 1 s
_COPY_BOUNDS = _powers(*range(18, 28, 2))

CALL_DURATION = Signal(
    "kvobs_call_duration_seconds", "Calls into the connector, by hook.", {"hook": _HOOKS}, _CALL_BOUNDS
)
CALL_ERRORS = Signal(
    "kvobs_call_errors_total",
    "Exceptions raised by the connector, by hook and exception class.",
    {"hook": OPEN, "error_type": OPEN},
)
SLOW_CALLS = Signal(
    "kvobs_slow_calls_total", "Calls longer than slow_call_ms, without pauses of the process.", {"hook": _HOOKS}
)
LOOKUPS = Signal(
    "kvobs_lookups_total",
    "Lookups by outcome, once per request and outcome; late answers count as well. not_read: vLLM ignores the answer, "
    "as for prompt_logprobs and pooling.",
    {"outcome": ("hit", "miss", "pending", "timeout", "not_read")},
)
LOOKUP_DELAY = Signal(
    "kvobs_lookup_delay_seconds",
    "Time from the connector's first 'not yet' for a request to its answer.",
    bounds=_REQUEST_BOUNDS,
)
OFFERED_TOKENS = Signal("kvobs_offered_tokens_total", "Tokens offered by the connector, once per request (tokens).")
ADMITTED_TOKENS = Signal(
    "kvobs_admitted_tokens_total",
    "Tokens that vLLM decided to load from the connector; they count again after a preemption (tokens).",
)
HIT_TOKENS = Signal(
    "kvobs_hit_tokens_total",
    "Tokens that vLLM decided to load, by the tier in which the connector holds them; unspecified: it reports no "
    "tier. Needs vLLM 0.33 and its stat logging; loads after a preemption do not count (tokens).",
    {"source": ("host", "p2p", "disk", "unspecified")},
)
UNUSED_HIT_TOKENS = Signal(
    "kvobs_unused_hit_tokens_total",
    "Tokens offered but not loaded (tokens). other_chosen: beyond the shorter offer of the chosen connector; "
    "below_minimum: in an offer below min_tokens; declined: by kvobs; not_taken: by vLLM; not_allocated: the request "
    "ended before the load; aborted: it ended during the load.",
    {"reason": ("other_chosen", "below_minimum", "declined", "not_taken", "not_allocated", "aborted")},
)
MISSED_TOKENS = Signal(
    "kvobs_missed_tokens_total",
    "Prompt tokens that the connector was asked for and did not offer, by reason: an estimate (tokens).",
    {
        "reason": (
            *("never_seen", "beyond_prefix", "not_stored", "evicted"),
            *("other_connector", "no_full_block", "unknown"),
        )
    },
)
UNUSED_OFFERS = Signal(
    "kvobs_unused_offers_total", "Requests for which the connector offered tokens but was not chosen."
)
LOADS = Signal(
    "kvobs_loads_total",
    "Finished loads, by mode and outcome; a preempted request may load again.",
    {"mode": _MODES, "outcome": ("ok", "failed", "aborted")},
)
LOAD_DURATION = Signal(
    "kvobs_load_duration_seconds",
    "Duration of successful loads: async from allocation to the last rank's receipt, sync on the slowest rank.",
    {"mode": _MODES},
    _REQUEST_BOUNDS,
)
PEER_LOADS = Signal(
    "kvobs_peer_loads_total",
    "Finished loads from other engines, by the host and port that the request names: the first 32 peers of a "
    "process, _OTHER for all others, and unknown without a name.",
    {"peer": OPEN, "outcome": OPEN},
)
PEER_LOAD_SECONDS = Signal(
    "kvobs_peer_load_seconds_total", "Duration of successful loads from other engines.", {"peer": OPEN}
)
LOAD_RESUME_DELAY = Signal(
    "kvobs_load_resume_delay_seconds",
    "Time from the end of an async load on all ranks to the step that schedules its request.",
    bounds=_REQUEST_BOUNDS,
)
LOAD_TOKENS = Signal("kvobs_load_tokens_total", "Tokens loaded, excluding failed loads (tokens).")
LOAD_BYTES = Signal(
    "kvobs_load_bytes_total",
    "Bytes of the KV cache blocks that loads filled, over all layers and ranks (bytes).",
)
PREFILL_SAVED = Signal(
    "kvobs_prefill_saved_seconds_total",
    "Time that computing the loaded tokens would have taken, for loads with an estimate.",
)
LOAD_WAITED = Signal(
    "kvobs_load_waited_seconds_total",
    "Time that requests waited for loads with an estimate: async from allocation to resumption, sync within the step.",
)
ESTIMATED_LOADS = Signal(
    "kvobs_estimated_loads_total",
    "Loads with an estimate of the time of computing their tokens, which saved and waited time cover.",
)
LOADS_SLOWER = Signal(
    "kvobs_loads_slower_than_computing_total",
    "Loads with an estimate that took longer than computing would have taken.",
)
LOAD_STALL = Signal(
    "kvobs_load_stall_seconds",
    "Time a step's forward waited for loads: wait_for_layer_load, plus start_load_kv if a sync load is due.",
    bounds=_STALL_BOUNDS,
)
RECOMPUTED_TOKENS = Signal(
    "kvobs_recomputed_tokens_total",
    "Tokens of failed loads; recomputed unless kv_load_failure_policy is fail (tokens).",
)
FAILED_SYNC_LOADS = Signal(
    "kvobs_failed_sync_loads_total",
    "Failed synchronous loads: other connectors may have saved the unfilled blocks in the same step.",
)
SAVES = Signal(
    "kvobs_saves_total",
    "Promised saves that have ended. ok: reported by the connector, which does not prove that they were stored or "
    "read; abandoned: not reported by a connector in quarantine.",
    {"outcome": ("ok", "abandoned")},
)
SAVE_HOLD = Signal(
    "kvobs_save_hold_seconds",
    "Time from a request's end to the completion of its promised save: its blocks are held.",
    bounds=_REQUEST_BOUNDS,
)
SAVE_STALL = Signal(
    "kvobs_save_stall_seconds", "Time a step spent in save_kv_layer and wait_for_save.", bounds=_STALL_BOUNDS
)
IN_FLIGHT = Signal(
    "kvobs_in_flight",
    "Lookups that requests wait for, loads, loaded requests that are not scheduled yet (awaiting_schedule), and "
    "promised saves.",
    {"kind": _WAITS},
)
OLDEST_IN_FLIGHT = Signal(
    "kvobs_oldest_in_flight_seconds",
    "Age of the oldest item in kvobs_in_flight, for a lookup since its first 'not yet'. It grows while an engine "
    "hangs.",
    {"kind": _WAITS},
)
HELD_TOKENS = Signal(
    "kvobs_held_tokens",
    "Tokens whose KV cache blocks are held by loads, loaded requests that are not scheduled yet, and promised saves "
    "(tokens).",
    {"kind": _WAITS[1:]},
)
RANK_SKEW = Signal(
    "kvobs_rank_skew_seconds",
    "How much longer the slowest rank took than the fastest for a load or promised save, each by its own clock.",
    {"kind": _TRANSFERS},
    _SKEW_BOUNDS,
)
SLOWEST_RANK = Signal(
    "kvobs_slowest_rank_total", "Loads and promised saves for which this rank took longest.", {"rank": OPEN}
)
STUCK_TRANSFERS = Signal(
    "kvobs_stuck_transfers_total",
    "Loads and promised saves that this rank did not report within stuck_after_s of another rank.",
    {"rank": OPEN},
)
UNEXPECTED_REPORTS = Signal(
    "kvobs_unexpected_reports_total",
    "Reports about a load or save that is not the connector's. A report of its end is ignored; a failure or bad "
    "blocks count for the open load.",
    {"kind": ("load", "failure", "save", "blocks")},
)
VERIFIED_BLOCKS = Signal(
    "kvobs_verified_blocks_total",
    "Loaded blocks compared with the blocks computed for the same tokens, over the ranks of a host, with "
    "verify.sample_ratio.",
    {"outcome": ("match", "lossy", "mismatch", "unknown")},
)
CORRUPT_BLOCKS = Signal(
    "kvobs_corrupt_blocks_total", "Verified blocks with outcome mismatch on this rank.", {"rank": OPEN}
)
QUARANTINED = Signal("kvobs_quarantined", "1 while a connector in the option best_effort is in quarantine.")
QUARANTINES = Signal("kvobs_quarantines_total", "Quarantines after a failure or a slow call.")
KV_EVENTS = Signal(
    "kvobs_kv_events_total",
    "KV cache events of the connector that kvobs passed on to vLLM; removed includes a cleared cache.",
    {"type": ("stored", "removed"), "medium": ("cpu", "storage", "other")},
)
SAVE_TOKENS = Signal(
    "kvobs_save_tokens_total",
    "Tokens that the connector stored, by its KV cache events; absent without them (tokens).",
    {"medium": KV_EVENTS.labels["medium"]},
)
EVICTED_TOKENS = Signal(
    "kvobs_evicted_tokens_total",
    "Tokens that the connector evicted, by its KV cache events, without a cleared cache (tokens).",
    {"medium": KV_EVENTS.labels["medium"]},
)
FOLLOWED_EVICTIONS = Signal(
    "kvobs_evicted_followed_tokens_total",
    "Evicted tokens of which it is known whether a prompt asks for them again: an estimate from samples (tokens).",
    {"medium": KV_EVENTS.labels["medium"]},
)
REUSED_EVICTIONS = Signal(
    "kvobs_evicted_reused_tokens_total",
    "Tokens of kvobs_evicted_followed_tokens_total that a later prompt asked for, before they were stored again, and "
    "that vLLM's own cache did not have (tokens).",
    {"medium": KV_EVENTS.labels["medium"]},
)
STORED_TOKENS = Signal(
    "kvobs_stored_tokens",
    "Tokens that the connector holds, by its KV cache events: stored minus removed since the start; absent without "
    "events, evictions or sizes (tokens).",
    {"medium": KV_EVENTS.labels["medium"]},
)
BLOCK_COPY_DURATION = Signal(
    "kvobs_block_copy_duration_seconds",
    "Duration of block copies between the KV cache and the connector's host buffer.",
    {"direction": DIRECTIONS},
    _COPY_BOUNDS,
)
BLOCK_COPY_BYTES = Signal(
    "kvobs_block_copy_bytes_total",
    "Bytes of block copies, over the ranks of a host (bytes).",
    {"direction": DIRECTIONS},
)
CONNECTOR_INFO = Signal(
    "kvobs_connector_info",
    "Configuration of the connector; always 1.",
    dict.fromkeys(("index", "class", "role", "load_policy", "failure_policy"), OPEN),
)
LINK_SPEED = Signal(
    "kvobs_link_bytes_per_second",
    "Speed of the connector's links, from the option link_gbps (bytes).",
    {"connector": OPEN},
    scope=Scope.OUTSIDE,
)
CAPACITY_TOKENS = Signal(
    "kvobs_capacity_tokens",
    "Size of the connector's store, if its options state it and all layers use full attention (tokens).",
)
ESTIMATE_PREFILLS = Signal(
    "kvobs_estimate_prefills_total",
    "Steps with prefills that the estimate of computing time has learned from; while there are few, no load has an "
    "estimate.",
    scope=Scope.PROCESS,
)
STEP_SECONDS = Signal(
    "kvobs_step_seconds_total",
    "Duration of the steps that check the estimate: prefill steps without sync loads or encoder input, and a sample "
    "of decode-only steps. While it does not grow, the engine computes nothing.",
    scope=Scope.PROCESS,
)
REUSE_DISTANCE = Signal(
    "kvobs_reuse_distance_tokens",
    "Prompt tokens in full blocks, by the number of distinct tokens used since their last use: an LRU cache of that "
    "size would hold them; +Inf: used for the first time or very long ago. An estimate; the sum is not counted "
    "(tokens).",
    bounds=_REUSE_BOUNDS,
    scope=Scope.PROCESS,
)
LOADABLE_TOKENS = Signal(
    "kvobs_loadable_tokens_total",
    "Prompt tokens in full blocks seen before and since evicted from vLLM's own cache: the most that a connector "
    "that stores every prompt could serve. An estimate (tokens).",
    scope=Scope.PROCESS,
)
PROMPT_TAIL_TOKENS = Signal(
    "kvobs_prompt_tail_tokens_total",
    "Prompt tokens after the last full block, at least the last token, which no cache can serve (tokens).",
    scope=Scope.PROCESS,
)
LOCAL_CACHE_TOKENS = Signal(
    "kvobs_local_cache_tokens",
    "Size of vLLM's own KV cache: one series per engine (tokens).",
    scope=Scope.PROCESS,
)
BUILD_INFO = Signal(
    "kvobs_build_info",
    "Versions of kvobs and vLLM; native: whether the compiled probe counts; always 1.",
    dict.fromkeys(("version", "vllm_version", "native"), OPEN),
    scope=Scope.PROCESS,
)
START_TIME = Signal(
    "kvobs_start_time_seconds", "Start of the engine's counters on this host, as Unix time.", scope=Scope.OUTSIDE
)
Where = Literal["record", "trace", "merge", "rebuild", "verify", "read", "export", "version"]
INTERNAL_ERRORS = Signal(
    "kvobs_internal_errors_total",
    "Contained errors of kvobs's telemetry: measurements are lost, serving is not affected.",
    {"where": get_args(Where)},
    scope=Scope.PROCESS,
)
OVERHEAD_SECONDS = Signal(
    "kvobs_overhead_seconds_total",
    "Time spent in kvobs's telemetry: recording calls (estimated) and exporting spans.",
    {"stage": ("record", "export")},
    scope=Scope.PROCESS,
)
SPANS_DROPPED = Signal(
    "kvobs_spans_dropped_total",
    "Spans lost: above 200 per second in a process (rate), overwritten before they were read (missed), no room in "
    "the exporter's queue (queue), or rejected by the collector (export).",
    {"where": ("rate", "missed", "queue", "export")},
    scope=Scope.PROCESS,
)
MALFORMED_CONTEXTS = Signal(
    "kvobs_malformed_contexts_total",
    "Requests with a malformed trace context in headers or in kv_transfer_params.kvobs.",
    {"source": ("headers", "params")},
    scope=Scope.PROCESS,
)
REQUEST_LOG_DROPPED = Signal(
    "kvobs_request_log_dropped_total", "Lines of the request log that could not be written.", scope=Scope.PROCESS
)
GC_PAUSES = Signal(
    "kvobs_gc_pause_seconds_total",
    "Pauses of Python's garbage collector; no call counts as slow because of them.",
    {"process": ("scheduler", "worker")},
    scope=Scope.PROCESS,
)
ENGINE_UP = Signal(
    "kvobs_engine_up",
    "1 while the engine runs; 0 while its last metrics are still served. Exporter only, one series per host.",
    scope=Scope.EXPORTER,
)
_CALL = {"connector": OPEN, "hook": OPEN}
CALL_IN_PROGRESS = Signal(
    "kvobs_call_in_progress_seconds",
    "Age of a call into a connector that has lasted more than a second, even while the GIL is held; rank: the "
    "worker's rank, or scheduler. Of the processes on the host that serves it.",
    {**_CALL, "rank": OPEN},
    scope=Scope.OUTSIDE,
)
ENGINE_ENDED = Signal(
    "kvobs_engine_ended",
    "1 after an exception that crashes the engine, or its unexpected end; 2 in the first 15 minutes of its next "
    "life. Labels: the call in which it ended (empty: none), and an exception's class, a signal or an exit code.",
    {**_CALL, "reason": OPEN},
    scope=Scope.OUTSIDE,
)
SPANS_QUEUED = Signal(
    "kvobs_spans_queued",
    "Spans that wait in the exporter for the collector. Exporter only.",
    scope=Scope.EXPORTER,
)


def no_estimate(prefills: float) -> str:
    """Return why loads have no estimate of the time that they saved."""
    return f"no estimate yet: {prefills:,.0f} prefills seen"


SIGNALS: tuple[Signal, ...] = tuple(signal for signal in list(globals().values()) if isinstance(signal, Signal))
"""All metrics."""

DYNAMIC_COUNTERS: tuple[Signal, ...] = tuple(s for s in SIGNALS if s.is_open and s.kind is Kind.COUNTER)
"""Counters without slots: label values known at run time only."""


def _series(scope: Scope) -> tuple[Series, ...]:
    table: list[Series] = []
    for signal in SIGNALS:
        if signal.scope is scope and not signal.is_open:
            for values in product(*signal.labels.values()):
                table.append(Series(signal, values, table[-1].first + table[-1].width if table else 0))
    return tuple(table)


SERIES: dict[Scope, tuple[Series, ...]] = {scope: _series(scope) for scope in (Scope.PROCESS, Scope.CONNECTOR)}
# A page has the process's slots first, then each connector's slots in the order of the configuration.
PROCESS_WIDTH, CONNECTOR_WIDTH = (
    sum(series.width for series in SERIES[scope]) for scope in (Scope.PROCESS, Scope.CONNECTOR)
)

_BY_VALUES = {(s.signal.name, *s.values): s for table in SERIES.values() for s in table}

# Processes with the same digest have the same slot table, and the same open counters.
_TABLE = [(s.signal.name, s.values, s.signal.bounds) for t in SERIES.values() for s in t]
_TABLE += [(s.name, tuple(s.labels), ()) for s in DYNAMIC_COUNTERS]
TABLE_DIGEST: int = zlib.crc32(repr(_TABLE).encode())


def slot(signal: Signal, *values: str) -> int:
    """Return the first slot of ``signal`` with these label values; KeyError if the table has no such series."""
    return _BY_VALUES[(signal.name, *values)].first


def slots(signal: Signal) -> dict[str, int]:
    """Return the first slot of each series of a signal with one label, by that label's value."""
    (values,) = signal.labels.values()
    return {value: slot(signal, value) for value in values}


def find(signal: Signal, *values: str) -> Series | None:
    """Return the series of ``signal`` with these label values, if there is one."""
    return _BY_VALUES.get((signal.name, *values))


def word(index: int, slot: int) -> int:
    """Return the word of a page that has this slot of the connector with this index; slot 0 is its first."""
    return PROCESS_WIDTH + index * CONNECTOR_WIDTH + slot


def series_words(connectors: int) -> Iterator[tuple[int, Series, int]]:
    """Yield each series of a page with the position of its connector (-1: none) and its first word."""
    for series in SERIES[Scope.PROCESS]:
        yield -1, series, series.first
    for index in range(connectors):
        for series in SERIES[Scope.CONNECTOR]:
            yield index, series, word(index, series.first)


LABEL = "connector"
CONNECTORS_AT_MOST = 1_000
VLLM_LABELS = ("model_name", "engine")
SERIES_AT_MOST = 256
"""Series of an open signal per engine and connector: further ones are merged, with OTHER_VALUE as every label."""


def labelnames(signal: Signal) -> list[str]:
    """Return the names of all labels of a metric, in the order of their values."""
    return [*VLLM_LABELS, *([LABEL] if signal.scope is Scope.CONNECTOR else []), *signal.labels]
