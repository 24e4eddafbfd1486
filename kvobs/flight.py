"""The flight recorder of one process: its last calls, steps, loads and saves, in a file that outlives it.

A call's record is written when it begins and completed when it ends, so that the file of a process that died or hangs
says what it was doing. Layer hooks, called hundreds of times a step, keep in place when each child's last call began,
and get one record a step. A request is known by a keyed hash only.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from os import getpid
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from kvobs import faults, ring_files
from kvobs.config import TimelineOptions
from kvobs.faults import contained
from kvobs.hooks import HOOKS, Cadence
from kvobs.ledger import Ledger
from kvobs.notices import line, once
from kvobs.reports import Kind, Report
from kvobs.ring import MORE, OPEN, RECORD, SPENT, WIDTH, Ring
from kvobs.transfers import Finished, Load, Save


class What(IntEnum):
    """What a record is about. ``n`` and the word MORE mean something else for each."""

    CALL = 1  # more: whether it raised. Of a step, n: whether it has a forward
    LAYERS = 2  # n: how many calls; more: what they took together, in ns
    LOAD_BEGUN = 3  # more: the request; n: tokens, on the scheduler's side
    LOAD_ENDED = 4  # more: the request; n: how, as a position in OUTCOMES
    SAVE_BEGUN = 5
    SAVE_ENDED = 6


OUTCOMES = ("ok", "failed", "aborted", "abandoned")
STEP = "step"  # a worker's, from bind_connector_metadata to clear_connector_metadata
NAMES = (*HOOKS, STEP)
LAYER_HOOKS = tuple(hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER)
ROUTED = ("build_connector_meta", "update_connector_output")  # shown as steps of the scheduler, all children together
OWN = 0xFFFF  # instead of a child: of the process itself
N_AT_MOST = (1 << 23) - 1

_ENDED = {
    Kind.RECEIVED: (What.LOAD_ENDED, "ok"),
    Kind.FAILED: (What.LOAD_ENDED, "failed"),
    Kind.SYNC_DONE: (What.LOAD_ENDED, "ok"),
    Kind.SYNC_FAILED: (What.LOAD_ENDED, "failed"),
    Kind.SAVED: (What.SAVE_ENDED, "ok"),
}
_INDEX = {name: i for i, name in enumerate(NAMES)}
_DATA_PARALLEL = re.compile(r"_dp(\d{1,9})$")


def pack(what: What, child: int, hook: str = "", n: int = 0) -> int:
    """Put what a record is about into one word."""
    return what | _INDEX.get(hook, 0) << 8 | child << 24 | min(n, N_AT_MOST) << 40


@lru_cache(1 << 12)
def unpack(word: int) -> tuple[What, int, int, int]:
    """Return what a record is about: what, child, the hook as a position in its writer's table, n."""
    return What(word & 0xFF), word >> 24 & 0xFFFF, word >> 8 & 0xFFFF, word >> 40


class Flight:
    """Writes the records of one process.

    Args:
        ring: where they go.
        children: how many there are.
        key: makes the hashes of request ids, the same in all processes of an engine.
        wall_offset: what makes of this process's monotonic time ns since the epoch.
    """

    def __init__(self, ring: Ring, children: int, key: bytes, wall_offset: int) -> None:
        self._ring = ring
        self._children = children
        self._key = key
        self._wall_offset = wall_offset
        self._step: int | None = None  # the place of the running step's record

    def noted(self, child: int, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with each call written down; written out, since a call of ``Ring.add`` costs as much."""
        ring, about = self._ring, pack(What.CALL, child, hook)
        memory, words, first, room, numbers = ring.memory, ring.words, ring.first, ring.room, ring.numbers
        put, clock = RECORD.pack_into, perf_counter_ns

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                number = next(numbers)
                at = first + number % room * WIDTH
                start = clock()
                put(memory, at * 8, number, start, OPEN, about, 0, number)
            except Exception:
                faults.contain("record")
                return call(*args, **kwargs)
            try:
                answer = call(*args, **kwargs)
            except BaseException:
                words[at + MORE] = 1
                words[at + SPENT] = clock() - start
                raise
            words[at + SPENT] = clock() - start
            return answer

        return noted

    # Layers

    @property
    def words(self) -> memoryview:
        """Where the times of a layer hook are written, at the places that ``live_words`` says."""
        return self._ring.words

    def live_words(self, hook: str, children: Iterable[int]) -> list[int]:
        """Return where it is written when each child's last call began, and then when the last one ended."""
        first = self._ring.live + LAYER_HOOKS.index(hook) * (self._children + 1)
        return [first + child for child in (*children, self._children)]

    def layers(self, child: int, hook: str, *, start: int, end: int, calls: int, took: int) -> None:
        """Write one record for a child's layers of a step."""
        self._ring.add(start, end - start, pack(What.LAYERS, child, hook, calls), took)

    # A worker's steps, and what it is told and tells

    @contained("record")
    def begin_step(self, *, has_forward: bool) -> None:
        """Begin the record of a step; one that never ended stays open."""
        self._step = self._ring.add(perf_counter_ns(), OPEN, pack(What.CALL, OWN, STEP, has_forward))

    @contained("record")
    def end_step(self) -> None:
        if self._step is not None:
            self._ring.close(self._step, perf_counter_ns())
            self._step = None

    @contained("record")
    def told(self, loads: Mapping[str, Any], promised: Iterable[tuple[int, str]]) -> None:
        """Note the loads and saves that a worker has heard of."""
        for request, load in loads.items():
            self.begun(What.LOAD_BEGUN, load.child, request)
        for child, request in promised:
            self.begun(What.SAVE_BEGUN, child, request)

    @contained("record")
    def reported(self, reports: Iterable[Report]) -> None:
        """Note the loads and saves that a worker says are over."""
        for report in reports:
            what, outcome = _ENDED.get(report.kind, (None, ""))
            if what is not None:
                self.ended(
                    what,
                    report.child,
                    report.request,
                    began_ns=report.began_ns or report.time_ns,
                    ended_ns=report.time_ns,
                    outcome=outcome,
                )

    # Loads and saves, on either side

    @contained("record")
    def begun(self, what: What, child: int, request: str, n: int = 0) -> None:
        self._ring.add(perf_counter_ns(), 0, pack(what, child, n=n), self._hashed(request))

    @contained("record")
    def ended(self, what: What, child: int, request: str, *, began_ns: int, ended_ns: int, outcome: str) -> None:
        """Note the end of a load or save; the times are ns since the epoch."""
        n = OUTCOMES.index(outcome)
        spent = max(0, ended_ns - began_ns)
        self._ring.add(began_ns - self._wall_offset, spent, pack(what, child, n=n), self._hashed(request))

    def ledger(self, now_ns: Callable[[], int]) -> Ledger:
        """Return a ledger whose loads and saves are written down here; ``now_ns`` is wall-clock time."""
        return NotedLedger(self, now_ns)

    def _hashed(self, request: str) -> int:
        digest = blake2b(request.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little", signed=True)


class NotedLedger(Ledger):
    """A ledger that writes down when loads and saves begin and end."""

    def __init__(self, flight: Flight, now_ns: Callable[[], int]) -> None:
        super().__init__()
        self._flight = flight
        self._now_ns = now_ns

    def admit(self, request: str, tokens: int, expected: int, now_ns: int = 0) -> Load | None:
        load = super().admit(request, tokens, expected, now_ns)
        if load is not None:
            self._flight.begun(What.LOAD_BEGUN, load.child, request, tokens)
        return load

    def close_load(self, request: str) -> Load | None:
        load = super().close_load(request)
        if load is not None:
            outcome = "failed" if load.failed else "aborted" if load.aborted else "ok"
            self._flight.ended(
                What.LOAD_ENDED, load.child, request, began_ns=load.opened_ns, ended_ns=self._now_ns(), outcome=outcome
            )
        return load

    def close_save(self, request: str, child: int) -> Save | None:
        save = super().close_save(request, child)
        if save is not None:
            outcome = "abandoned" if save.is_abandoned else "ok"
            self._flight.ended(
                What.SAVE_ENDED, child, request, began_ns=save.promised_ns, ended_ns=self._now_ns(), outcome=outcome
            )
        return save

    def finish(self, request: str, promises: Iterable[tuple[int, int]], now_ns: int = 0) -> Finished:
        finished = super().finish(request, promises, now_ns)
        for child in finished.promised:
            self._flight.begun(What.SAVE_BEGUN, child, request)
        return finished


def begin(
    options: TimelineOptions, vllm_config: Any, rank: int | None, names: Sequence[str], wall_offset: int
) -> Flight | None:
    """Begin the recording of this process: a worker of this rank, or the scheduler's (None).

    Return None where none is wanted, and where none is possible: the log says why, and the engine goes on without.
    """
    if options.dir is None:
        return None
    try:
        return _begin(options, vllm_config, rank, names, wall_offset)
    except (OSError, ValueError) as error:
        once(
            "timeline:off",
            logging.WARNING,
            "no timeline is recorded: %s. Serving goes on without. kvobs.timeline.dir is %s",
            line(error, 400),
            line(options.dir),
        )
    except Exception:
        faults.contain("record")
    return None


def _begin(
    options: TimelineOptions, vllm_config: Any, rank: int | None, names: Sequence[str], wall_offset: int
) -> Flight:
    path, size = Path(str(options.dir)), options.mib << 20
    # vLLM says it there and, for dense models, nowhere else.
    engine_id = vllm_config.kv_transfer_config.engine_id or ""
    suffix = _DATA_PARALLEL.search(engine_id)
    engine_id, engine = (engine_id[: suffix.start()], int(suffix[1])) if suffix else (engine_id, 0)
    # Both are the same in all processes of one start of an engine. Their hashes tell nothing of the key.
    secret = f"{engine_id}/{vllm_config.instance_id}".encode()
    key, run = (blake2b(secret, digest_size=16, person=use).digest() for use in (b"request", b"run"))
    place = "scheduler" if rank is None else f"rank{rank}"
    about = {
        "run": run.hex(),
        "engine": engine,
        "role": "scheduler" if rank is None else "worker",
        "rank": rank,
        "pid": getpid(),
        "begun_ns": time.time_ns(),
        "wall_offset": wall_offset,
        "connectors": list(names),
        "hooks": list(NAMES),
        "layer_hooks": list(LAYER_HOOKS),
    }
    live = len(LAYER_HOOKS) * (len(names) + 1)
    ring = Ring(ring_files.create(path, f"{engine}-{place}", size), about, live)
    return Flight(ring, len(names), key, wall_offset)
