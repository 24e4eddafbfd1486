"""What clients order of a real server under soak, and what each order must add to the steered connector's metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.engine.metered import ASYNC, BYTES_PER_TOKEN, SYNC

TOKENS = 64  # that a load brings
SILENT = {"0": 5}
LATE_MS = 400
STALL_MS = 60


@dataclass(frozen=True, eq=False)
class Order:
    """One kind of request: how it is steered, how it ends, and what must be counted for it."""

    name: str
    weight: int
    steer: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    hangs_up_after_s: float | None = None
    is_repeated: bool = False  # one of a few prompts, whose answer is known

    def delayed(self, random: Random) -> dict[str, Any]:
        """Return how the connector is steered, with the ranks' delays drawn at random where none are given."""
        delays = {"0": random.randint(0, 30), "1": random.randint(0, 30)}
        return {"load_ms" if self.steer.get("async") else "save_ms": delays, **self.steer}


def _loads(mode: str, outcome: str) -> dict[str, int]:
    counts = {f"kvobs_loads_total/{mode}/{outcome}": 1, "kvobs_admitted_tokens_total": TOKENS}
    if outcome == "ok":
        counts |= {"kvobs_load_tokens_total": TOKENS, "kvobs_load_bytes_total": TOKENS * BYTES_PER_TOKEN}
        counts |= {f"kvobs_load_duration_seconds_count/{mode}": 1, "kvobs_rank_skew_seconds_count/load": 1}
    elif outcome == "failed":
        counts |= {"kvobs_recomputed_tokens_total": TOKENS}
    return counts


def _saves() -> dict[str, int]:
    names = ("kvobs_saves_total/ok", "kvobs_save_hold_seconds_count", "kvobs_rank_skew_seconds_count/save")
    return dict.fromkeys(names, 1)


def _stray(kind: str) -> dict[str, int]:
    return {f"kvobs_unexpected_reports_total/{kind}": 1}


_FAILED, _LOADED = _loads("async", "failed"), _loads("async", "ok")
_LATE = {"0": 5, "1": LATE_MS}
_TELLS: dict[str, Any] = {"stray_ms": {"0": 0}}
ORDERS = (
    Order("computes", 15),
    Order("repeats", 15, is_repeated=True),
    Order("loads between steps", 20, ASYNC, _LOADED),
    Order("loads within a step", 10, SYNC, _loads("sync", "ok")),
    Order("saves", 15, {"promise": True}, _saves()),
    Order("saves late", 1, {"promise": True, "save_ms": _LATE}, _saves(), ("late on one rank",)),
    Order("loads late", 1, {**ASYNC, "load_ms": _LATE}, _LOADED, ("late on one rank",)),
    Order("fails on one rank", 3, {**ASYNC, "fail": "recv", "fail_ranks": [1]}, _FAILED, ("failed on one rank",)),
    Order("fails on all ranks", 3, {**ASYNC, "fail": "recv"}, _FAILED, ("failed on all ranks",)),
    Order("has bad blocks", 3, {**ASYNC, "fail": "blocks", "fail_ranks": [0]}, _FAILED, ("bad blocks",)),
    Order("fails within a step", 1, {**SYNC, "fail": "blocks"}, _loads("sync", "failed"), ("sync load failed",)),
    Order("reports twice", 2, {**ASYNC, **_TELLS, "stray": "load"}, _LOADED | _stray("load"), ("reported twice",)),
    *(
        Order(f"lies of a {kind}", 1, {**_TELLS, "stray": kind}, _stray(kind), ("reported what it does not own",))
        for kind in ("load", "save", "failure")
    ),
    Order("stalls", 1, {"sleep_in": "wait_for_save", "sleep_ms": {"1": STALL_MS}}, faults=("stalled a step",)),
    Order("answers late", 3, {"not_yet": 2}, {"kvobs_lookup_delay_seconds_count": 1}, ("lookup not yet",)),
    Order(
        "is left while it loads", 1, {**ASYNC, "load_ms": 1500}, {
            "kvobs_loads_total/async/aborted": 1, "kvobs_admitted_tokens_total": TOKENS,
            "kvobs_load_tokens_total": TOKENS, "kvobs_load_bytes_total": TOKENS * BYTES_PER_TOKEN,  # it arrives
        }, ("abort while loading",), hangs_up_after_s=0.5,
    ),
    Order("is left while it runs", 1, faults=("abort while running",), hangs_up_after_s=0.3),
)  # fmt: skip

NEVER = (
    Order(
        "never loaded on one rank", 0, {**ASYNC, "load_ms": SILENT}, {
            "kvobs_loads_total/async/aborted": 1, "kvobs_admitted_tokens_total": TOKENS,
            "kvobs_stuck_transfers_total/1": 1, "kvobs_in_flight/load": 1,
        }, ("never reported on one rank",), hangs_up_after_s=0.5,
    ),
    Order(
        "never saved on one rank", 0, {"promise": True, "save_ms": SILENT}, {
            "kvobs_stuck_transfers_total/1": 1, "kvobs_in_flight/save": 1,
        }, ("never reported on one rank",),
    ),
)  # fmt: skip
"""What comes last: vLLM holds the blocks of these for ever."""

COUNTED = {name.partition("/")[0] for order in (*ORDERS, *NEVER) for name in order.counts}
"""The metrics of which the client knows every number."""


def draw(random: Random) -> Order:
    """Draw one order."""
    return random.choices(ORDERS, [order.weight for order in ORDERS])[0]


def expected(made: Counter[Order]) -> Counter[str]:
    """Add up what the metrics must say of orders that were carried out."""
    counts: Counter[str] = Counter()
    for order, n in made.items():
        for name, each in order.counts.items():
            counts[name] += n * each
    return counts
