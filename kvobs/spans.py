"""Every span of kvobs, once, as data: name, what it covers, attributes; and a span's record on its way to be cut.

EngineCore and workers write records, plain tuples with ids and times already chosen; the API server makes spans of
them (see ``tracing``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from kvobs import signals
from kvobs.signals import Signal

SCOPE = "kvobs"  # the instrumentation scope

CONNECTOR = "kv_transfer.connector"
ERROR_TYPE = "error.type"
HOOK = "kv_transfer.hook"
MODE = "kv_transfer.mode"
OFFERED = "kv_transfer.offered_tokens"
OUTCOME = "kv_transfer.outcome"
RANK = "kv_transfer.rank"
RANK_SKEW = "kv_transfer.rank_skew"
REASON = "kv_transfer.sampling.reason"
REQUEST = "kv_transfer.request.id"
SLOWEST_RANK = "kv_transfer.slowest_rank"
STALL = "kv_transfer.stall"
TOKENS = "kv_transfer.tokens"
BYTES = "kv_transfer.bytes"
LOCAL_TOKENS = "kv_transfer.local_tokens"
LOOKUPS = "kv_transfer.lookups"
RECOMPUTED_TOKENS = "kv_transfer.recomputed_tokens"
LAYER = "kv_transfer.layer"
LAYERS = "kv_transfer.layers"
LAYERS_DURATION = "kv_transfer.layers_duration"
SLOWEST_LAYER = "kv_transfer.slowest_layer"
SLOWEST_LAYER_DURATION = "kv_transfer.slowest_layer_duration"
ENGINE = "kv_transfer.engine"
GEN_AI_REQUEST = "gen_ai.request.id"
GEN_AI_MODEL = "gen_ai.request.model"

ATTRIBUTES: dict[str, str] = {
    CONNECTOR: "the child's name",
    ERROR_TYPE: "what went wrong: the exception's class, or load_failed",
    HOOK: "vLLM's name of the hook",
    MODE: "sync or async",
    OFFERED: "tokens that a child offered: one attribute for each child that answered, with its name behind a dot",
    OUTCOME: "how it ended: hit or miss; ok, failed or aborted",
    RANK: "the worker's rank in its engine",
    RANK_SKEW: "seconds between the first and the last rank",
    REASON: "why the span exists: parent, level, slow or error",
    REQUEST: "the request's id in the engine",
    SLOWEST_RANK: "the rank that was last",
    STALL: "seconds that the step waited for this load on this rank",
    TOKENS: "tokens of the load",
    BYTES: "bytes of the load, over all ranks",
    LOCAL_TOKENS: "tokens that vLLM had in its own cache",
    LOOKUPS: "how often vLLM asked",
    RECOMPUTED_TOKENS: "tokens that a failed load did not bring",
    LAYER: "which of the step's layers, by the order of their calls",
    LAYERS: "how many layers were called",
    LAYERS_DURATION: "seconds that the calls of all layers took together",
    SLOWEST_LAYER: "the layer that took longest",
    SLOWEST_LAYER_DURATION: "seconds that it took",
    ENGINE: "vLLM's engine index",
    GEN_AI_REQUEST: "the request's id as vLLM's llm_request has it",
    GEN_AI_MODEL: "the model's name",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One kind of span.

    ``subject`` is the attribute that completes its title; ``histogram`` gets an exemplar of each exported span, in the
    series that ``labels``, the names of attributes, choose.
    """

    name: str
    process: str
    covers: str
    subject: str = ""
    histogram: Signal | None = None
    labels: tuple[str, ...] = ()


LOOKUP = Span("kv.lookup", "scheduler", "first to last lookup of a request; what each child offered")
LOAD = Span("kv.load", "scheduler", "allocation to receipt on the last rank", CONNECTOR, signals.LOAD_DURATION, (MODE,))
LOAD_RANK = Span("kv.load.rank", "worker", "one rank's part of a load: told of it to received")
SAVE = Span(
    "kv.save", "scheduler", "a promised save: request's end to its blocks' release", CONNECTOR, signals.SAVE_HOLD
)
SAVE_RANK = Span("kv.save.rank", "worker", "one rank's part of a promised save: told of it to saved")
CALL = Span(
    "kv.call",
    "any",
    "one call into a child that was slow or failed; any, with level calls",
    HOOK,
    signals.CALL_DURATION,
    (HOOK,),
)

SPANS: dict[str, Span] = {span.name: span for span in (LOOKUP, LOAD, LOAD_RANK, SAVE, SAVE_RANK, CALL)}


class Reason(StrEnum):
    """Why a span exists."""

    PARENT = "parent"  # the caller's context is sampled
    LEVEL = "level"  # the option tracing.level asks for it, and the sampler agrees
    SLOW = "slow"  # always
    ERROR = "error"  # always


_REASONS = {str(reason) for reason in Reason}
URGENT = (Reason.SLOW, Reason.ERROR)

Value = str | int | float

_HEX = {32: re.compile(r"[0-9a-f]{32}"), 16: re.compile(r"[0-9a-f]{16}")}
_ATTRIBUTES_AT_MOST = 64
_LINKS_AT_MOST = 64
_TEXT_AT_MOST = 1024  # characters
_TIME_AT_MOST = 2**63


class Record(NamedTuple):
    """One span: all that is known of it where it happened.

    ``parent_id`` is empty for a root. Times are ns since the epoch; ``observed_ns`` is what the span's histogram saw,
    0 if nothing. ``links`` are traceparents.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    reason: str
    attributes: Mapping[str, Value]
    observed_ns: int = 0
    links: tuple[str, ...] = ()

    @property
    def is_urgent(self) -> bool:
        """Whether it goes out whatever was sampled, and before others."""
        return self.reason in URGENT

    @property
    def title(self) -> str:
        """Return the span's name as it is shown, such as "kv.load cpu"."""
        subject = SPANS[self.name].subject
        return f"{self.name} {self.attributes[subject]}" if subject in self.attributes else self.name

    @classmethod
    def read(cls, row: Any) -> Record | None:
        """Read what came over the wire; None when it is not well formed."""
        if not isinstance(row, list | tuple) or len(row) != len(cls._fields):
            return None
        record = cls(*row)
        times = (record.start_ns, record.end_ns, record.observed_ns)
        is_good = (
            isinstance(record.name, str)
            and record.name in SPANS
            and _is_hex(record.trace_id, 32)
            and _is_hex(record.span_id, 16)
            and (record.parent_id == "" or _is_hex(record.parent_id, 16))
            and all(type(time) is int and 0 <= time < _TIME_AT_MOST for time in times)
            and isinstance(record.reason, str)
            and record.reason in _REASONS
            and isinstance(record.attributes, Mapping)
            and len(record.attributes) <= _ATTRIBUTES_AT_MOST
            and all(_is_text(k) and _is_value(v) for k, v in record.attributes.items())
            and isinstance(record.links, list | tuple)
            and len(record.links) <= _LINKS_AT_MOST
        )
        return record if is_good else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT_AT_MOST


def _is_value(value: Any) -> bool:
    """Return whether OpenTelemetry's encoder takes it: one value that it refuses costs the whole batch."""
    return _is_text(value) or isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and _HEX[digits].fullmatch(value) is not None and bool(value.strip("0"))
