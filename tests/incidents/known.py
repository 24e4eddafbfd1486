"""The incidents that the tests know: what is to be seen of each, and where; and what a run saw."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.published import write_row

GUILTY, INNOCENT = "remote", "cpu"
PLACES = ("log", "top", "check", "overview")
RESULTS = Path(__file__).parent / "results.json"
"""What the last published run saw; docs/reliability.md shows it."""
PUBLISH = "KVOBS_INCIDENTS"
"""An environment variable: with it, a run replaces the results."""


SEEN_S = 20
"""So soon it is to be seen on a machine that nobody else uses: asked of the published run."""
HANGS, FAILS = "^remote: (Hangs)", "^  (Failing)"
STOPS_S = 120
"""Within this an alert fires about what stops an engine."""
LOOKUP = "get_num_new_matched_tokens"


@dataclass(frozen=True)
class Incident:
    """What is to be seen of an incident: patterns, empty where nothing is."""

    title: str
    log: str = ""
    top: str = ""
    check: str = ""
    overview: str = ""
    alert: str = ""
    within_s: float = math.inf
    """Of the alert."""
    guilty: str = GUILTY
    """The only connector that may be named, if any."""
    looked_at_s: int = 6
    """So long nobody else is named, and then its series are taken."""
    pace: int = 1
    """So many times as slowly all goes on in the series as on the engine."""
    each_s: int = 0
    """A request each so many seconds; 0: of several clients."""
    fault: tuple[str, str, int | None] | None = None
    """Of a ``FaultyConnector``: hook, fault, and rank; None: a call of the scheduler."""


@dataclass(frozen=True)
class Seen:
    """What was seen where, with the seconds since the incident began."""

    at: dict[str, tuple[str, float]]
    alerts: Sequence[tuple[str, float]]
    vllm: str


def publish(incident: Incident, seen: Seen) -> None:
    """Write what a run saw of an incident, if it is to be published."""
    if os.environ.get(PUBLISH):
        write_row(RESULTS, incident.title, asdict(seen), INCIDENTS)


def _hangs(title: str, hook: str, fault: str, rank: int | None) -> Incident:
    where = "scheduler" if rank is None else f"rank {rank}"
    return Incident(
        title,
        log=rf"connector 'remote' has been in {hook} on {where} for \d+ s",
        top=f"in {hook} on {where}",
        check=f"connector remote hangs: call in {hook} on {where}",
        overview=HANGS,
        alert="KvobsCallHangs",
        within_s=STOPS_S,
        fault=(hook, fault, rank),
    )


def _waits(title: str, kind: str, log: str, alert: str, *, logged_as: str = "") -> Incident:
    return Incident(
        title,
        log=f"connector 'remote': {logged_as or kind} of .* ({log})",
        top=f"Hangs: {kind}",
        check=f"connector remote hangs: {kind}",
        overview=HANGS,
        alert=alert,
        within_s=STOPS_S,
    )


def _ends(title: str, hook: str, fault: str, rank: int | None, reason: str) -> Incident:
    """The parent of a process may have read its status first: the reason is not known then."""
    where = "scheduler" if rank is None else f"rank {rank}"
    reason = reason if fault == "raises" else f"(?:{reason}|unknown)"
    log = f"connector 'remote' raised {reason} in {hook} on {where}; this crashes the engine"
    ended = f"its engine has ended in {hook} of connector remote: {reason}"
    return Incident(
        title,
        log=log if fault == "raises" else f"the engine has ended in {hook} of connector 'remote' on {where}: {reason}",
        top=ended,
        check=ended,
        overview="^remote: (Ended the engine)",
        alert="KvobsEngineEnded",
        within_s=STOPS_S,
        fault=(hook, fault, rank),
    )


FAULTY = (
    _hangs("a lookup that never returns", LOOKUP, "hangs", None),
    _hangs("a lookup that never returns, holding the GIL", LOOKUP, "holds the GIL", None),
    _hangs("a worker's save that never returns", "wait_for_save", "hangs", 1),
    _hangs("a worker's save that never returns, holding the GIL", "wait_for_save", "holds the GIL", 1),
    _hangs("a layer hook that never returns", "save_kv_layer", "hangs", 1),
    _ends("an exception at the first request", LOOKUP, "raises", None, "RuntimeError"),
    _ends("an exception in the scheduler", "update_state_after_alloc", "raises", None, "RuntimeError"),
    _ends("an exception on a worker", "start_load_kv", "raises", 1, "RuntimeError"),
    _ends("os._exit on a worker", "start_load_kv", "exits", 1, "exit 3"),
    _ends("kill -9 of EngineCore in a lookup", LOOKUP, "is killed late", None, "SIGKILL"),
)
OTHER_HOST = (
    _hangs("a worker's save that never returns, on another host", "wait_for_save", "hangs", 1),
    _ends("kill -9 of a worker on another host", "start_load_kv", "is killed", 1, "SIGKILL"),
)
LMCACHE = _hangs("LMCache MP's server is killed under load", "wait_for_save", "", 0)


def _pauses(title: str, hook: str, fault: str, rank: int | None) -> Incident:
    where = "scheduler" if rank is None else f"rank {rank}"
    log = rf"{where} is stopped \(SIGSTOP, or a debugger\)" if fault == "stops" else ""
    return Incident(title, log=log, guilty="", looked_at_s=STOPPED_S + 6 if log else 8, fault=(hook, fault, rank))


STOPPED_S = 20
PAUSES = (
    _pauses("Python's collector pauses the scheduler for 2 s, in a call", LOOKUP, "collects", None),
    _pauses("Python's collector pauses a worker for 2 s, in a call", "start_load_kv", "collects", 0),
    _pauses("the scheduler is stopped for 20 s, in a call", LOOKUP, "stops", None),
    _pauses("a worker is stopped for 20 s, in a call", "start_load_kv", "stops", 0),
)
"""Of one engine, one after the other; nobody is to be named."""

LOADS = {"offer": 64, "async": True}
SLOWER = Incident("loads take 1.3 s", top="^  (Slow)", overview="^remote: (Slow)", alert="KvobsLoadsSlow")
LATE_RANK = Incident("rank 1 of 2 reports each load late", top=r"slowest rank 1 \(\d+ %\)", alert="KvobsSlowestRank")
BLOCKING = Incident(
    "lookups block the scheduler for 350 ms each",
    top="^  (Blocks steps)",
    overview="^remote: (Blocks steps)",
    alert="KvobsConnectorBlocksEngine",
    within_s=STOPS_S,
)
FAILING = Incident("all loads fail", top=FAILS, overview="^remote: (Failing)", alert="KvobsConnectorFailing")
SYNC = replace(
    FAILING,
    title="a synchronous load fails",
    log="a synchronous load of connector 'remote' failed",
    alert="KvobsFailedSyncLoads",
    within_s=STOPS_S,
)
SYNC_AGAIN = replace(SYNC, title="a synchronous load fails after a restart, as one did before it")
STUCK, OPEN = "stuck: .* no report from rank 1", "in progress for .*, waiting for "
ONE_RANK = _waits("a load that one of two ranks does not report", "load", STUCK, "KvobsStuckTransfers")
NO_RANK = _waits("a load that no rank reports", "load", f"{OPEN}rank 0", "KvobsLoadUnfinished")
NOT_YET = _waits("'not yet' for ever", "lookup", f"{OPEN}the connector's answer", "KvobsLookupUnanswered")
FEW_FAILING = replace(FAILING, title="all loads fail, 12 an hour", each_s=5, looked_at_s=16, pace=3600 // 12 // 5)
"""Three of them on the engine."""
NOT_RESUMED = _waits(
    "a loaded request is not resumed",
    "awaiting_schedule",
    f"{OPEN}vLLM's scheduler",
    "KvobsRequestsNotResumed",
    logged_as="scheduling",
)
LONG_MS = 25_000
"""For ever, as far as anybody looks; then it ends, so that what comes next is seen alone."""
ORDERS: dict[Incident, dict[str, Any]] = {
    SLOWER: {**LOADS, "load_ms": 1300},
    LATE_RANK: {**LOADS, "load_ms": {"0": 5, "1": 375}},
    BLOCKING: {"sleep_in": LOOKUP, "sleep_ms": 350},
    FAILING: {**LOADS, "fail": "recv"},
    ONE_RANK: {**LOADS, "load_ms": {"0": 20, "1": LONG_MS}},
    SYNC: {"offer": 64, "fail": "blocks"},
}
"""Of a ``SteeredConnector`` on two ranks, one after the other."""
AFTER_A_RESTART: dict[Incident, dict[str, Any]] = {
    FEW_FAILING: ORDERS[FAILING],
    NO_RANK: {**LOADS, "load_ms": LONG_MS},
    NOT_YET: {"not_yet_ms": LONG_MS},
    SYNC_AGAIN: ORDERS[SYNC],
    NOT_RESUMED: {},
}
CORRUPT = Incident(
    "rank 1 of 2 loads other requests' blocks",
    log=r"connector 'remote' loaded wrong bytes on rank 1: \d+ of \d+ verified blocks of request",
    top="^  (Corrupt)",
    check=r"connector remote loaded \d+ blocks with wrong bytes",
    overview="^remote: (Corrupt)",
    alert="KvobsCorruptLoads",
    within_s=STOPS_S,
)
INCIDENTS = {each.title: each for each in (*FAULTY, *OTHER_HOST, LMCACHE, *ORDERS, *AFTER_A_RESTART, CORRUPT, *PAUSES)}
