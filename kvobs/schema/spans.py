"""The table of kvobs's spans (name, coverage, attributes), and the record of a span on its way to the exporter.

EngineCore and workers write records, plain tuples with ids and times; the exporter or the API server converts them to
spans (``export/span_export.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from kvobs.schema import signals
from kvobs.schema.signals import Signal
from kvobs.vllm_api.hooks import HOOKS

__all__ = ["ATTRIBUTES", "SCOPE", "SPANS", "Reason", "Span"]

SCOPE = "kvobs"
"""The name of the instrumentation scope."""

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
PROMPT_TOKENS = "kv_transfer.prompt_tokens"
HIT_RATE = "kv_transfer.hit_rate"
SAVED = "kv_transfer.saved"
WAITED = "kv_transfer.waited"
DECISION = "kv_transfer.decision"
PREDICTED = "kv_transfer.predicted"
PREDICTED_COMPUTING = "kv_transfer.predicted_computing"
LAYER = "kv_transfer.layer"
LAYERS = "kv_transfer.layers"
LAYERS_DURATION = "kv_transfer.layers_duration"
SLOWEST_LAYER = "kv_transfer.slowest_layer"
SLOWEST_LAYER_DURATION = "kv_transfer.slowest_layer_duration"
ENGINE = "kv_transfer.engine"
GEN_AI_REQUEST = "gen_ai.request.id"
GEN_AI_MODEL = "gen_ai.request.model"

ATTRIBUTES: dict[str, str] = {
    CONNECTOR: "the connector's name",
    ERROR_TYPE: "the exception's class, or load_failed",
    HOOK: "vLLM's name of the hook",
    MODE: "sync or async",
    OFFERED: "tokens offered: one attribute for each connector that answered, with its name after a dot",
    OUTCOME: "hit or miss; ok, failed or aborted",
    RANK: "the worker's rank in its engine",
    RANK_SKEW: "seconds by which the slowest rank took longer than the quickest",
    REASON: "why the span exists: parent, level, slow or error",
    REQUEST: "the request's id in the engine",
    SLOWEST_RANK: "the rank that took longest",
    STALL: "seconds that the step waited for this load on this rank",
    TOKENS: "tokens of the load",
    BYTES: "bytes of the load, over all ranks",
    LOCAL_TOKENS: "tokens in vLLM's own prefix cache",
    LOOKUPS: "number of lookups",
    RECOMPUTED_TOKENS: "tokens of a failed load, to be recomputed",
    PROMPT_TOKENS: "tokens of the prompt",
    HIT_RATE: "share of the prompt's tokens that are loaded or in vLLM's own prefix cache",
    SAVED: "seconds that computing the loaded tokens would have taken; missing without an estimate",
    WAITED: "seconds that the request waited: to the step that resumes it, or in the step of a sync load",
    DECISION: "reason of kvobs_load_decisions_total; with load_policy fastest",
    PREDICTED: "predicted seconds until the request resumes: one attribute per connector, with its name after a dot",
    PREDICTED_COMPUTING: "predicted seconds until the request resumes without a load",
    LAYER: "index of the layer, in the order of calls in the step",
    LAYERS: "number of layers called",
    LAYERS_DURATION: "total seconds of the calls of all layers",
    SLOWEST_LAYER: "the layer that took longest",
    SLOWEST_LAYER_DURATION: "seconds of the slowest layer",
    ENGINE: "vLLM's engine index",
    GEN_AI_REQUEST: "the request's id in vLLM's llm_request span",
    GEN_AI_MODEL: "the model's name",
}
"""All attributes of spans with their meanings."""


@dataclass(frozen=True, slots=True)
class Span:
    """One kind of span.

    ``subject`` is the attribute that completes its title. ``histogram`` gets an exemplar of each exported span, in the
    series selected by ``labels`` (names of attributes).
    """

    name: str
    process: str
    covers: str
    subject: str = ""
    histogram: Signal | None = None
    labels: tuple[str, ...] = ()


LOOKUP = Span("kv.lookup", "scheduler", "from the first to the last lookup of a request, with each connector's offer")
LOAD = Span(
    "kv.load", "scheduler", "from allocation to receipt on the last rank", CONNECTOR, signals.LOAD_DURATION, (MODE,)
)
LOAD_RANK = Span("kv.load.rank", "worker", "one rank's part of a load: from its order to its receipt")
SAVE = Span(
    "kv.save",
    "scheduler",
    "a promised save: from the request's end to the release of its blocks",
    CONNECTOR,
    signals.SAVE_HOLD,
)
SAVE_RANK = Span("kv.save.rank", "worker", "one rank's part of a promised save: from its order to its end")
CALL = Span(
    "kv.call",
    "any",
    "one call into a connector that was slow or failed; with level calls, every call",
    HOOK,
    signals.CALL_DURATION,
    (HOOK,),
)

SPANS: dict[str, Span] = {span.name: span for span in (LOOKUP, LOAD, LOAD_RANK, SAVE, SAVE_RANK, CALL)}
"""All kinds of spans, by name."""


class Reason(StrEnum):
    """Why a span is exported."""

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
    """The data of one span, written where it happened.

    ``parent_id`` is empty for a root. Times are ns since the epoch; ``observed_ns`` is the value observed in the span's
    histogram, 0 without one. ``links`` are traceparents.
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
        """Whether the span is exported before others, and even if not sampled."""
        return self.reason in URGENT

    @property
    def title(self) -> str:
        """Return the span's displayed name, such as "kv.load cpu"."""
        subject = SPANS[self.name].subject
        return f"{self.name} {self.attributes[subject]}" if subject in self.attributes else self.name

    @classmethod
    def read(cls, row: Any) -> Record | None:
        """Parse a record from a payload; None if malformed."""
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


def observed_in(record: Record) -> signals.Series | None:
    """Return the series of a histogram that has this span's duration, and so its exemplar; None if none has."""
    span = SPANS[record.name]
    if span.histogram is None or not record.observed_ns:
        return None
    values = [str(record.attributes.get(label)) for label in span.labels]
    if span is CALL and values[0] in HOOKS:
        values = [signals.hook_label(*values)]
    return signals.find(span.histogram, *values)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT_AT_MOST


def _is_value(value: Any) -> bool:
    """Return whether OpenTelemetry's encoder accepts a value: one rejected value loses the whole batch."""
    return _is_text(value) or isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _is_hex(value: Any, digits: int) -> bool:
    return isinstance(value, str) and _HEX[digits].fullmatch(value) is not None and bool(value.strip("0"))
