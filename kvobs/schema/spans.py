"""The table of kvobs's spans (name, coverage, attributes), and the record of a span on its way to the exporter.

EngineCore and workers write records, plain tuples with ids and times, into their pages; whoever reads these converts
them to spans (``export/span_export.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Meta

from kvobs.schema import signals
from kvobs.schema.signals import Series, Signal
from kvobs.vllm_api.hooks import HOOKS

__all__ = ["ATTRIBUTES", "SCOPE", "SPANS", "Reason", "Span"]

SCOPE = "kvobs"
"""The name of the instrumentation scope."""

ATTRIBUTES: dict[str, str] = {}
"""All attributes of spans with their meanings."""


def _attribute(name: str, meaning: str) -> str:
    ATTRIBUTES[name] = meaning
    return name


CONNECTOR = _attribute("kv_transfer.connector", "the connector's name")
ERROR_TYPE = _attribute("error.type", "the exception's class, load_failed, or wrong_bytes")
HOOK = _attribute("kv_transfer.hook", "vLLM's name of the hook")
MODE = _attribute("kv_transfer.mode", "sync or async")
OFFERED = _attribute(
    "kv_transfer.offered_tokens",
    "tokens offered: one attribute for each connector that answered, with its name after a dot",
)
OUTCOME = _attribute("kv_transfer.outcome", "hit, miss or not_read; ok, failed or aborted")
RANK = _attribute("kv_transfer.rank", "the worker's rank in its engine")
RANK_SKEW = _attribute("kv_transfer.rank_skew", "seconds that the slowest rank took longer than the fastest")
REASON = _attribute("kv_transfer.sampling.reason", "why the span exists: parent, level, slow or error")
REQUEST = _attribute("kv_transfer.request.id", "the request's id in the engine")
SLOWEST_RANK = _attribute("kv_transfer.slowest_rank", "the rank that took longest")
STALL = _attribute("kv_transfer.stall", "seconds that the step waited for this load on this rank")
TOKENS = _attribute("kv_transfer.tokens", "tokens of the load")
BYTES = _attribute("kv_transfer.bytes", "bytes of the load, over all ranks")
REMOTE_ENGINE = _attribute(
    "kv_transfer.remote.engine_id", "the engine that the request's kv_transfer_params name to read from"
)
REMOTE_HOST = _attribute("kv_transfer.remote.host", "that engine's host, as the params name it")
LOCAL_TOKENS = _attribute("kv_transfer.local_tokens", "tokens in vLLM's own prefix cache")
LOOKUPS = _attribute("kv_transfer.lookups", "number of lookups")
RECOMPUTED_TOKENS = _attribute("kv_transfer.recomputed_tokens", "tokens of a failed load, which are recomputed")
PROMPT_TOKENS = _attribute("kv_transfer.prompt_tokens", "tokens of the prompt")
HIT_RATE = _attribute(
    "kv_transfer.hit_rate", "share of the prompt's tokens that are loaded or in vLLM's own prefix cache"
)
SAVED = _attribute(
    "kv_transfer.saved", "seconds that computing the loaded tokens would have taken; missing without an estimate"
)
WAITED = _attribute(
    "kv_transfer.waited",
    "seconds that the request waited: until the step that schedules it again, or within the step of a sync load",
)
WRONG_BLOCKS = _attribute(
    "kv_transfer.wrong_blocks", "loaded blocks whose bytes differ from the computed ones, on one rank"
)
QUEUED = _attribute("kv_transfer.queued", "seconds from the request's arrival at the server to the start of its load")
LAYER = _attribute("kv_transfer.layer", "index of the layer, in the order of calls in the step")
LAYERS = _attribute("kv_transfer.layers", "number of layers called")
LAYERS_DURATION = _attribute("kv_transfer.layers_duration", "total seconds of the calls of all layers")
SLOWEST_LAYER = _attribute("kv_transfer.slowest_layer", "the layer that took longest")
SLOWEST_LAYER_DURATION = _attribute("kv_transfer.slowest_layer_duration", "seconds of the slowest layer")
ENGINE = _attribute("kv_transfer.engine", "vLLM's engine index")
GEN_AI_REQUEST = _attribute("gen_ai.request.id", "the request's id in vLLM's llm_request span")
GEN_AI_MODEL = _attribute("gen_ai.request.model", "the model's name")


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
LOAD = Span("kv.load", "scheduler", "from allocation to receipt on the last rank",
            CONNECTOR, signals.LOAD_DURATION, (MODE,))  # fmt: skip
LOAD_RANK = Span("kv.load.rank", "worker", "one rank's part of a load: from its order to its receipt")
LOAD_WRONG = Span("kv.load.wrong", "scheduler", "the moment when a load was found to have delivered wrong bytes")
SAVE = Span("kv.save", "scheduler", "a promised save: from the request's end to receipt on the last rank",
            CONNECTOR, signals.SAVE_HOLD)  # fmt: skip
SAVE_RANK = Span("kv.save.rank", "worker", "one rank's part of a promised save: from its order to its end")
CALL = Span("kv.call", "any", "one call into a connector that was slow or failed; with level calls, every call",
            HOOK, signals.CALL_DURATION, (HOOK,))  # fmt: skip

SPANS: dict[str, Span] = {span.name: span for span in (LOOKUP, LOAD, LOAD_RANK, LOAD_WRONG, SAVE, SAVE_RANK, CALL)}
"""All kinds of spans, by name."""


class Reason(StrEnum):
    """Why a span is exported."""

    PARENT = "parent"  # the caller's context is sampled
    LEVEL = "level"  # the option tracing.level asks for it, and the sampler agrees
    SLOW = "slow"  # always
    ERROR = "error"  # always


URGENT = (Reason.SLOW, Reason.ERROR)

Value = str | int | float

_Text = Annotated[str, Meta(max_length=1024)]
_Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Value = _Text | bool | _Integer | float  # OpenTelemetry's encoder accepts them: one other value loses the whole batch
_Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Record(NamedTuple):
    """The data of one span, written where it happened.

    ``parent_id`` is empty for a root. Times are ns since the epoch; ``observed_ns`` is the value observed in the span's
    histogram, 0 without one. ``links`` are traceparents.
    """

    name: str
    trace_id: Annotated[str, Meta(pattern=r"^(?!0+$)[0-9a-f]{32}\Z")]
    span_id: Annotated[str, Meta(pattern=r"^(?!0+$)[0-9a-f]{16}\Z")]
    parent_id: Annotated[str, Meta(pattern=r"^((?!0+$)[0-9a-f]{16})?\Z")]
    start_ns: _Time
    end_ns: _Time
    reason: Reason
    attributes: Annotated[Mapping[_Text, _Value], Meta(max_length=64)]
    observed_ns: _Time = 0
    links: Annotated[tuple[str, ...], Meta(max_length=64)] = ()

    @property
    def is_urgent(self) -> bool:
        """Whether the span is exported before others, and even if not sampled."""
        return self.reason in URGENT

    @property
    def title(self) -> str:
        """Return the span's displayed name, such as "kv.load cpu"."""
        subject = SPANS[self.name].subject
        return f"{self.name} {self.attributes[subject]}" if subject in self.attributes else self.name


def observed_in(record: Record) -> Series | None:
    """Return the series of the histogram that has this span's duration, and so its exemplar; None without one."""
    span = SPANS[record.name]
    if span.histogram is None or not record.observed_ns:
        return None
    values = [str(record.attributes.get(label)) for label in span.labels]
    if span is CALL and values[0] in HOOKS:
        values = [signals.hook_label(*values)]
    return signals.find(span.histogram, *values)
