"""What clients ask of a server in a run, and what its connectors are ordered to do then: data, no action.

Every story has the connectors ``cpu`` (vLLM's own, in host memory), ``disk`` and ``remote`` (steered, best-effort).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvobs.demo.run import entry, host_memory, multi_connector
from kvobs.telemetry.tracing.trace_context import TRACEPARENT, TraceContext, new_span_id, new_trace_id
from tests.engine.serving import prompt

NAMES = ("cpu", "disk", "remote")
DOCUMENTS = 12
HOST_MEMORY = 256 << 20
"""In bytes. Until a document comes again its blocks have left the engine's own cache, and not yet host memory."""
CACHE = ("--num-gpu-blocks-override", "192")
ONCE = math.inf


@dataclass(frozen=True)
class Ask:
    """One request: its orders to the connectors by name, and what else is special about it."""

    steer: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    document: bool = False
    """Ask about a document that was asked about before, and is known to ``cpu``."""
    documents: int = DOCUMENTS
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    hangs_up_after: float | None = None
    length: int = 1
    """How many times 200 tokens its prompt has."""

    def text(self, i: int) -> str:
        about = ("document", i % self.documents) if self.document else ("live", i)
        return " ".join(prompt(*about, *([part] if part else [])) for part in range(self.length))

    def context(self) -> Mapping[str, str]:
        """Return the headers of a client with a trace of its own."""
        return {TRACEPARENT: TraceContext(new_trace_id(), new_span_id(), is_sampled=True).traceparent, **self.headers}


@dataclass(frozen=True)
class Story:
    """A run's requests.

    ``rounds`` says what is asked in turn, by the share of the run that is over; ``events`` are asked beside that, each
    once in so many seconds while the share is at least that of its start.
    """

    rounds: Callable[[float], Sequence[Ask]]
    events: Sequence[tuple[float, float, Ask]]
    options: dict[str, Any]
    has_bad_stats: bool = False
    collector_is_down: tuple[float, float] = (2.0, 2.0)
    """From and to which share of the run; never, if over 1."""
    clients: int = 6
    args: Sequence[str] = CACHE
    model: Mapping[str, int] = field(default_factory=dict)
    """Its size, if it is not the tiny one."""

    def configuration(self) -> dict[str, Any]:
        """Return the server's ``--kv-transfer-config``."""
        disk = of_stack("BufferedConnector", tag="disk", bad_stats=self.has_bad_stats)
        config = multi_connector(
            host_memory(HOST_MEMORY), disk, of_stack("BestEffortConnector", tag="remote"), names=NAMES
        )
        config["kv_connector_extra_config"]["kvobs"] |= OPTIONS | self.options
        return {**config, "kv_load_failure_policy": "recompute"}


def of_stack(cls: str, **extra: Any) -> dict[str, Any]:
    return {**entry(cls, **extra), "kv_connector_module_path": "tests.stack.connectors"}


def load(tokens: int, rank_0: float, rank_1: float, **more: Any) -> dict[str, Any]:
    """Return orders for an asynchronous load that takes so many milliseconds on each rank."""
    return {"offer": tokens, "async": True, "load_ms": {"0": rank_0, "1": rank_1}, **more}


def save(rank_0: float, rank_1: float) -> dict[str, Any]:
    return {"promise": True, "save_ms": {"0": rank_0, "1": rank_1}}


OPTIONS = {"best_effort": ["remote"], "lookup_timeout_ms": 400, "link_gbps": {"remote": 0.1}}
DOCUMENT = Ask(document=True)
PLAIN = Ask()
HEALTHY = (
    DOCUMENT,
    Ask({"disk": load(96, 8, 14)}),
    DOCUMENT,
    Ask({"remote": load(160, 30, 36) | save(80, 90)}),
    PLAIN,
    DOCUMENT,
    Ask({"disk": load(64, 5, 7) | save(40, 60)}),
    Ask({"remote": load(128, 22, 30)}),
)
BROKEN = {"fail": "recv", "fail_ranks": [1]}

_EVERYTHING = (
    *HEALTHY,
    Ask({"disk": {"offer": 64}}),
    Ask({"disk": load(64, 5, 180)}),
    Ask({"remote": load(128, 40, 300, not_yet_ms=60) | save(200, 1200)}),
    Ask({"disk": load(64, 5, 5), "remote": load(160, 5, 5)}),
    Ask({"remote": load(96, 10, 10, **BROKEN)}),
    Ask({"disk": load(64, 10, 10, **BROKEN)}),
)
_RAISING = load(64, 5, 5, raise_in="start_load_kv", raise_ranks=[1])

EVERYTHING = Story(
    rounds=lambda _share: _EVERYTHING,
    events=(
        (9.0, 0.1, Ask({"remote": _RAISING})),
        (ONCE, 0.05, Ask({"disk": {"offer": 64, "fail": "blocks"}})),
        (3.0, 0.0, Ask({"disk": {"offer": 64, "sleep_in": "start_load_kv", "sleep_ms": {"1": 160}}})),
        (3.0, 0.0, Ask({"disk": {"sleep_in": "wait_for_save", "sleep_ms": {"0": 130}}})),
        (3.0, 0.0, Ask({"remote": {"not_yet_ms": 60_000}})),
        (4.0, 0.0, Ask({"disk": load(64, 5, 2600)})),
        (3.0, 0.0, Ask({"remote": save(5, 3000)})),
        (5.0, 0.0, Ask({"disk": save(5, 8000)})),  # something is open at any time, at the end too
        (15.0, 0.0, Ask({"remote": {"promise": True, "save_ms": {"0": 5}}})),  # rank 1 never reports
        (3.0, 0.0, Ask({"disk": {"stray": "load"}})),
        (3.0, 0.0, Ask({"disk": {"stray": "save"}})),
        (3.0, 0.0, Ask({"remote": {"stray": "failure"}})),
        (3.0, 0.0, Ask({"disk": load(64, 400, 400)}, hangs_up_after=0.1)),
        (2.0, 0.0, Ask(headers={TRACEPARENT: "garbage"})),
        (2.0, 0.0, Ask(params={"kvobs": {TRACEPARENT: 7}})),
    ),
    options={"stuck_after_s": 1.5, "slow_load_ms": 250, "verify": {"sample_ratio": 1.0}},
    has_bad_stats=True,
    collector_is_down=(0.5, 0.65),
)
"""Every metric that one engine without NIXL or a GPU can have, in one run."""

LONG = 4
_DOCUMENT = Ask(document=True, documents=DOCUMENTS // 2, length=LONG)
_LOADING = (
    _DOCUMENT,
    Ask({"disk": load(640, 40, 55)}, length=LONG),
    _DOCUMENT,
    Ask({"remote": load(704, 60, 75, not_yet_ms=30) | save(80, 90)}, length=LONG),
    Ask(length=LONG),
)


def _failing(share: float) -> Sequence[Ask]:
    if share < ONSET:
        return _LOADING
    slow = Ask({"remote": load(704, 80, 2400) | save(90, 3200)}, length=LONG)
    failed = Ask({"remote": load(640, 90, 90, **BROKEN)}, length=LONG)
    rounds = (*_LOADING, *_LOADING, *_LOADING)
    return tuple((slow, failed, failed)[i % 3] if "remote" in ask.steer else ask for i, ask in enumerate(rounds))


ONSET = 0.45
"""Share of the run that is over when ``remote`` begins to fail."""

ONE_FAILING = Story(
    rounds=_failing,
    events=(
        (ONCE, ONSET + 0.05, Ask({"remote": _RAISING}, length=LONG)),
        (ONCE, 0.8, Ask({"remote": load(704, 80, 60_000)}, length=LONG)),
    ),
    options={"stuck_after_s": 3, "link_gbps": {"remote": 2}},
    clients=2,
    args=(*CACHE, "--enable-chunked-prefill", "--max-num-batched-tokens", "128"),
    model={"layers": 12, "hidden": 512},
)
"""All is well, then one of three connectors fails, and at last a load of it hangs. Loads pay: the model is large, and
the steps of others, whose end a load waits for, are short."""
