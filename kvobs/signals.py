"""Every metric of kvobs, once, as data: name, kind, help, labels and their closed sets of values, bucket bounds.

The recorder counts by slot, the wire ships slots, the API server exposes them: all three read this table, so none
can drift. Labels on all metrics, before those listed: vLLM's own (``model_name``, ``engine``), and ``connector``, the
child's name, on those of a child. Durations are nanoseconds inside kvobs and on the wire, seconds in Prometheus.
"""

import zlib
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import Enum
from itertools import product

from kvobs.hooks import HOOKS, Cadence, Hook, Side


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Scope(Enum):
    """Whom a metric is about."""

    CHILD = "child"
    PROCESS = "process"  # kvobs itself: no ``connector`` label


OPEN: tuple[str, ...] = ()
"""The values of a label whose set is known at run time only: it is short there, and never holds ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """One metric; there is one object of each.

    ``labels`` maps a label's name to its closed set of values, or to ``OPEN``. ``bounds`` are a histogram's upper
    bounds as exponents: k stands for 2**k nanoseconds, inclusive.
    """

    name: str
    help: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kind: Kind = Kind.COUNTER
    bounds: tuple[int, ...] = ()
    scope: Scope = Scope.CHILD

    @property
    def is_open(self) -> bool:
        """Whether a label's values are known at run time only: such a metric has no slots."""
        return OPEN in self.labels.values()

    @property
    def unit(self) -> float:
        """Return what a number on the wire is multiplied with for Prometheus."""
        return 1e-9 if "_seconds" in self.name else 1

    @property
    def buckets(self) -> list[float]:
        """Return a histogram's upper bounds as Prometheus wants them."""
        return [2**k * self.unit for k in self.bounds]

    def bucket(self, ns: int) -> int:
        """Return which of a histogram's buckets a duration falls into; the last is above all bounds."""
        return bisect_left(self.bounds, (ns - 1).bit_length() if ns else 0)


def is_timed(hook: Hook) -> bool:
    """Return whether a child's answer to this hook takes time at all: not for facts about its class or itself."""
    return hook.side is not Side.CONFIG and not hook.is_property


OTHER = "other"


def hook_label(name: str) -> str:
    """Return the value of the label ``hook``: the hook's own name, or "other" for hooks called once or on demand."""
    return OTHER if HOOKS[name].cadence is Cadence.ONCE else name


DIRECTIONS = ("h2d", "d2h")  # host to device, device to host
_MODES = ("sync", "async")
_TRANSFERS = ("load", "save")
_HOOKS = tuple(dict.fromkeys(hook_label(hook.name) for hook in HOOKS.values() if is_timed(hook)))

# 4 us to 4 s by fours: calls differ by orders of magnitude, and there is one such histogram per hook.
_CALL_BOUNDS = tuple(range(12, 34, 2))
# 1 ms to 1 s by twos, and a tail to 17 s.
_TRANSFER_BOUNDS = (*range(20, 31), 32, 34)
# 16 us to 4 s, by twos from 1 ms to 67 ms, where a step's own length lies.
_STALL_BOUNDS = (14, 16, 18, *range(20, 27), 28, 30, 32)
# By fours, where the order of magnitude will do: 1 ms to 4 s, 64 us to 4 s, 256 us to 67 ms.
_DELAY_BOUNDS, _SKEW_BOUNDS, _COPY_BOUNDS = (tuple(range(*ends, 2)) for ends in ((20, 34), (16, 34), (18, 28)))

CALL_DURATION = Signal(
    "kvobs_call_duration_seconds", "Calls into the connector, by hook.", {"hook": _HOOKS}, Kind.HISTOGRAM, _CALL_BOUNDS
)
CALL_ERRORS = Signal(
    "kvobs_call_errors_total",
    "Exceptions out of the connector, by hook and by the exception's class.",
    {"hook": OPEN, "error_type": OPEN},
)
SLOW_CALLS = Signal(
    "kvobs_slow_calls_total", "Calls into the connector that took longer than slow_call_ms.", {"hook": _HOOKS}
)
LOOKUPS = Signal(
    "kvobs_lookups_total",
    "Lookups as vLLM asked them, repeats included.",
    {"outcome": ("hit", "miss", "pending", "timeout")},
)
LOOKUP_DELAY = Signal(
    "kvobs_lookup_delay_seconds",
    "Time from the connector's first 'not yet' about a request to its answer.",
    kind=Kind.HISTOGRAM,
    bounds=_DELAY_BOUNDS,
)
OFFERED_TOKENS = Signal(
    "kvobs_offered_tokens_total", "Tokens the connector could have loaded, once per request (tokens)."
)
ADMITTED_TOKENS = Signal("kvobs_admitted_tokens_total", "Tokens vLLM decided to load from the connector (tokens).")
FORGONE_TOKENS = Signal(
    "kvobs_forgone_tokens_total", "Tokens the connector offered beyond what the chosen one did (tokens)."
)
UNCLAIMED_OFFERS = Signal(
    "kvobs_unclaimed_offers_total", "Requests for which the connector offered tokens and was not chosen."
)
LOADS = Signal(
    "kvobs_loads_total",
    "Loads that ended, by mode and outcome.",
    {"mode": _MODES, "outcome": ("ok", "failed", "aborted")},
)
LOAD_DURATION = Signal(
    "kvobs_load_duration_seconds",
    "Loads that ended well: async from allocation to the last rank's receipt, sync on the slowest rank.",
    {"mode": _MODES},
    Kind.HISTOGRAM,
    _TRANSFER_BOUNDS,
)
LOAD_TOKENS = Signal("kvobs_load_tokens_total", "Tokens loaded, failed loads not counted (tokens).")
LOAD_BYTES = Signal(
    "kvobs_load_bytes_total", "Bytes loaded over all ranks: tokens times their size in the KV cache (bytes)."
)
LOAD_STALL = Signal(
    "kvobs_load_stall_seconds",
    "Time a step's forward waited for loads: wait_for_layer_load, and start_load_kv where a sync load is due.",
    kind=Kind.HISTOGRAM,
    bounds=_STALL_BOUNDS,
)
RECOMPUTED_TOKENS = Signal(
    "kvobs_recomputed_tokens_total",
    "Tokens that failed loads did not bring: computed again, unless kv_load_failure_policy is fail (tokens).",
)
FAILED_SYNC_LOADS = Signal(
    "kvobs_failed_sync_loads_total", "Synchronous loads that failed in a step whose blocks the siblings may have saved."
)
SAVES = Signal(
    "kvobs_saves_total",
    "Saves promised at the end of a request and reported; abandoned: not reported by a connector in quarantine.",
    {"outcome": ("ok", "abandoned")},
)
SAVE_HOLD = Signal(
    "kvobs_save_hold_seconds",
    "Time from a request's end to the promised save's completion: how long its blocks were held.",
    kind=Kind.HISTOGRAM,
    bounds=_TRANSFER_BOUNDS,
)
SAVE_STALL = Signal(
    "kvobs_save_stall_seconds",
    "Time a step spent in save_kv_layer and wait_for_save.",
    kind=Kind.HISTOGRAM,
    bounds=_STALL_BOUNDS,
)
IN_FLIGHT = Signal("kvobs_in_flight", "Open loads, and open promised saves.", {"kind": _TRANSFERS}, Kind.GAUGE)
OLDEST_IN_FLIGHT = Signal(
    "kvobs_oldest_in_flight_timestamp_seconds",
    "Start of the oldest open load or promised save, as Unix time; NaN while none is open.",
    {"kind": _TRANSFERS},
    Kind.GAUGE,
)
RANK_SKEW = Signal(
    "kvobs_rank_skew_seconds",
    "Time between the first and the last rank of a load or promised save.",
    {"kind": _TRANSFERS},
    Kind.HISTOGRAM,
    _SKEW_BOUNDS,
)
SLOWEST_RANK = Signal(
    "kvobs_slowest_rank_total", "Loads and promised saves that ended last on this rank.", {"rank": OPEN}
)
STUCK_TRANSFERS = Signal(
    "kvobs_stuck_transfers_total",
    "Loads and promised saves that this rank had not reported stuck_after_s after another one did.",
    {"rank": OPEN},
)
FOREIGN_REPORTS = Signal(
    "kvobs_foreign_reports_total",
    "Reports about a load or save that the connector does not own; they have no effect.",
    {"kind": ("load", "failure", "save")},
)
QUARANTINED = Signal(
    "kvobs_quarantined", "1 while the connector, of those in the option isolate, is left out.", kind=Kind.GAUGE
)
BLOCK_COPY_DURATION = Signal(
    "kvobs_block_copy_duration_seconds",
    "Copies of blocks between the KV cache and the connector's host buffer, by the operation that vLLM hands it.",
    {"direction": DIRECTIONS},
    Kind.HISTOGRAM,
    _COPY_BOUNDS,
)
BLOCK_COPY_BYTES = Signal(
    "kvobs_block_copy_bytes_total", "Bytes that these copies moved, on all ranks (bytes).", {"direction": DIRECTIONS}
)
CONNECTOR_INFO = Signal(
    "kvobs_connector_info",
    "What is configured: always 1.",
    dict.fromkeys(("index", "class", "role", "load_policy", "failure_policy"), OPEN),
    Kind.GAUGE,
)
BUILD_INFO = Signal(
    "kvobs_build_info",
    "What is running: always 1.",
    dict.fromkeys(("version", "vllm_version"), OPEN),
    Kind.GAUGE,
    scope=Scope.PROCESS,
)
INTERNAL_ERRORS = Signal(
    "kvobs_internal_errors_total",
    "Faults inside kvobs's telemetry, contained: what was being measured is lost, serving is not touched.",
    {"where": ("record", "trace", "flush", "merge", "rebuild", "apply", "cut", "summarize", "version")},
    scope=Scope.PROCESS,
)
SELF_SECONDS = Signal(
    "kvobs_self_seconds_total",
    "Time that kvobs's telemetry takes; of recording calls an estimate: calls times their cost as measured once.",
    {"where": ("record", "flush", "merge", "apply", "cut")},
    scope=Scope.PROCESS,
)
SPANS_DROPPED = Signal(
    "kvobs_spans_dropped_total",
    "Spans lost: more than 64 a flush or 200 a second, the exporter's queue full, or not taken by the collector.",
    {"where": ("flush", "rate", "queue", "export", "malformed")},
    scope=Scope.PROCESS,
)
MALFORMED_CONTEXTS = Signal(
    "kvobs_malformed_contexts_total",
    "Requests with something in the trace headers or in kv_transfer_params.kvobs that is no trace context.",
    {"source": ("headers", "params")},
    scope=Scope.PROCESS,
)

SIGNALS: tuple[Signal, ...] = tuple(signal for signal in list(globals().values()) if isinstance(signal, Signal))


@dataclass(frozen=True, slots=True)
class Series:
    """One combination of a signal's label values, and where it is in the slot table.

    A histogram has a slot for each bucket, for what is above the last bound, and for the sum.
    """

    signal: Signal
    values: tuple[str, ...]
    first: int

    @property
    def width(self) -> int:
        """Return how many slots it has."""
        return len(self.signal.bounds) + 2 if self.signal.kind is Kind.HISTOGRAM else 1


def _series(scope: Scope) -> tuple[Series, ...]:
    table: list[Series] = []
    first = 0
    for signal in SIGNALS:
        if signal.scope is scope and not signal.is_open:
            for values in product(*signal.labels.values()):
                table.append(Series(signal, values, first))
                first += table[-1].width
    return tuple(table)


SERIES: dict[Scope, tuple[Series, ...]] = {scope: _series(scope) for scope in Scope}
# In a payload the process's slots come first, then those of each child in the order of the configuration.
PROCESS_WIDTH, CHILD_WIDTH = (sum(series.width for series in SERIES[scope]) for scope in (Scope.PROCESS, Scope.CHILD))

_BY_VALUES = {(s.signal.name, *s.values): s for table in SERIES.values() for s in table}

# Two peers with the same digest mean the same thing by a slot.
TABLE_DIGEST: int = zlib.crc32(
    repr([(s.signal.name, s.values, s.signal.bounds) for t in SERIES.values() for s in t]).encode()
)


def slot(signal: Signal, *values: str) -> int:
    """Return the first slot of ``signal`` with these label values; KeyError when the table has no such series."""
    return _BY_VALUES[(signal.name, *values)].first


def find(signal: Signal, *values: str) -> Series | None:
    """Return the series of ``signal`` with these label values, if there is one."""
    return _BY_VALUES.get((signal.name, *values))


_FIRSTS = {scope: [series.first for series in table] for scope, table in SERIES.items()}


def locate(slot: int) -> tuple[Series, int, int]:
    """Return whose slot of a payload this is: the series, which of its slots, and the child's position (-1: none)."""
    scope, child = Scope.PROCESS, -1
    if slot >= PROCESS_WIDTH:
        scope = Scope.CHILD
        child, slot = divmod(slot - PROCESS_WIDTH, CHILD_WIDTH)
    series = SERIES[scope][bisect_right(_FIRSTS[scope], slot) - 1]
    return series, slot - series.first, child
