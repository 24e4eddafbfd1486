"""Read and write trace contexts (W3C ``traceparent`` strings), create unique ids, and read shared OTEL_* variables.

Input from clients arrives here unchecked: only a well-formed string of bounded length is a context.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvobs.schema import spans

DISABLED = "OTEL_SDK_DISABLED"
KEY = "kvobs"  # in kv_transfer_params, from a prefill engine to a decode engine
TRACEPARENT = "traceparent"
REPORT = "report"  # next to it: a client's question, or a prefill engine's answer
BLOCKS = "blocks"  # next to it: fingerprints of blocks that the prefill engine computed
_LONG = 512  # characters; version 00 has 55, a later one may have more behind
_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1  # bit 0 of the flags; others may be set too
_ids = random.Random()  # vLLM seeds the module's identically everywhere; os.urandom gives the GIL away: 100 us
# The seed of C, not of Python: what Python code raises there is lost, also the exception of a signal's handler.
os.register_at_fork(after_in_child=super(random.Random, _ids).seed)
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
ID_AT_MOST = 256  # characters; a client may choose its request's id
_REMOTE = (
    ("remote_engine_id", spans.REMOTE_ENGINE),
    ("remote_bootstrap_addr", spans.REMOTE_HOST),  # Mooncake's
    ("remote_host", spans.REMOTE_HOST),
)


class TraceContext(NamedTuple):
    """A reference to a span by W3C Trace Context: hex ids of 32 and 16 digits."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse(value: object) -> TraceContext | None:
    """Parse a ``traceparent``; None if malformed. Source: W3C Trace Context, section 3.2."""
    if not isinstance(value, str) or len(value) > _LONG:
        return None
    if (match := _PATTERN.fullmatch(value)) is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


class MalformedContextError(ValueError):
    """A trace context is present but malformed."""


def of_headers(headers: object) -> TraceContext | None:
    """Return the context in a request's trace headers, None without one; raise ``MalformedContextError``."""
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise MalformedContextError
    if TRACEPARENT not in headers:
        return None
    if (context := parse(headers[TRACEPARENT])) is None:
        raise MalformedContextError
    return context


def of_params(params: object) -> TraceContext | None:
    """Return the context that a prefill engine's kvobs put into ``kv_transfer_params``, None without one.

    Raises:
        MalformedContextError: there is something else in its place.
    """
    if not isinstance(params, Mapping) or KEY not in params:
        return None
    fields = params[KEY]
    if not isinstance(fields, Mapping) or not any(field in fields for field in (TRACEPARENT, REPORT, BLOCKS)):
        raise MalformedContextError
    return of_headers(fields)


def remote_of(params: object) -> dict[str, str]:
    """Return the attributes of the prefill engine that ``kv_transfer_params`` name; none without a legible name."""
    if not isinstance(params, Mapping) or not params.get("do_remote_prefill"):
        return {}
    named = ((attribute, params.get(key)) for key, attribute in _REMOTE)
    return {key: value[:ID_AT_MOST] for key, value in named if isinstance(value, str) and value.isprintable()}


def field_of(params: object, field: str) -> Any:
    """Return a field of kvobs in ``kv_transfer_params``; None without one."""
    fields = params.get(KEY) if isinstance(params, Mapping) else None
    return fields.get(field) if isinstance(fields, Mapping) else None


def into_params(params: Mapping[str, Any] | None, field: str, value: object) -> dict[str, Any]:
    """Return ``kv_transfer_params`` with a field for a decode engine or a client; a connector's value there stays."""
    fields = params.get(KEY, {}) if params is not None else {}
    more = {KEY: {field: value, **fields}} if isinstance(fields, Mapping) else {}
    return {**(params or {}), **more}


def new_trace_id() -> str:
    """Return a random trace id."""
    return f"{_ids.getrandbits(128):032x}"


def new_span_id() -> str:
    """Return a random span id."""
    return f"{_ids.getrandbits(64):016x}"


def external_id(request_id: str) -> str:
    """Return the request's id of vLLM's ``llm_request`` span: without the 8 random digits that vLLM appends."""
    return _SUFFIX.sub("", request_id)[:ID_AT_MOST]


def activated(call: Callable[..., Any], context_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return ``call`` with the OpenTelemetry context of its first argument active, so that its spans join the trace."""
    from opentelemetry.context import attach, detach

    def active(subject: Any, *args: Any, **kwargs: Any) -> Any:
        context = context_of(subject)
        if context is None:
            return call(subject, *args, **kwargs)
        token = attach(context)
        try:
            return call(subject, *args, **kwargs)
        finally:
            detach(token)

    return active


def as_otel(context: TraceContext) -> Any:
    """Return it as an OpenTelemetry ``Context``."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    parent = SpanContext(
        int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=TraceFlags(context.is_sampled)
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def is_disabled() -> bool:
    """Return whether the environment switches OpenTelemetry off."""
    return os.environ.get(DISABLED, "").strip().lower() == "true"


def otlp_protocol(*variables: str) -> str:
    """Return the OTLP protocol of the first variable that is set, "grpc" or "http/protobuf"; without any "grpc".

    Raises:
        ValueError: it is another one.
    """
    protocol = next((value for name in variables if (value := os.environ.get(name))), "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"the OTLP protocol is {protocol!r}, allowed: 'grpc', 'http/protobuf'")
    return protocol
