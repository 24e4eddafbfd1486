"""Spans of slow and failed loads, as an engine's processes write them."""

from typing import Any

from kvobs.schema.spans import Reason, Record

MS = 10**6
BEGIN_NS = 1_795_888_800 * 10**9


def span(
    name: str, number: int, begin_ms: float, ms: float, *, parent: int = 0, reason: Reason = Reason.SLOW, **more: Any
) -> Record:
    """Return a span; of ``more`` a double underscore in a name is a dot."""
    attributes = {f"kv_transfer.{key.replace('__', '.')}": value for key, value in more.items()}
    if "error" in more:
        attributes["error.type"] = attributes.pop("kv_transfer.error")
    begin_ns = BEGIN_NS + round(begin_ms * MS)
    above = f"{parent:016x}" if parent else ""
    return Record(name, f"{9:032x}", f"{number:016x}", above, begin_ns, begin_ns + round(ms * MS), reason, attributes)


REQUEST: dict[str, Any] = {"request__id": "cmpl-8f56e1363ce8d56a-0-1f2e3d4c"}
OF_LOAD: dict[str, Any] = {**REQUEST, "connector": "remote"}
HEAD = span(
    "kv.load", 3, 14.68, 872.58, **OF_LOAD, mode="async", outcome="ok", tokens=160, bytes=655_360, slowest_rank=1,
    rank_skew=0.84022, queued=0.01468, waited=0.8741, saved=0.0179, offered_tokens__remote=160, offered_tokens__cpu=0,
    local_tokens=0, prompt_tokens=215,
)  # fmt: skip
RANKS = [
    span("kv.load.rank", 4, 15.36, 31.07, parent=3, **OF_LOAD, rank=0),
    span("kv.load.rank", 5, 15.97, 871.29, parent=3, **OF_LOAD, rank=1),
]
SLOW = [HEAD, *RANKS]
FAILED = [
    span("kv.load", 6, 2000, 31.2, reason=Reason.ERROR, request__id="cmpl-0a1b2c3d4e5f6071-0-9a8b7c6d",
         connector="cpu", mode="async", outcome="failed", tokens=896, bytes=1_769_472, error="load_failed",
         recomputed_tokens=896, queued=0.0042, waited=0.0335, prompt_tokens=900),
    span("kv.load.rank", 7, 2001, 29, parent=6, reason=Reason.ERROR, request__id="cmpl-0a1b2c3d4e5f6071-0-9a8b7c6d",
         connector="cpu", rank=0, error="load_failed"),
]  # fmt: skip
