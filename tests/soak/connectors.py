"""The connectors of a soak: they say what they did, report twice, or never, and have stats that nobody can merge.

A server's soak has one that is steered by its requests, and remembers nothing.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from tests.engine.connectors_steered import SteeredConnector
from tests.soak.ledger import Ledger
from tests.transparency.behaviour import Half, SchedulerHalf, WorkerHalf
from tests.transparency.messages import Load

FOREVER = 10**9
"""Steps after which a silent rank reports: when the soak is over, and the records must close."""
LATE = range(20, 40)
"""Steps that few reports take."""
SILENT_AT_MOST = 6


class OddStats(KVConnectorStats):
    """Stats that nobody can merge."""

    data: dict[str, Any]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data


class Counted(Half):
    """A connector of an engine that has a ledger."""

    @property
    def ledger(self) -> Ledger:
        assert isinstance(self.books.run, Ledger)
        return self.books.run


class SoakScheduler(Counted, SchedulerHalf):
    """A connector in the scheduler's process."""

    def on_get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = super().on_get_num_new_matched_tokens(request, num_computed_tokens)
        self.ledger.answered(request.request_id, self.index, tokens)
        return tokens, is_async

    def on_update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().on_update_state_after_alloc(request, blocks, num_external_tokens)
        load = self._loads[-1] if num_external_tokens else None
        self.ledger.allocated(request.request_id, self.index, num_external_tokens, load)
        if load is not None and load.is_async:
            self._silence(request.request_id)

    def on_request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        promises, params = super().on_request_finished_all_groups(request, block_ids)
        self.ledger.finished(request.request_id, self.index, promises=promises)
        asked = self.ledger.asked.get(request.request_id)
        if promises and asked is not None and asked.savers == [self.index] and asked.load is None:
            self._silence(request.request_id)
        return promises, params

    def _silence(self, request: str) -> None:
        """Choose ranks that report nothing of a request, now and then."""
        ledger, last = self.ledger, self.life.running.ranks - 1
        if not ledger.is_settled and len(ledger.silent) < SILENT_AT_MOST and self.happens(0.02, "silent", request):
            all_ranks = self.one_reports or self.happens(0.5, "all are silent", request)
            ledger.silent[request] = tuple(range(last + 1)) if all_ranks else (last,)
            ledger.seen["never reported"] += 1


class SoakWorker(Counted, WorkerHalf):
    """A connector in one worker."""

    def __init__(self, *args: Any, rank: int) -> None:
        super().__init__(*args, rank=rank)
        self._again: list[tuple[int, Load]] = []

    def on_bind_connector_metadata(self, connector_metadata: Any) -> None:
        if self.ledger.is_settled and self.step < FOREVER:
            self.step += 2 * FOREVER
        super().on_bind_connector_metadata(connector_metadata)

    def _takes(self, *what: object) -> int:
        if self.rank in self.ledger.silent.get(str(what[1]), ()):
            return FOREVER
        if self.happens(0.04, "late", *what, self.rank):
            self.ledger.seen["late by many steps"] += 1
            return LATE[int(self.dice("how late", *what) * len(LATE))]
        return super()._takes(*what)

    def _fails(self, load: Load) -> bool:
        fails = load.request not in self.ledger.silent and super()._fails(load)
        if fails:
            self.ledger.bad.add((self.index, load.request, load.number))
        return fails

    def _spoil(self, load: Load, at: int) -> None:
        before = len(self._bad)
        # One step ahead, vLLM forgets the token that is under way for a request whose synchronous load turns out bad.
        is_safe = load.is_async or not self.life.running.is_async
        if is_safe and load.request not in self.ledger.silent and not (self.one_reports and self.rank):
            super()._spoil(load, at)
        if len(self._bad) > before:
            self.ledger.bad.add((self.index, load.request, load.number))

    def _results(self, can_fail: bool = True) -> tuple[set[str], set[str], set[str]]:
        loads = dict(self._loads)
        saved, received, failed = super()._results(can_fail)
        promised, often = self.books.promised, self.character.promises
        early = {name for name in saved if self.index not in promised.get(name, ()) and name in self.ledger.asked}
        # It would count as the promised one; a silent one's promise is drawn later.
        saved -= {name for name in early if name in self.ledger.silent or self.happens(often, "promises", name)}
        own = [loads[name][1] for name in received & loads.keys()]
        self._again += [(self.step + 3, load) for load in own if self.happens(0.1, "again", load.request)]
        for due, load in [*self._again]:
            if due <= self.step:
                self._again.remove((due, load))
                if self.books.loads.get(load.request, (self.index, load)) == (self.index, load):  # not the next one's
                    received.add(load.request)
                    self.ledger.seen["reported twice"] += 1
        return saved, received, failed

    def on_get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.index == 1 and self._at_times("odd stats"):
            self.ledger.seen["stats that can't be merged"] += 1
            return OddStats(data={"n": 1})
        return super().on_get_kv_connector_stats()


class ForgetfulConnector(SteeredConnector):
    """Does what each request's plan says on a server, and keeps no copies of blocks, so that its memory stays flat."""

    def _blocks_to_save(self, tracked: Any) -> list[tuple[int, str]]:
        return []
