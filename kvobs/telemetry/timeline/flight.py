"""Record the last calls, steps, lookups, loads and saves of one process, in a file that outlives it (flight recorder).

A call's record is written when it begins and completed when it ends, so that the file of a process that died or hangs
shows what it was doing. Layer hooks, called hundreds of times per step, only overwrite the start of each child's last
call, and get one record per step. What is in progress is in a table of its own too: a load that never ends outlasts the
records. A request is identified by a keyed hash only.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from hashlib import blake2b
from os import getpid
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from kvobs import faults
from kvobs.faults import contained
from kvobs.log import line
from kvobs.schema.options import TimelineOptions
from kvobs.state.transfer_listener import LookedUp, TransferListener
from kvobs.state.transfers import Load, Report, ReportKind, Save
from kvobs.telemetry.timeline import open_table, ring_files
from kvobs.telemetry.timeline.black_box import Identity, file_place_of
from kvobs.telemetry.timeline.open_table import OpenTable
from kvobs.telemetry.timeline.ring import MORE, OPEN, RECORD, SPENT, WIDTH, Ring
from kvobs.vllm_api.hooks import HOOKS, Cadence


class What(IntEnum):
    """Kinds of records. The meaning of ``n`` and of the word MORE depends on the kind."""

    CALL = 1  # more: whether it raised. For a step, n: whether it has a forward; more: the number of empty steps
    LAYERS = 2  # n: number of calls; more: their total time in ns
    LOAD_BEGUN = 3  # more: the request; n: tokens, on the scheduler's side
    LOAD_ENDED = 4  # more: the request; n: the outcome, as a position in OUTCOMES
    SAVE_BEGUN = 5
    SAVE_ENDED = 6
    LOOKUP_BEGUN = 7  # more: the request; from its first lookup until vLLM allocates its blocks
    LOOKUP_ENDED = 8
    RESUMED = 9  # more: the request; from the end of its asynchronous load to the step that schedules it


OUTCOMES = ("ok", "failed", "aborted", "abandoned")
BYTES = 16 << 20  # of each process's file; the oldest records are overwritten
STEP = "step"  # a worker's, from bind_connector_metadata to clear_connector_metadata
NAMES = (*HOOKS, STEP)
LAYER_HOOKS = tuple(hook.name for hook in HOOKS.values() if hook.cadence is Cadence.LAYER)
STEP_HOOK = "build_connector_meta"
_PASSES_ON = -1  # in place of a number of empty steps: the next one is recorded by itself
ROUTED = (STEP_HOOK, "update_connector_output")  # shown as steps of the scheduler, over all children
OWN = 0xFFFF  # instead of a child: the process itself
N_AT_MOST = (1 << 23) - 1

_ENDED = {
    ReportKind.RECEIVED: (What.LOAD_ENDED, "ok"),
    ReportKind.FAILED: (What.LOAD_ENDED, "failed"),
    ReportKind.SYNC_DONE: (What.LOAD_ENDED, "ok"),
    ReportKind.SYNC_FAILED: (What.LOAD_ENDED, "failed"),
    ReportKind.SAVED: (What.SAVE_ENDED, "ok"),
}
_BEGINNING = {What.LOAD_ENDED: What.LOAD_BEGUN, What.SAVE_ENDED: What.SAVE_BEGUN, What.LOOKUP_ENDED: What.LOOKUP_BEGUN}
_INDEX = {name: i for i, name in enumerate(NAMES)}


def pack(what: What, child: int, hook: str = "", n: int = 0) -> int:
    """Encode kind, child, hook and n in one 64-bit word."""
    return what | _INDEX.get(hook, 0) << 8 | child << 24 | min(n, N_AT_MOST) << 40


def layer_words(children: int) -> int:
    """Return the number of words for the times of layer hooks, the first of those that are written in place."""
    return len(LAYER_HOOKS) * (children + 1)


class Flight(TransferListener):
    """Writes the records of one process; on the scheduler's side it listens to the router's transfers.

    The hashes of request ids have the same ``key`` in all processes of an engine. ``wall_offset``, added to this
    process's monotonic time, gives ns since the epoch.
    """

    def __init__(self, ring: Ring, children: int, key: bytes, wall_offset: int) -> None:
        self._ring = ring
        self.layer_times = ring.floats  # of layer hooks, in seconds, at the offsets of ``live_words``
        self._children = children
        self._key = key
        self._wall_offset = wall_offset
        self._step: int | None = None  # place of the running step's record
        self._run_steps = self._run_number = self._run_start = 0  # of a run of empty steps
        self._in_progress = OpenTable(ring.words, ring.live + layer_words(children))
        self._asked: dict[str, int] = {}  # request that has no blocks yet -> its first lookup
        self._loaded: dict[str, tuple[int, int]] = {}  # request that vLLM may resume -> child, end of its load

    def noted(self, child: int, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with each call recorded; inlined, since calling ``Ring.add`` costs as much again."""
        ring, about = self._ring, pack(What.CALL, child, hook)
        memory, words, first, room, numbers = ring.memory, ring.words, ring.first, ring.room, ring.numbers
        put, clock = RECORD.pack_into, perf_counter_ns

        def noted(*args: Any, **kwargs: Any) -> Any:
            try:
                number = numbers[0] = numbers[0] + 1
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

    def routed(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the router's call of a hook of the scheduler, noted as a step of it; an empty one joins a run."""
        noted = self.noted(OWN, hook, call)
        if hook != STEP_HOOK:
            return noted

        def step(scheduler_output: Any) -> Any:
            self._begin_scheduled(scheduler_output)
            return noted(scheduler_output)

        return step

    @contained("record")
    def _begin_scheduled(self, scheduler_output: Any) -> None:
        self._begin_run(is_empty=not scheduler_output.total_num_scheduled_tokens)
        if self._run_steps > 1:
            start = self._run_start
            self._ring.add(start, perf_counter_ns() - start, pack(What.CALL, OWN, STEP), self._run_steps)

    def _begin_run(self, *, is_empty: bool) -> None:
        """Let the records of an empty step overwrite those of the empty step before it.

        An engine that waits for a transfer makes hundreds of them a second. A run of them ends with a step that has a
        forward or orders, or with any record of a lookup, load or save; the step after such a record passes it on.
        """
        if not is_empty or self._run_steps == _PASSES_ON:
            self._run_steps = 0
        elif self._run_steps:
            self._ring.numbers[0] = self._run_number
            self._run_steps += 1
        else:
            self._run_number, self._run_start, self._run_steps = self._ring.numbers[0], perf_counter_ns(), 1

    # Layers

    def live_words(self, hook: str, children: Iterable[int]) -> list[int]:
        """Return the offsets of the start of each child's last call, and of the end of the last one."""
        first = self._ring.live + LAYER_HOOKS.index(hook) * (self._children + 1)
        return [first + child for child in (*children, self._children)]

    def layers(self, child: int, hook: str, *, start: int, end: int, calls: int, took: int) -> None:
        """Write one record for a child's layers of a step."""
        self._ring.add(start, end - start, pack(What.LAYERS, child, hook, calls), took)

    # A worker's steps, its orders and reports

    @contained("record")
    def begin_step(self, *, has_forward: bool, has_orders: bool = False) -> None:
        """Begin the record of a step; a step that never ended stays open."""
        self._begin_run(is_empty=not (has_forward or has_orders))
        steps, start = self._run_steps, perf_counter_ns()
        start = self._run_start if steps > 1 else start
        self._step = self._ring.add(start, OPEN, pack(What.CALL, OWN, STEP, has_forward), steps)

    @contained("record")
    def end_step(self) -> None:
        if self._step is not None:
            self._ring.close(self._step, perf_counter_ns())
            self._step = None

    @contained("record")
    def ordered(
        self,
        loads: Mapping[str, Any],
        promised: Iterable[tuple[int, str]],
        over: Iterable[tuple[int, str]] = (),
        saved: Iterable[tuple[int, str]] = (),
    ) -> None:
        """Record the loads and saves that a worker is ordered to do.

        Loads that are ``over`` for the scheduler, and saves that are ``saved``, are no longer in progress: a rank need
        not report them. Such a load may be ordered again, and such a save have been promised, in the same step.
        """
        now = perf_counter_ns()
        for child, request in over:
            self._in_progress.end((What.LOAD_BEGUN, child, self._hashed(request)))
        for request, load in loads.items():
            self._begun(What.LOAD_BEGUN, load.child, request, now)
        for child, request in promised:
            self._begun(What.SAVE_BEGUN, child, request, now)
        for child, request in saved:
            self._in_progress.end((What.SAVE_BEGUN, child, self._hashed(request)))

    @contained("record")
    def reported(self, reports: Iterable[Report]) -> None:
        """Record the loads and saves that a worker reports as finished."""
        for report in reports:
            what, outcome = _ENDED.get(report.kind, (None, ""))
            if what is not None:
                began_ns = report.began_ns or report.time_ns
                self._ended(what, report.child, report.request, began_ns, report.time_ns, outcome=outcome)

    # The scheduler's lookups, loads and promised saves

    @contained("record")
    def looked_up(self, request: LookedUp, began_ns: int, ended_ns: int) -> None:
        """Begin a request's lookup; vLLM repeats it until the connectors answer and blocks are free."""
        if request.request_id not in self._asked:
            self._asked[request.request_id] = began_ns
            self._loaded.pop(request.request_id, None)
            self._begun(What.LOOKUP_BEGUN, OWN, request.request_id, began_ns - self._wall_offset)

    @contained("record")
    def allocated(
        self, request_id: str, offers: Sequence[tuple[int, int]], local: int, owner: int | None, tokens: int
    ) -> None:
        """Record the end of the lookup; the allocation after an asynchronous load is the request's resumption."""
        if (began_ns := self._asked.pop(request_id, None)) is not None:
            self._ended(What.LOOKUP_ENDED, OWN, request_id, began_ns, self._now_ns, outcome="ok")
        elif (loaded := self._loaded.pop(request_id, None)) is not None:
            self._ended(What.RESUMED, loaded[0], request_id, loaded[1], self._now_ns, outcome="ok")

    @contained("record")
    def request_ended(self, request_id: str) -> None:
        self._loaded.pop(request_id, None)
        if (began_ns := self._asked.pop(request_id, None)) is not None:
            self._ended(What.LOOKUP_ENDED, OWN, request_id, began_ns, self._now_ns, outcome="aborted")

    @contained("record")
    def admitted(self, request_id: str, load: Load) -> None:
        self._begun(What.LOAD_BEGUN, load.child, request_id, perf_counter_ns(), load.tokens)

    @contained("record")
    def load_ended(self, request_id: str, load: Load) -> None:
        now_ns = self._now_ns
        self._ended(What.LOAD_ENDED, load.child, request_id, load.opened_ns, now_ns, outcome=load.outcome)
        if load.is_async and not load.failed and not load.aborted:
            self._loaded[request_id] = load.child, now_ns

    @contained("record")
    def promised(self, request_id: str, promised: Mapping[int, Save], early: Mapping[int, Save]) -> None:
        for child in promised:
            self._begun(What.SAVE_BEGUN, child, request_id, perf_counter_ns())

    @contained("record")
    def saved(self, request_id: str, child: int, save: Save, ended_ns: int) -> None:
        self._ended(What.SAVE_ENDED, child, request_id, save.promised_ns, self._now_ns, outcome=save.outcome)

    # On either side

    def _begun(self, what: What, child: int, request: str, start: int, n: int = 0) -> None:
        """Record a begin; ``start`` is the monotonic time."""
        self._run_steps = _PASSES_ON
        word, hashed = pack(what, child, n=n), self._hashed(request)
        self._ring.add(start, 0, word, hashed)
        self._in_progress.begin((what, child, hashed), word, start)

    def _ended(self, what: What, child: int, request: str, began_ns: int, ended_ns: int, *, outcome: str) -> None:
        """Record an end; times are ns since the epoch."""
        self._run_steps = _PASSES_ON
        word, hashed = pack(what, child, n=OUTCOMES.index(outcome)), self._hashed(request)
        self._ring.add(began_ns - self._wall_offset, max(0, ended_ns - began_ns), word, hashed)
        if (begun := _BEGINNING.get(what)) is not None:
            self._in_progress.end((begun, child, hashed))

    @property
    def _now_ns(self) -> int:
        return perf_counter_ns() + self._wall_offset

    def _hashed(self, request: str) -> int:
        digest = blake2b(request.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little", signed=True)


def begin(
    options: TimelineOptions, vllm_config: Any, rank: int | None, names: Sequence[str], wall_offset: int
) -> Flight | None:
    """Begin the recording of this process: a worker of this rank, or the scheduler's (None).

    Return None if recording is off, or not possible; then the reason is logged and the engine runs without it.
    """
    if options.dir is None:
        return None
    message = "the timeline is not recorded: %s. Serving is not affected. kvobs.timeline.dir is %s"
    with ring_files.reported(message, line(options.dir)):
        identity = Identity.of(vllm_config)
        about = {
            "run": identity.digest(b"run").hex(),
            "engine": identity.number,
            "rank": rank,
            "pid": getpid(),
            "begun_ns": time.time_ns(),
            "wall_offset": wall_offset,
            "connectors": list(names),
            "hooks": list(NAMES),
            "layer_hooks": list(LAYER_HOOKS),
        }
        live = layer_words(len(names)) + open_table.WORDS
        memory = ring_files.create(Path(options.dir), f"{identity.number}-{file_place_of(rank)}", BYTES)
        return Flight(Ring(memory, about, live), len(names), identity.digest(b"request"), wall_offset)
    return None
