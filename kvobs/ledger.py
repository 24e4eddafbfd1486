"""Who owes what: which child loads a request, which children promised to save it, which ranks have reported.

A pure state machine on the scheduler's side. Workers report what their children say, rank by rank; the ledger decides
when a load is received, when a save is done, and when a finished request's blocks may be released: once, after its
last promised save and its last open load, on every rank that is expected to report.

The life of one request:

    offered -> admit: a load opens -> hear: rank by rank -> loads_in -> close_load -> received
                                       a rank failed: -> take_failures, the workers echo it -> echoed -> close_load
    finish: promises open -> hear -> saves_in -> close_save -> released
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvobs.reports import Foreign, Kind, Report
from kvobs.transfers import Finished, Halves, Load, Save

# An enum's members are slow to reach, and there is a report for each load and rank.
_RECEIVED, _SAVED, _SYNC_DONE, _SYNC_FAILED = Kind.RECEIVED, Kind.SAVED, Kind.SYNC_DONE, Kind.SYNC_FAILED
_TO_BE_ECHOED, _OF_BLOCKS = (Kind.FAILED, Kind.SPOILED), (Kind.SPOILED, Kind.HOLED)


@dataclass(slots=True)
class Entry:
    """One live request."""

    candidate: tuple[int, bool] | None = None  # the last lookup's winner: child, is_async
    owner: int | None = None  # fixed at allocation with tokens > 0, kept until the request is gone
    load: Load | None = None
    saves: dict[int, Save] = field(default_factory=dict)
    tails: set[int] = field(default_factory=set)  # children that took over the partial last block
    finished: bool = False
    holds: bool = False  # vLLM was told at the request's end that its blocks must stay
    awaited: bool = False  # vLLM keeps the finished request until it is reported once more

    @property
    def is_settled(self) -> bool:
        return self.load is None and all(save.done for save in self.saves.values())


class Ledger:
    """Load owners, promised saves and rank tallies of all live requests."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._loads_in: dict[int, list[str]] = {}  # child -> requests whose load is in, not yet closed
        self._saves_in: dict[int, list[str]] = {}
        self._failures: list[str] = []
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._open_loads: dict[int, dict[str, int]] = {}  # child -> request -> start, the oldest first
        self._open_saves: dict[int, dict[str, int]] = {}
        self.halves = Halves()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def unfinished(self) -> list[str]:
        """Return the requests that vLLM has not finished."""
        return [request for request, entry in self._entries.items() if not entry.finished]

    # Lookup and allocation

    def arrive(self, request: str) -> None:
        """Open the books for a request, if they are not."""
        self._entry(request)

    def propose(self, request: str, candidate: tuple[int, bool] | None) -> None:
        """Remember the last lookup's winner (child, is_async), or that there was none: nothing is fixed yet."""
        self._entry(request).candidate = candidate

    def admit(self, request: str, tokens: int, expected: int, now_ns: int = 0) -> Load | None:
        """Open the load that vLLM allocated ``tokens`` for; return None when nothing is to be loaded.

        ``expected`` is the number of ranks whose report completes it. A second allocation call after an async load
        has 0 tokens and changes nothing.
        """
        entry = self._entry(request)
        candidate, entry.candidate = entry.candidate, None
        if tokens <= 0 or candidate is None:
            return None
        child, is_async = candidate
        entry.owner = child
        if entry.load is not None:  # one of an earlier allocation, whose end vLLM no longer waits for
            self._not_open(request, entry.load)
        entry.load = Load(child, tokens, is_async, max(1, expected), now_ns)
        self._open_loads.setdefault(child, {})[request] = now_ns
        return entry.load

    def load(self, request: str) -> Load | None:
        """Return the open load of this request."""
        entry = self._entries.get(request)
        return entry.load if entry else None

    def owner(self, request: str) -> int | None:
        """Return the child that loads, or last loaded, this request."""
        entry = self._entries.get(request)
        return entry.owner if entry else None

    def choice(self, request: str) -> int | None:
        """Return the child that would load this request if vLLM allocated now, else its owner."""
        entry = self._entries.get(request)
        if entry is None:
            return None
        return entry.candidate[0] if entry.candidate else entry.owner

    def is_async(self, request: str) -> bool:
        """Return whether an async load of this request is open."""
        load = self.load(request)
        return load is not None and load.is_async

    # Reports

    def hear(self, report: Report, now_ns: int = 0) -> Foreign | None:
        """Take in one report; return it as foreign when its child owns no such load or save."""
        rank, kind, request, child, time_ns, spent_ns, began_ns = report
        entry = self._entries.get(request)
        if kind is _SAVED:
            return self._hear_save(entry, report, now_ns)
        load = entry.load if entry is not None else None
        is_sync = kind is _SYNC_DONE or kind is _SYNC_FAILED
        if load is None or load.child != child or load.is_async is is_sync:
            if is_sync:
                return None  # kvobs's own report about a request that is gone by now
            return Foreign(child, "load" if kind is _RECEIVED else "failure", request)
        if kind is not _RECEIVED and kind is not _SYNC_DONE:
            load.failed_on.add(rank)
            load.needs_echo |= kind in _TO_BE_ECHOED
            if kind in _OF_BLOCKS:
                return None  # says nothing about arrival
        if rank in load.arrived:
            return None
        load.arrived[rank] = spent_ns if is_sync else time_ns
        load.ranks[rank] = began_ns, time_ns
        if self._is_last("load", report, load, now_ns):
            if load.needs_echo:
                self._failures.append(request)
            else:
                self._loads_in.setdefault(child, []).append(request)
        return None

    def _hear_save(self, entry: Entry | None, report: Report, now_ns: int) -> Foreign | None:
        if entry is None:
            return Foreign(report.child, "save", report.request)
        save = entry.saves.get(report.child)
        if save is None:
            if entry.finished:
                return Foreign(report.child, "save", report.request)
            save = entry.saves[report.child] = Save()
        elif save.done:
            return Foreign(report.child, "save", report.request)
        if report.rank in save.arrived:
            return None
        save.arrived[report.rank] = report.time_ns
        save.ranks[report.rank] = (report.began_ns, report.time_ns)
        if save.promised and self._is_last("save", report, save, now_ns):
            self._saves_in.setdefault(report.child, []).append(report.request)
        return None

    def _is_last(self, kind: str, report: Report, transfer: Load | Save, now_ns: int) -> bool:
        """Return whether this is the report that completes a transfer; note when it is the first of several."""
        said = len(transfer.arrived)
        if said == transfer.expected:
            if said > 1:
                self.halves.forget(kind, report.child, report.request)
            return True
        if said == 1:
            self.halves.note(kind, report.child, report.request, transfer, now_ns)
        return False

    def take_failures(self) -> tuple[str, ...]:
        """Return the async loads that every rank must now report to vLLM as failed; each is handed out once."""
        failures, self._failures = tuple(self._failures), []
        return failures

    def echoed(self, request: str) -> None:
        """Note that vLLM has been told of a failed load: it may be closed like any that is in."""
        entry = self._entries.get(request)
        if entry is not None and entry.load is not None:
            self._loads_in.setdefault(entry.load.child, []).append(request)

    def fail(self, request: str, now_ns: int) -> bool:
        """Take an async load for failed on every rank that has not reported it; return whether there was one."""
        load = self.load(request)
        if load is None or not load.is_async or load.is_in:
            return False
        silent = [rank for rank in range(load.expected) if rank not in load.arrived]
        load.failed_on.update(silent)
        load.arrived.update(dict.fromkeys(silent, now_ns))
        load.needs_echo = True
        self.halves.forget("load", load.child, request)
        self._failures.append(request)
        return True

    def give_up(self, child: int, before_ns: int, now_ns: int) -> tuple[int, int]:
        """Fail the loads and complete the saves of ``child`` that were open before a time; return how many of each."""
        loads, saves = (
            [request for request, since in transfers.items() if since <= before_ns]
            for transfers in self.in_flight(child)
        )
        failed = sum(self.fail(request, now_ns) for request in loads)
        for request in saves:
            save = self._entries[request].saves[child]
            if not save.is_in:
                save.is_abandoned = True
                self.halves.forget("save", child, request)
                self._saves_in.setdefault(child, []).append(request)
        return failed, len(saves)

    # Completions, child by child

    def take_loads_in(self, child: int) -> list[str]:
        """Return the requests whose load from ``child`` is in on every expected rank; each is handed out once."""
        return self._loads_in.pop(child, [])

    def take_saves_in(self, child: int) -> list[str]:
        """Return the requests whose promised save by ``child`` is in on every expected rank."""
        return self._saves_in.pop(child, [])

    def close_load(self, request: str) -> Load | None:
        """Close the open load: vLLM may resume the request, or release it if it has finished meanwhile."""
        entry = self._entries.get(request)
        if entry is None or entry.load is None:
            return None
        load, entry.load = entry.load, None
        self._not_open(request, load)
        if load.is_async and not entry.finished:
            self._received.add(request)
        self._settle(request, entry)
        return load

    def close_save(self, request: str, child: int) -> Save | None:
        """Close a promised save; return None when ``child`` has none open."""
        entry = self._entries.get(request)
        save = entry.saves.get(child) if entry else None
        if entry is None or save is None or not save.promised or save.done:
            return None
        save.done = True
        del self._open_saves[child][request]
        self.halves.forget("save", child, request)
        self._settle(request, entry)
        return save

    def in_flight(self, child: int) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the open loads and the open promised saves of ``child``: request -> start, the oldest first."""
        return self._open_loads.get(child, {}), self._open_saves.get(child, {})

    # The end of a request

    def accept_tail(self, request: str, child: int) -> None:
        """Note that ``child`` took over the request's partial last block: a promise, made just before the end."""
        self._entry(request).tails.add(child)

    def tails(self, request: str) -> frozenset[int]:
        """Return the children that took over the request's partial last block."""
        entry = self._entries.get(request)
        return frozenset(entry.tails) if entry else frozenset()

    def finish(self, request: str, promises: Iterable[tuple[int, int]], now_ns: int = 0) -> Finished:
        """Note that vLLM has finished a request.

        Args:
            request: its id.
            promises: (child, number of ranks that report) of every child that promised a save.
            now_ns: the time, for the length of the hold.
        """
        entry = self._entries.pop(request, None) or Entry()
        entry.finished, entry.candidate = True, None
        # A sync load ends with its step, whose output vLLM is just handling: vLLM does not wait for it.
        aborted = entry.load if entry.load is not None and entry.load.is_async else None
        if aborted is not None:
            aborted.aborted = True
        early: dict[int, Save] = {}
        promised: dict[int, Save] = {}
        for child, expected in promises:
            save = entry.saves.setdefault(child, Save())
            save.promised, save.expected, save.promised_ns = True, max(1, expected), now_ns
            if save.is_in:
                save.done = True
                early[child] = save
            else:
                promised[child] = save
                self._open_saves.setdefault(child, {})[request] = now_ns
                if save.arrived:
                    self.halves.note("save", child, request, save, now_ns)
        unpromised = [child for child, save in entry.saves.items() if not save.promised]
        for child in unpromised:
            del entry.saves[child]
        entry.holds = any(not save.done for save in entry.saves.values())
        entry.awaited = entry.holds or aborted is not None
        if not entry.is_settled:
            self._entries[request] = entry
        foreign = [Foreign(child, "save", request) for child in unpromised]
        return Finished(entry.holds, aborted, promised, early, foreign)

    def take_received(self) -> set[str]:
        """Return what goes into vLLM's ``finished_recving``: loads in, and releases that vLLM expects there."""
        received, self._received = self._received, set()
        return received

    def take_sent(self) -> set[str]:
        """Return what goes into vLLM's ``finished_sending``: finished requests whose blocks may be released."""
        sent, self._sent = self._sent, set()
        return sent

    def _not_open(self, request: str, load: Load) -> None:
        del self._open_loads[load.child][request]
        self.halves.forget("load", load.child, request)

    def _settle(self, request: str, entry: Entry) -> None:
        """Forget a finished request that owes nothing any more, and release it if vLLM waits for that."""
        if entry.finished and entry.is_settled:
            del self._entries[request]
            if entry.awaited:
                (self._sent if entry.holds else self._received).add(request)

    def _entry(self, request: str) -> Entry:
        entry = self._entries.get(request)
        if entry is None:
            entry = self._entries[request] = Entry()
        return entry
