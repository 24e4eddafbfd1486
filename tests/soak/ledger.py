"""A soak's own books: what was asked of the children, what they said, and what must follow from it.

They are kept on the children's side and on vLLM's, and share nothing with kvobs's but the words. What kvobs counts is
compared with ``expected``; a load or save to be reported to vLLM is ``due`` until it is, and lost if it never is.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvobs.testing import BLOCK
from tests.soak.plans import LATE, Orders, Plan

Series = tuple[str, int, tuple[str, ...]]
"""A metric, a child, and label values in the order of the labels' names."""

STUCK_AFTER = 50
"""Steps after which a transfer that some ranks have reported, and others have not, counts as stuck."""


class Report(NamedTuple):
    """What a child says on one rank."""

    rank: int
    child: int
    kind: str  # "load", "failure", "save", or "holes": bad blocks of a load
    request: str


@dataclass
class Transfer:
    """An open load or promised save."""

    child: int
    expected: int  # ranks
    tokens: int = 0
    is_async: bool = True
    plan: Plan = field(default_factory=Plan)
    step: int = 0  # that takes a load to the workers
    arrived: set[int] = field(default_factory=set)
    failed: bool = False
    lost: int | None = None  # tokens, where not all of a failed load's are
    is_whole: bool = False  # failed as a whole: vLLM learns of it from the workers
    aborted: bool = False

    @property
    def is_in(self) -> bool:
        return len(self.arrived) >= self.expected


@dataclass
class Life:
    """One request that somebody still knows."""

    orders: Orders
    answers: dict[int, int] = field(default_factory=dict)  # of the last lookup: child -> tokens
    pending: set[int] = field(default_factory=set)  # children that said "not yet"
    outcomes: set[tuple[int, str]] = field(default_factory=set)  # (child, outcome) of its lookups so far
    counted: bool = False  # its offers are
    given: dict[int, int] = field(default_factory=dict)  # of this allocation: child -> tokens
    load: Transfer | None = None
    saves: dict[int, Transfer] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)  # children that reported a save before the end
    promised: list[int] = field(default_factory=list)
    finished: bool = False
    awaited: str = ""  # "received" or "sent": as what vLLM waits for the finished request


class Ledger:
    """The books of one life of an engine with three children.

    Args:
        ranks: how many workers there are.
        reporters: by child, on how many ranks it reports.
        bytes_per_token: over all ranks.
    """

    def __init__(self, ranks: int, reporters: tuple[int, ...], bytes_per_token: int) -> None:
        self.ranks, self.reporters, self.bytes_per_token = ranks, reporters, bytes_per_token
        self.expected: Counter[Series] = Counter()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.reports: list[Report] = []  # of this step
        self.lives: dict[str, Life] = {}
        self.running: set[str] = set()  # that vLLM has not ended
        self.due: Counter[tuple[str, str]] = Counter()  # (as what, request)
        self.completed = self.doubled = 0
        self.is_over = False  # silent ranks talk at last
        self._half: dict[tuple[str, int], tuple[int, Transfer]] = {}
        self._whole: list[str] = []  # failed loads that must be passed on to the workers
        self._echoes: dict[int, list[str]] = {}  # by the step that passes them on
        self._sync: dict[int, list[str]] = {}
        self._steps = 0

    def _count(self, metric: str, child: int, *labels: str, n: int = 1) -> None:
        self.expected[metric, child, labels] += n

    # What is asked

    def called(self, child: int, hook: str) -> None:
        self._count("kvobs_call_duration_seconds_count", child, hook)

    def told_stats(self, child: int, *, odd: bool) -> None:
        self._count("scripted_things_total", child)
        self.faults["stats that can't be merged"] += odd

    def added(self, request: str, orders: Orders) -> None:
        self.lives[request] = Life(orders)
        self.running.add(request)

    def answered(self, request: str, child: int, tokens: int | None) -> None:
        """Note a child's answer to a lookup; it is always the first child that is asked first."""
        self.called(child, "get_num_new_matched_tokens")
        life = self.lives[request]
        if child == 0:
            life.answers = {}
        if tokens is None:
            life.pending.add(child)
            self.faults["lookup not yet"] += 1
            self._count_outcome(life, child, "pending")
            return
        if child in life.pending:
            life.pending.remove(child)
            self._count("kvobs_lookup_delay_seconds_count", child)
        self._count_outcome(life, child, "hit" if tokens else "miss")
        life.answers[child] = tokens

    def _count_outcome(self, life: Life, child: int, outcome: str) -> None:
        """Count an outcome of a request's lookups once, however often it is looked up."""
        if (child, outcome) not in life.outcomes:
            life.outcomes.add((child, outcome))
            self._count("kvobs_lookups_total", child, outcome)

    def allocated(self, request: str, child: int, tokens: int, is_async: bool, step: int) -> None:
        """Note what vLLM allocated for a child's load; after the last child's call all know."""
        self.called(child, "update_state_after_alloc")
        life = self.lives[request]
        life.given[child] = tokens
        if tokens:
            assert life.load is None, f"{request} has two loads"
            plan = life.orders.plans[child]
            expected = self.reporters[child] if is_async else self.ranks
            life.load = Transfer(child, expected, tokens, is_async, plan, step)
            self._count("kvobs_admitted_tokens_total", child, n=tokens)
            if is_async:
                self.faults["late by many steps"] += any(after and after >= LATE for after in plan.received)
            else:
                self._sync.setdefault(step, []).append(request)
        if child == len(self.reporters) - 1:
            self._settle_offers(life)

    def _settle_offers(self, life: Life) -> None:
        given, life.given = life.given, {}
        admitted = sum(given.values())
        owner = next((child for child, tokens in given.items() if tokens), None)
        answers, life.answers = life.answers, {}
        offers = {child: tokens for child, tokens in answers.items() if tokens}
        if life.counted or not offers:
            return
        life.counted = True
        won = 0 if owner is None else offers[owner]
        for child, tokens in offers.items():
            self._count("kvobs_offered_tokens_total", child, n=tokens)
            if child == owner:
                self._count("kvobs_unused_hit_tokens_total", child, "not_taken", n=max(0, tokens - admitted))
            else:
                self._count("kvobs_unused_offers_total", child)
                reason = "not_taken" if owner is None else "other_chosen"
                self._count("kvobs_unused_hit_tokens_total", child, reason, n=max(0, tokens - won))

    def scheduled(self, step: int) -> None:
        """Note that a step's orders go to the workers: failed loads are among them."""
        whole, self._whole = self._whole, []
        if whole:
            self._echoes[step] = whole

    def finished(self, request: str, child: int, *, promises: bool) -> None:
        """Note that a child's hook for a request's end was called; after the last child's call all were."""
        self.called(child, "request_finished_all_groups")
        life = self.lives[request]
        if promises:
            life.promised.append(child)
            self.faults["late by many steps"] += any(n and n >= LATE for n in life.orders.plans[child].saved)
        if child < len(self.reporters) - 1:
            return
        life.finished = True
        if not life.counted and len(life.answers) == len(self.reporters):  # vLLM had no blocks for it
            for offering, tokens in life.answers.items():
                self._count("kvobs_offered_tokens_total", offering, n=tokens)
                self._count("kvobs_unused_hit_tokens_total", offering, "not_allocated", n=tokens)
        aborted = life.load if life.load is not None and life.load.is_async else None
        if aborted is not None:
            aborted.aborted = True
            # Where vLLM ends a request for its failed load, it does so before it reads the rest of the step's reports.
            aborted.failed |= any(
                report.kind in ("holes", "failure") and (report.request, report.child) == (request, aborted.child)
                for report in self.reports
            )
            self._end_load(aborted, "aborted")
        life.saves = {saver: Transfer(saver, self.reporters[saver]) for saver in life.promised}
        for liar in life.early:
            self._count("kvobs_stray_reports_total", liar, "save")
        life.awaited = "sent" if life.saves else "received" if aborted is not None else ""
        self._settle(request, life)

    # What is said

    def take_in(self) -> None:
        """Draw the conclusions from what the workers of one step said."""
        step, self._steps = self._steps, self._steps + 1
        reports, self.reports = self.reports, []
        in_loads = {request for report in reports if (request := self._hear(report, step))}
        for request in sorted(in_loads):
            life = self.lives[request]
            # vLLM reads a failure once every rank has said something of the load; else the workers must all say it.
            if life.load is not None and life.load.is_whole and life.load.expected < self.ranks:
                self._whole.append(request)
            else:
                self._close_load(request, life)
        for request in (*self._echoes.pop(step, ()), *self._sync.pop(step, ())):
            self._close_load(request, self.lives[request])
        for report in reports:
            if report.kind == "save" and report.request in self.lives:
                self._close_saves(report.request, self.lives[report.request])
        self._count_stuck(step)

    def _hear(self, report: Report, step: int) -> str:
        """Take in one report; return the request whose load is in by it."""
        life = self.lives.get(report.request)
        if report.kind == "save":
            self._hear_save(life, report, step)
            return ""
        load = life.load if life is not None else None
        if report.kind == "holes":
            self._hear_holes(load, report)
            return ""
        if load is None or load.child != report.child or not load.is_async:
            self._stray(report)
            return ""
        if report.kind == "failure":
            load.failed = load.is_whole = True
        if report.rank in load.arrived:
            self.faults["reported twice"] += 1
            return ""
        return report.request if self._arrive(load, report, "load", step) else ""

    def _hear_holes(self, load: Transfer | None, report: Report) -> None:
        assert load is not None, report
        assert load.child == report.child, report
        load.failed = True
        load.lost = load.tokens - min(load.plan.good_blocks, load.tokens // BLOCK - 1) * BLOCK

    def _hear_save(self, life: Life | None, report: Report, step: int) -> None:
        save = life.saves.get(report.child) if life is not None else None
        if save is not None:
            self._arrive(save, report, "save", step)
        elif life is None or life.finished:
            self._stray(report)
        else:
            life.early.add(report.child)
            self.faults["reported by a connector that owns nothing"] += 1

    def _stray(self, report: Report) -> None:
        self._count("kvobs_stray_reports_total", report.child, report.kind)
        self.faults["reported by a connector that owns nothing"] += 1

    def _arrive(self, transfer: Transfer, report: Report, kind: str, step: int) -> bool:
        """Note a rank's first report; return whether it was the last rank."""
        transfer.arrived.add(report.rank)
        key = (f"{kind} {report.request}", report.child)
        if transfer.is_in:
            self._half.pop(key, None)
        elif len(transfer.arrived) == 1:
            self._half[key] = (step, transfer)
        return transfer.is_in

    def _count_stuck(self, step: int) -> None:
        for key, (since, transfer) in list(self._half.items()):
            if since > step - STUCK_AFTER:
                break
            del self._half[key]
            for rank in set(range(self.ranks)) - transfer.arrived:
                self._count("kvobs_stuck_transfers_total", transfer.child, str(rank))
                self.faults["stuck at a rank"] += 1

    # Ends

    def _close_load(self, request: str, life: Life) -> None:
        load, life.load = life.load, None
        assert load is not None, request
        if not load.aborted:
            self._end_load(load, "ok")
        else:
            self._end_aborted(life, load)
        if load.is_async and not life.finished:
            self._owe("received", request)
        self._settle(request, life)

    def _end_load(self, load: Transfer, outcome: str) -> None:
        mode = "async" if load.is_async else "sync"
        if load.failed:
            outcome = "failed"
            self._count("kvobs_recomputed_tokens_total", load.child, n=load.tokens if load.lost is None else load.lost)
            ranks = "one rank" if len(load.plan.fails_on) == 1 else "all ranks"
            how = f"failed on {ranks}" if load.is_async else f"sync load failed on {ranks}"
            self.faults[how] += 1
            self.faults["bad blocks"] += not load.is_whole
            if not load.is_async:
                self._count("kvobs_failed_sync_loads_total", load.child)
        self._count("kvobs_loads_total", load.child, mode, outcome)
        if outcome == "aborted":
            self._count("kvobs_unused_hit_tokens_total", load.child, outcome, n=load.tokens)
        if outcome == "ok":
            self._count("kvobs_load_duration_seconds_count", load.child, mode)
            self._count_loaded(load)
            if load.expected > 1:
                self._count("kvobs_rank_skew_seconds_count", load.child, "load")

    def _count_loaded(self, load: Transfer) -> None:
        self._count("kvobs_load_tokens_total", load.child, n=load.tokens)
        self._count("kvobs_load_bytes_total", load.child, n=load.tokens * self.bytes_per_token)

    def _end_aborted(self, life: Life, load: Transfer) -> None:
        """Count what arrived for nothing."""
        if not load.failed:
            self._count_loaded(load)
        self.faults["promised at an abort in a load of its own"] += load.child in life.saves

    def _close_saves(self, request: str, life: Life) -> None:
        """Close the promised saves of a request once all are in."""
        if not all(save.is_in for save in life.saves.values()):
            return
        saves, life.saves = life.saves, {}
        for save in saves.values():
            self._count("kvobs_saves_total", save.child, "ok")
            self._count("kvobs_save_hold_seconds_count", save.child)
            if save.expected > 1:
                self._count("kvobs_rank_skew_seconds_count", save.child, "save")
        self._settle(request, life)

    def _settle(self, request: str, life: Life) -> None:
        if life.finished and life.load is None and not life.saves:
            del self.lives[request]
            if life.awaited:
                self._owe(life.awaited, request)

    def _owe(self, what: str, request: str) -> None:
        self.due[what, request] += 1
        self.completed += 1

    # What vLLM gets, and passes on

    def told_vllm(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """Note which completions vLLM got in a step."""
        for noted in [*(("received", request) for request in received), *(("sent", request) for request in sent)]:
            if self.due[noted] > 0:
                self.due[noted] -= 1
            else:
                self.doubled += 1
            if not self.due[noted]:
                del self.due[noted]

    @property
    def lost(self) -> int:
        """Return how many completions vLLM has not got."""
        return sum(self.due.values())

    def ended(self, request: str, how: str) -> None:
        """Note that vLLM has ended a request; a second end of it is doubled."""
        if request not in self.running:
            self.doubled += 1
            return
        self.running.remove(request)
        self.ends[how] += 1

    def in_flight(self) -> Counter[Series]:
        """Return how many loads and saves are open, as the gauges must say."""
        found: Counter[Series] = Counter()
        for life in self.lives.values():
            for kind, transfers in (("load", [life.load]), ("save", life.saves.values())):
                for transfer in transfers:
                    if transfer is not None:
                        found["kvobs_in_flight", transfer.child, (kind,)] += 1
        return found
