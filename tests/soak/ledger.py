"""What the connectors of a soak were asked, and what they answered and reported: what kvobs's metrics must show.

It is kept at the connectors' and at vLLM's side, and shares nothing with kvobs's state.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.transparency.messages import Load
from tests.transparency.record import Cause, Run

PER_REQUEST = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished_all_groups",
)
STRAYS = {Cause.STRAY_RECEIPT: "load", Cause.STRAY_FAILURE: "failure"}
Series = tuple[str, int, tuple[str, ...]]
"""A metric, a connector, and label values in the order of the labels' names."""


@dataclass
class Asked:
    """One request that vLLM has not forgotten."""

    answers: dict[int, int] = field(default_factory=dict)  # of the last lookup: connector -> tokens
    pending: set[int] = field(default_factory=set)  # connectors that said "not yet"
    outcomes: set[tuple[int, str]] = field(default_factory=set)  # (connector, outcome) of its lookups so far
    given: dict[int, int] = field(default_factory=dict)  # of this allocation: connector -> tokens
    counted: bool = False  # its offers are
    load: tuple[int, Load, int] | None = None  # an open one: connector, load, tokens
    savers: list[int] = field(default_factory=list)
    ended: int = 0  # connectors that were told of its end


class Ledger(Run):
    """The records of one engine's life, in place of a list of all calls.

    Args:
        reporters: on how many ranks each connector reports.
        bytes_per_token: over all ranks.
    """

    def __init__(self, reporters: tuple[int, ...], bytes_per_token: int) -> None:
        super().__init__("kvobs")
        self.reporters, self.bytes_per_token = reporters, bytes_per_token
        self.expected: Counter[Series] = Counter()
        self.strays: Counter[Series] = Counter()  # at least so many
        self.ends: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self.running: set[str] = set()  # that vLLM has not ended
        self.awaited: dict[str, str] = {}  # by request, as what vLLM must be told of it: "received" or "sent"
        self.silent: dict[str, tuple[int, ...]] = {}  # ranks that report nothing of a request until all is over
        self.bad: set[tuple[int, str, int]] = set()  # loads that failed: connector, request, number
        self.doubtful: set[tuple[int, str, int]] = set()  # those that have failed if they were not over
        self.slack: Counter[Series] = Counter()  # what the metrics may have more or less of, for these
        self.completed = self.doubled = 0
        self.is_settled = False

    def note(self, who: str, hook: str, *arguments: Any) -> None:
        """Count a call; keep nothing of it."""
        if hook in PER_REQUEST and who.endswith("scheduler"):
            self._count("kvobs_call_duration_seconds_count", int(who.split()[1]), hook)

    def mark(self, cause: Cause, *arguments: Any) -> None:
        self.seen[cause.name.lower().replace("_", " ")] += 1
        if cause in STRAYS:
            self.strays["kvobs_unexpected_reports_total", arguments[0], (STRAYS[cause],)] += 1

    def spares(self, request: str) -> bool:
        """Return whether a rank is silent about this request, which ends after the comparison."""
        return request in self.silent

    def doubt(self, request: str = "", block: int = 0) -> None:
        for index, load, _ in filter(None, (asked.load for asked in self.asked.values())):
            if load.request == request or (block and block in load.blocks[0]):
                self.doubtful.add((index, load.request, load.number))

    def _count(self, metric: str, index: int, *labels: str, n: int = 1, is_sure: bool = True) -> None:
        self.expected[metric, index, labels] += n
        if not is_sure:
            self.slack[metric, index, labels] += n

    # What is asked

    def arrived(self, request: str) -> None:
        self.asked[request] = Asked()
        self.running.add(request)

    def answered(self, request: str, index: int, tokens: int | None) -> None:
        """Note a connector's answer to a lookup; it is always the first connector that is asked first."""
        asked = self.asked[request]
        if index == 0:
            asked.answers = {}
        outcome = "pending" if tokens is None else "hit" if tokens else "miss"
        if (index, outcome) not in asked.outcomes:  # once, however often it is looked up
            asked.outcomes.add((index, outcome))
            self._count("kvobs_lookups_total", index, outcome)
        if tokens is None:
            asked.pending.add(index)
            return
        if index in asked.pending:
            asked.pending.remove(index)
            self._count("kvobs_lookup_delay_seconds_count", index)
        asked.answers[index] = tokens

    def allocated(self, request: str, index: int, tokens: int, load: Load | None) -> None:
        """Note what vLLM allocated for a connector's load; after the last connector's call all know."""
        asked = self.asked[request]
        asked.given[index] = tokens
        if load is not None:
            self._close_sync(asked)
            assert asked.load is None, f"{request} has two loads"
            asked.load = index, load, tokens
            self._count("kvobs_admitted_tokens_total", index, n=tokens)
            if load.is_async:
                self.awaited[request] = "received"
        if index == len(self.reporters) - 1:
            self._settle_offers(asked)

    def _settle_offers(self, asked: Asked) -> None:
        given, asked.given = asked.given, {}
        owner = next((index for index, tokens in given.items() if tokens), None)
        answers, asked.answers = asked.answers, {}
        offers = {index: tokens for index, tokens in answers.items() if tokens}
        if asked.counted or not offers:
            return
        asked.counted = True
        won = 0 if owner is None else offers[owner]
        for index, tokens in offers.items():
            self._count("kvobs_offered_tokens_total", index, n=tokens)
            if index == owner:
                self._count("kvobs_unused_hit_tokens_total", index, "not_taken", n=max(0, tokens - given[index]))
            else:
                self._count("kvobs_unused_offers_total", index)
                reason = "not_taken" if owner is None else "other_chosen"
                self._count("kvobs_unused_hit_tokens_total", index, reason, n=max(0, tokens - won))

    def finished(self, request: str, index: int, *, promises: bool) -> None:
        """Note a connector's answer at a request's end; after the last connector's call all have answered."""
        asked = self.asked[request]
        asked.ended += 1
        asked.savers += [index] if promises else []
        if asked.ended < len(self.reporters):
            return
        if not asked.counted and len(asked.answers) == len(self.reporters):  # vLLM had no blocks for it
            for offering, tokens in asked.answers.items():
                self._count("kvobs_offered_tokens_total", offering, n=tokens)
                self._count("kvobs_unused_hit_tokens_total", offering, "not_allocated", n=tokens)
        if asked.savers:
            self.awaited[request] = "sent"
        elif request not in self.awaited:
            self._forget(request)

    # What vLLM is told

    def told_vllm(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """Note which completions vLLM got in a step: each is awaited, and comes once."""
        for what, requests in (("received", received), ("sent", sent)):
            for request in requests:
                if self.awaited.pop(request, "") != what:
                    self.doubled += 1
                    continue
                self.completed += 1
                asked = self.asked[request]
                self._close_load(asked, is_aborted=asked.ended > 0 and asked.load[1].is_async if asked.load else False)
                for saver in asked.savers:
                    self._count("kvobs_saves_total", saver, "ok")
                if asked.ended:
                    self._forget(request)

    def _close_load(self, asked: Asked, *, is_aborted: bool) -> None:
        """Count how a load has ended; of one that was aborted only what arrived is known here."""
        if asked.load is None:
            return
        (index, load, tokens), asked.load = asked.load, None
        key = index, load.request, load.number
        mode, is_bad = "async" if load.is_async else "sync", key in self.bad
        is_sure = is_bad or key not in self.doubtful
        self.bad.discard(key)
        self.doubtful.discard(key)
        if is_bad or not is_sure:
            self._count("tokens of bad loads", index, n=tokens)
        if not is_bad:
            self._count("kvobs_load_tokens_total", index, n=tokens, is_sure=is_sure)
            self._count("kvobs_load_bytes_total", index, n=tokens * self.bytes_per_token, is_sure=is_sure)
        if is_bad or is_aborted:
            self._count("loads that brought nothing", index, mode)
        else:
            self._count("kvobs_loads_total", index, mode, "ok", is_sure=is_sure)
            self.slack["loads that brought nothing", index, (mode,)] += not is_sure

    def _close_sync(self, asked: Asked) -> None:
        if asked.load is not None and not asked.load[1].is_async:
            self._close_load(asked, is_aborted=False)

    def _forget(self, request: str) -> None:
        self._close_sync(self.asked.pop(request))

    def ended(self, request: str, how: str) -> None:
        """Note that vLLM has ended a request; a second end of it is doubled."""
        if request not in self.running:
            self.doubled += 1
            return
        self.running.remove(request)
        self.ends[how] += 1

    def open_transfers(self) -> Counter[Series]:
        """Return how many loads and saves of an idle engine are open, as the gauges must show.

        A save is open while a rank that reports it is silent, not while another connector's is.
        """
        found: Counter[Series] = Counter()
        for request, asked in self.asked.items():
            self._close_sync(asked)
            if asked.load is not None:
                found["kvobs_in_flight", asked.load[0], ("load",)] += 1
            first_silent = min(self.silent.get(request, (0,)))
            savers = [index for index in asked.savers if first_silent < self.reporters[index]]
            found.update(("kvobs_in_flight", index, ("save",)) for index in savers)
        return found

    def at_least(self) -> Counter[Series]:
        """Return what the metrics must have counted, or more of it."""
        found = Counter(self.strays)
        for request, ranks in self.silent.items():
            asked = self.asked[request]
            if len(ranks) == 1:  # the others have reported
                index = asked.load[0] if asked.load is not None else asked.savers[0]
                found["kvobs_stuck_transfers_total", index, (str(*ranks),)] += 1
        return found

    def differences(self, value: Callable[..., float]) -> list[str]:
        """Compare an idle engine's metrics, which ``value`` returns by name, index and labels, with what was noted."""
        wrong = []

        def check(what: str, index: int, found: float, expected: float, slack: int = 0) -> None:
            if abs(found - expected) > slack:
                wrong.append(f"{what} of connector {index}: {found} instead of {expected}")

        for (metric, index, labels), expected in (self.expected + self.open_transfers()).items():
            if metric.startswith("kvobs"):
                slack = self.slack[metric, index, labels]
                check(f"{metric} {labels}", index, value(metric, index, *labels), expected, slack)
        for (metric, index, labels), least in self.at_least().items():
            check(f"{metric} {labels}", index, min(least, value(metric, index, *labels)), least)
        for index, reporters in enumerate(self.reporters):
            loads = {
                (mode, outcome): value("kvobs_loads_total", index, mode, outcome)
                for mode in ("async", "sync")
                for outcome in ("ok", "failed", "aborted")
            }
            saves = value("kvobs_saves_total", index, "ok")
            for mode in ("async", "sync"):
                nothing = self.expected["loads that brought nothing", index, (mode,)]
                slack = self.slack["loads that brought nothing", index, (mode,)]
                check(f"{mode} loads that failed or were aborted", index,
                      loads[mode, "failed"] + loads[mode, "aborted"], nothing, slack)  # fmt: skip
                check(f"{mode} loads timed", index,
                      value("kvobs_load_duration_seconds_count", index, mode), loads[mode, "ok"])  # fmt: skip
            several = reporters > 1
            for kind, n in (("load", loads["sync", "ok"] + several * loads["async", "ok"]), ("save", several * saves)):
                check(f"skews of a {kind}", index, value("kvobs_rank_skew_seconds_count", index, kind), n)
            most = self.expected["tokens of bad loads", index, ()]
            check("recomputed tokens", index, max(most, value("kvobs_recomputed_tokens_total", index)), most)
            check("saves timed", index, value("kvobs_save_hold_seconds_count", index), saves)
            check("sync loads failed", index, value("kvobs_failed_sync_loads_total", index), loads["sync", "failed"])
        return wrong
