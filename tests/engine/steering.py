"""What a request may order a ``SteeredConnector`` to do, and when the connector's workers report it.

A request carries ``{"steer": {TAG: PLAN}}`` in its ``kv_transfer_params``, TAG being the connector's ``tag`` option.
Keys of PLAN, all optional, laid over the connector's ``plan`` option:

    offer        tokens offered on lookup: a number, or "stored" for what this connector has saved of the prompt
    async        true: the load ends between steps; false: before the step's forward
    offers       loads offered per request at most (1), so that a failed load is not retried for ever
    not_yet      lookups answered "not yet" before the first answer
    not_yet_ms   the same, as time since the request's first lookup
    load_ms      an async load is reported after this many ms; {"0": 5, "1": 300} by rank, a rank left out never reports
    fail         "recv": the load is reported as failed; "blocks": its blocks are
    fail_ranks   ranks on which it fails (all)
    promise      true: at its end the request's blocks are kept until the save is reported
    save_ms      when that is, in the form of load_ms; {} for never
    stray      "load", "save" or "failure": report the request as received, saved or failed without being asked to
    stray_ms   when that is, after the request got its blocks, in the form of load_ms
    raise_in     hook that raises: one that names the request, or one of a step that the request is part of
    raise_ranks  ranks on which it raises (all)
    sleep_in     hook that takes its time: one that names the request, or a worker's in the request's first step
    sleep_ms     how long, in the form of load_ms
    params       kv_transfer_params to return at the request's end
"""

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

Delay = float | Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """One request's orders to one connector; see the module's docstring for the keys."""

    offer: int | str = 0
    is_async: bool = False
    offers: int = 1
    not_yet: int = 0
    not_yet_ms: float = 0
    load_ms: Delay = 0
    fail: str | None = None
    fail_ranks: Sequence[int] | None = None
    promise: bool = False
    save_ms: Delay = 0
    stray: str | None = None
    stray_ms: Delay = 0
    raise_in: str | None = None
    raise_ranks: Sequence[int] | None = None
    sleep_in: str | None = None
    sleep_ms: Delay = 0
    params: Mapping[str, Any] | None = None

    def fails_on(self, rank: int) -> bool:
        """Return whether this plan's load fails on ``rank``."""
        return self.fail is not None and (self.fail_ranks is None or rank in self.fail_ranks)


def plan_for(tag: str, defaults: Mapping[str, Any], params: Any) -> Plan:
    """Return the orders of a request with these ``kv_transfer_params`` to the connector called ``tag``."""
    steer = params.get("steer", {}) if isinstance(params, Mapping) else {}
    orders = {**defaults, **steer.get(tag, {})}
    plan = Plan(**{"is_async" if key == "async" else key: value for key, value in orders.items()})
    assert plan.fail in (None, "recv", "blocks"), plan
    assert plan.stray in (None, "load", "save", "failure"), plan
    assert plan.offer == "stored" or not isinstance(plan.offer, str), plan
    return plan


def at_rank(delay: Delay, rank: int) -> float | None:
    """Return the seconds after which ``rank`` reports; None for never."""
    ms = delay.get(str(rank)) if isinstance(delay, Mapping) else delay
    return None if ms is None else ms / 1000


def block_keys(tokens: Sequence[int], block_size: int) -> list[str]:
    """Return one key per full block, each of which stands for all tokens up to that block's end."""
    digest, keys = hashlib.sha256(), []
    for end in range(block_size, len(tokens) + 1, block_size):
        digest.update(repr(list(tokens[end - block_size : end])).encode())
        keys.append(digest.hexdigest())
    return keys


class Due(NamedTuple):
    """Something to report: ``kind`` is load, save or failure; ``bad_blocks`` go with a load that failed by block."""

    kind: str
    request: str
    bad_blocks: frozenset[int] = frozenset()


@dataclass
class Agenda:
    """Reports in the order of their time."""

    _waiting: list[tuple[float, int, Due]] = field(default_factory=list)
    _ties: "count[int]" = field(default_factory=count)

    def add(self, when: float, due: Due) -> None:
        """Report ``due`` from the time ``when`` on, in seconds of the clock that ``take`` is asked with."""
        heapq.heappush(self._waiting, (when, next(self._ties), due))

    def take(self, now: float) -> list[Due]:
        """Return what is due by ``now``, earliest first, and forget it."""
        taken = []
        while self._waiting and self._waiting[0][0] <= now:
            taken.append(heapq.heappop(self._waiting)[2])
        return taken
