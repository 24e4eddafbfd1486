"""Track which connector loads a request, which connectors promised to save it, and which ranks have reported.

A pure state machine on the scheduler's side. Workers pass on their connectors' reports by rank; the ledger decides when
a load is received, when a save is done, and when a finished request's blocks may be released: once, after its last
promised save and its last open load were reported by every expected rank.

The life of one request:

    offered -> admit: a load opens -> settle: rank by rank -> complete -> close -> received -> admit: resumed
                                       a rank failed: -> take_failures, the workers echo it -> settle -> close
    finish: promises open -> settle -> complete -> close -> released

Between ``settle`` and ``close`` the connectors see the output that vLLM will get: one may withdraw its own report
(``reopen_save``; a load is simply not closed), or add one that no rank made.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kvobs.state.transfers import (
    Closed,
    Finished,
    InProgress,
    Load,
    Report,
    ReportKind,
    RequestTransfers,
    Save,
    Settled,
    Stuck,
    UnexpectedReport,
)

# Enum members are slow to access, and there is a report for each load and rank.
_RECEIVED, _FAILED, _UNMAPPED_BAD_BLOCKS, _BAD_BLOCKS, _SAVED, _SYNC_DONE, _SYNC_FAILED = ReportKind
_TO_BE_REPORTED, _OF_BLOCKS = (_FAILED, _UNMAPPED_BAD_BLOCKS), (_UNMAPPED_BAD_BLOCKS, _BAD_BLOCKS)


class Ledger:
    """Load owners, promised saves and rank tallies of all live requests.

    The connectors in ``load_ends_save`` report no save of a request that has ended during their load: the load's end is
    also the end of the promised save.
    """

    def __init__(self, load_ends_save: Collection[int] = ()) -> None:
        self._load_ends_save = load_ends_save
        self._entries: dict[str, RequestTransfers] = {}
        self._completed_loads: list[str] = []  # requests whose load is complete, not yet closed
        self._completed_saves: list[str] = []  # requests whose promised saves are all complete
        self.failures: list[str] = []  # async loads that every rank must report to vLLM as failed
        # By connector the open loads and promised saves, and the resumes: loaded, and not scheduled since.
        self.in_flight: defaultdict[int, dict[str, InProgress[str]]] = defaultdict(
            lambda: {"load": InProgress(), "awaiting_schedule": InProgress(), "save": InProgress()}
        )
        self.incomplete = InProgress[tuple[str, int, str]]()
        """The transfers that some ranks have reported and others have not: kind, connector, request."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    def unfinished(self) -> list[str]:
        """Return the requests that vLLM has not finished."""
        return [request for request, entry in self._entries.items() if not entry.finished]

    # Lookup and allocation

    def arrive(self, request: str) -> RequestTransfers:
        """Return the state of a request; create it if needed."""
        if (entry := self._entries.get(request)) is None:
            entry = self._entries[request] = RequestTransfers()
        return entry

    def propose(self, request: str, candidate: tuple[int, bool] | None) -> None:
        """Remember the last lookup's winner (connector, is_async) or None, until the allocation."""
        self.arrive(request).candidate = candidate

    def candidate(self, request: str) -> tuple[int, bool] | None:
        """Return the last lookup's winner (connector, is_async), until the allocation."""
        return entry.candidate if (entry := self._entries.get(request)) else None

    def admit(self, request: str, tokens: int, expected: int, now_ns: int = 0, **details: Any) -> Load | None:
        """Open the load that vLLM allocated ``tokens`` for; return None if there is nothing to load.

        ``expected`` is the number of ranks whose report completes it, ``details`` are more fields of ``Load``. A second
        allocation call after an async load has 0 tokens and changes nothing.
        """
        entry = self.arrive(request)
        candidate, entry.candidate = entry.candidate, None
        self._end_resume(request, entry)
        if tokens <= 0 or candidate is None:
            return None
        index, is_async = candidate
        entry.owner = index
        if entry.load is not None:  # a load of an earlier allocation, for which vLLM no longer waits
            self._end_open(request, entry.load)
        entry.load = Load(index, tokens, is_async, max(1, expected), now_ns, **details)
        self.in_flight[index]["load"].begin(request, now_ns, tokens)
        return entry.load

    def load(self, request: str) -> Load | None:
        """Return the open load of this request."""
        return entry.load if (entry := self._entries.get(request)) else None

    def choice(self, request: str) -> int | None:
        """Return the connector that would load this request if vLLM allocated now, else its owner."""
        entry = self._entries.get(request)
        return None if entry is None else entry.candidate[0] if entry.candidate else entry.owner

    def is_async(self, request: str) -> bool:
        """Return whether an async load of this request is open."""
        return (load := self.load(request)) is not None and load.is_async

    # Reports

    def settle(self, reports: Iterable[Report], read: Iterable[str], now_ns: int = 0) -> Settled:
        """Count a step's reports, read at ``now_ns``, and return what they have settled; each is returned once.

        ``read`` are the failed loads that vLLM reads in this step. What was given up since the last one is settled now.
        """
        unexpected = [unexpected for report in reports for unexpected in self.record(report, now_ns)]
        for request in read:
            self._echoed(request)
        settled = Settled(self._completed_loads, self._completed_saves, unexpected)
        self._completed_loads, self._completed_saves = [], []
        return settled

    def record(self, report: Report, now_ns: int = 0) -> list[UnexpectedReport]:
        """Count one rank's report, read at ``now_ns``; return which of it the connector does not own.

        A failure that another connector than the owner reports counts for the load, and is returned as well.
        """
        rank, kind, index, time_ns, requests, spent, began = report
        if kind is _SAVED:
            return self._record_saves(report, now_ns)
        entries, unexpected = self._entries, list[UnexpectedReport]()
        is_sync = kind is _SYNC_DONE or kind is _SYNC_FAILED
        has_failed = kind is not _RECEIVED and kind is not _SYNC_DONE
        has_arrived = kind is not _UNMAPPED_BAD_BLOCKS and kind is not _BAD_BLOCKS
        for request, spent_ns, began_ns in zip(requests, spent, began, strict=True):
            entry = entries.get(request)
            load = entry.load if entry is not None else None
            if load is None or load.connector_index != index or load.is_async is is_sync:
                if not is_sync:  # kvobs's own report, about a request that no longer exists
                    unexpected.append(self._record_unexpected(load, report, request))
                continue
            if has_failed:
                self._note_failure(load, report, request)
            arrived = load.arrived
            if not has_arrived or rank in arrived:
                continue
            arrived[rank] = time_ns, spent_ns, began_ns
            load.arrived_ns = now_ns
            if (n := len(arrived)) == load.expected:
                if n > 1:
                    self.incomplete.end(("load", index, request))
                (self.failures if load.must_report_failure else self._completed_loads).append(request)
            elif n == 1:
                self.incomplete.begin(("load", index, request), now_ns)
        return unexpected

    def _record_unexpected(self, load: Load | None, report: Report, request: str) -> UnexpectedReport:
        """Note what another connector than the owner reports; it may have written into the blocks of an open load.

        After a failure the load has failed on that rank, and its owner's receipt is still waited for.
        """
        kind, counts = report.kind, False
        if load is not None and load.connector_index != report.connector_index:
            counts = kind is _BAD_BLOCKS or (load.is_async and kind in _TO_BE_REPORTED)
        if load is not None and counts:
            self._note_failure(load, report, request)
            load.blamed_by.add(report.connector_index)
        name = "load" if kind is _RECEIVED else "blocks" if counts and kind in _OF_BLOCKS else "failure"
        return UnexpectedReport(report.connector_index, name, request)

    def _note_failure(self, load: Load, report: Report, request: str) -> None:
        load.failed_on.add(report.rank)
        if load.must_report_failure or report.kind not in _TO_BE_REPORTED:
            return
        load.must_report_failure = True
        if load.is_in:  # the worker collects the blocks after the receipt, which its connector may have withdrawn
            if request in self._completed_loads:
                self._completed_loads.remove(request)
            self.failures.append(request)

    def _record_saves(self, report: Report, now_ns: int) -> list[UnexpectedReport]:
        rank, _, index, time_ns, requests, spent, began = report
        unexpected = []
        for request, spent_ns, began_ns in zip(requests, spent, began, strict=True):
            entry = self._entries.get(request)
            save = entry.saves.get(index) if entry is not None else None
            if entry is None or (entry.finished if save is None else save.done):
                unexpected.append(UnexpectedReport(index, "save", request))
                continue
            if save is None:
                save = entry.saves[index] = Save()
            if rank in save.arrived:
                continue
            save.arrived[rank] = time_ns, spent_ns, began_ns
            save.arrived_ns = now_ns
            if not save.promised or save.is_abandoned:
                continue
            if (n := len(save.arrived)) == save.expected:
                self._settle_save(request, entry, index)
            elif n == 1:
                self.incomplete.begin(("save", index, request), now_ns)
        return unexpected

    def _echoed(self, request: str) -> None:
        """Note that vLLM has read a load's failure, which ends it; it may read it again when another load is open."""
        if (load := self.load(request)) is not None and load.is_in and load.must_report_failure:
            if request in self.failures:  # no rank need report it again
                self.failures.remove(request)
            self._completed_loads.append(request)

    def is_saved_on(self, rank: int, request: str) -> bool:
        """Return whether this rank has reported all promised saves of a request that are not over."""
        entry = self._entries.get(request)
        return entry is not None and all(rank in save.arrived or save.is_settled for save in entry.saves.values())

    def _settle_save(self, request: str, entry: RequestTransfers, index: int) -> None:
        """Note that a promised save is settled; its request may still wait for other connectors."""
        self._end_open_save(request, index)
        if all(save.is_settled for save in entry.saves.values()):
            self._completed_saves.append(request)

    def take_stuck(self, before_ns: int, ranks: int) -> list[tuple[int, Stuck]]:
        """Return the transfers first reported at this time or before, and still incomplete, by connector; each once.

        ``ranks`` is the number of all ranks: if fewer are expected to report, the missing ones are unknown.
        """
        stuck = []
        for (kind, index, request), *_ in self.incomplete.take_late(before_ns):
            entry = self._entries[request]
            transfer = entry.load if kind == "load" else entry.saves[index]
            assert transfer is not None
            silent = tuple([rank for rank in range(ranks) if rank not in transfer.arrived])
            stuck.append((index, Stuck(kind, request, silent if transfer.expected == ranks else ())))
        return stuck

    @property
    def has_ended(self) -> bool:
        """Whether saves are complete without a report of this step: they were given up."""
        return bool(self._completed_saves)

    def take_failures(self) -> tuple[str, ...]:
        """Return the async loads that every rank must now report to vLLM as failed; each is returned once."""
        failures, self.failures = tuple(self.failures), []
        return failures

    def fail(self, request: str, now_ns: int) -> bool:
        """Fail an async load, also a withdrawn one, on all ranks without a report; return whether there was one."""
        load = self.load(request)
        if load is None or not load.is_async or (load.is_in and load.must_report_failure):
            return False
        load.failed_on.update(load.complete(now_ns) or range(load.expected))
        load.must_report_failure = True
        self.incomplete.end(("load", load.connector_index, request))
        self.failures.append(request)
        return True

    def give_up(self, index: int, before_ns: int, now_ns: int) -> tuple[int, int]:
        """Fail a connector's loads and complete its saves that were open before a time; return how many of each."""
        loads, saves = (self.in_flight[index][kind].begun_before(before_ns) for kind in ("load", "save"))
        failed = sum(self.fail(request, now_ns) for request in loads)
        for request in saves:
            entry = self._entries[request]
            entry.saves[index].is_abandoned = True
            self._settle_save(request, entry, index)
        return failed, len(saves)

    # Reports of the connectors' scheduler side on the workers' output: they count for all ranks

    def complete_load(self, request: str, index: int, now_ns: int) -> bool | None:
        """Mark a connector's open load as received on every rank.

        Return whether it may be reported to vLLM now; False if a rank reported a failure, which the workers must report
        first; None if the connector has no such load.
        """
        load = self.load(request)
        if load is None or load.connector_index != index or not load.is_async:
            return None
        was_in = load.is_in
        load.complete(now_ns)
        self.incomplete.end(("load", index, request))
        if load.must_report_failure and not was_in:
            self.failures.append(request)
        return not load.must_report_failure

    def complete_save(self, request: str, index: int, now_ns: int) -> bool | None:
        """Mark a connector's promised save as done on every rank.

        Return whether all promised saves of the request are now complete, or None if the connector has none open.
        """
        entry = self._entries.get(request)
        save = entry.saves.get(index) if entry is not None else None
        if entry is None or save is None or not save.promised or save.done:
            return None
        if not save.is_settled:
            save.complete(now_ns)
            self._end_open_save(request, index)
        save.is_given_up = True
        return all(save.is_settled for save in entry.saves.values())

    def reopen_save(self, request: str, index: int) -> bool:
        """Reopen a connector's complete promised save, unless the connector has completed it itself; return whether."""
        entry = self._entries.get(request)
        save = entry.saves.get(index) if entry is not None else None
        if entry is None or save is None or not save.promised or save.done or save.is_given_up:
            return False
        save.arrived.clear()
        save.arrived_ns = 0
        save.is_abandoned = False
        self.in_flight[index]["save"].begin_again(request, save.promised_ns, entry.held_tokens)
        return True

    # Completions

    def close(self, loads: Iterable[str], saves: Iterable[str], now_ns: int = 0) -> Closed:
        """Close the complete loads, and the complete saves of finished requests; return what is over by that.

        With a load that is over vLLM may resume its request, or release it if it has finished in the meantime.
        """
        closed = Closed([], [], set(), set())
        for request in loads:
            if (entry := self._entries.get(request)) is not None and entry.load is not None:
                self._close_load(request, entry, entry.load, now_ns, closed)
        with_loads, self._completed_saves = self._completed_saves, []  # some end with their load
        for request in (*saves, *with_loads):
            if (entry := self._entries.get(request)) is not None and entry.finished:
                self._close_saves(request, entry, closed)
        return closed

    def _close_load(self, request: str, entry: RequestTransfers, load: Load, now_ns: int, closed: Closed) -> None:
        index, entry.load = load.connector_index, None
        self._end_open(request, load)
        closed.loads.append((request, load))
        if load.aborted and index in self._load_ends_save:
            save = entry.saves.get(index)
            if save is not None and not save.is_settled and self.complete_save(request, index, now_ns):
                self._completed_saves.append(request)
        if entry.finished:
            self._forget(request, entry, closed)
        elif load.is_async:
            closed.received.add(request)
            if not load.failed_on:
                self.in_flight[index]["awaiting_schedule"].begin(request, now_ns, load.tokens)

    def _close_saves(self, request: str, entry: RequestTransfers, closed: Closed) -> None:
        for index, save in entry.saves.items():
            if not save.done:
                save.done = True
                closed.saves.append((request, index, save))
        self._forget(request, entry, closed)

    def _forget(self, request: str, entry: RequestTransfers, closed: Closed) -> None:
        """Forget a finished request without open transfers, and release it if vLLM waits for that."""
        if entry.is_settled:
            del self._entries[request]
            if entry.awaited:
                (closed.sent if entry.holds else closed.received).add(request)

    # The end of a request

    def accept_tail(self, request: str, index: int) -> None:
        """Note that a connector accepted the request's partial last block: a promised save, made just before the end.

        Its earlier reports are not about that block.
        """
        entry = self.arrive(request)
        entry.tails.add(index)
        entry.saves.pop(index, None)

    def tails(self, request: str) -> frozenset[int]:
        """Return the connectors that accepted the request's partial last block."""
        return frozenset(entry.tails if (entry := self._entries.get(request)) else ())

    def finish(self, request: str, promises: Iterable[tuple[int, int]], now_ns: int = 0, tokens: int = 0) -> Finished:
        """Record that vLLM has finished a request, with the (index, number of ranks that report) of each promised save.

        ``tokens`` are those whose KV blocks are held for the promised saves.
        """
        entry = self._entries.pop(request, None) or RequestTransfers()
        entry.finished, entry.candidate, entry.held_tokens = True, None, tokens
        self._end_resume(request, entry)
        # A sync load ends with its step, whose output vLLM is handling now: vLLM does not wait for it.
        aborted = entry.load if entry.load is not None and entry.load.is_async else None
        if aborted is not None:
            aborted.aborted = True
        early, promised = dict[int, Save](), dict[int, Save]()
        for index, expected in promises:
            save = entry.saves.setdefault(index, Save())
            save.promised, save.expected, save.promised_ns = True, max(1, expected), now_ns
            if save.is_in:
                save.done = True
                early[index] = save
            else:
                promised[index] = save
                self.in_flight[index]["save"].begin(request, now_ns, tokens)
                if save.arrived:
                    self.incomplete.begin(("save", index, request), now_ns)
        unexpected = [
            UnexpectedReport(index, "save", request) for index, save in entry.saves.items() if not save.promised
        ]
        for report in unexpected:
            del entry.saves[report.connector_index]
        entry.holds = any(not save.done for save in entry.saves.values())
        entry.awaited = entry.holds or aborted is not None
        if not entry.is_settled:
            self._entries[request] = entry
        return Finished(entry.holds, aborted, promised, early, unexpected)

    def _end_open(self, request: str, load: Load) -> None:
        self.in_flight[load.connector_index]["load"].end(request)
        self.incomplete.end(("load", load.connector_index, request))

    def _end_open_save(self, request: str, index: int) -> None:
        self.in_flight[index]["save"].end(request)
        self.incomplete.end(("save", index, request))

    def _end_resume(self, request: str, entry: RequestTransfers) -> None:
        if entry.owner is not None:
            self.in_flight[entry.owner]["awaiting_schedule"].end(request)
