"""What a recording connector answers: a function of the life, the connector, the request and the number of the call.

The scheduler's half and the workers' halves of a connector know of each other only through its metadata, as real ones
do. ``Books`` is the test's own view of all of them: it knows which report is stray, and whose.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tests.support.scripted import Events, Handshake
from tests.transparency.life import RECEIVES, WITHDRAWS, Character, Life
from tests.transparency.messages import Count, Load, Message, Note, Save
from tests.transparency.record import Cause, Run

SOURCES: Any = [*getattr(base, "CacheHitSource", ())]  # vLLM before 0.31 has none
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)  # vLLM before 0.30 has none


@dataclass
class Books:
    """Who really loads and saves what, over all connectors."""

    life: Life
    run: Run
    loads: dict[str, tuple[int, Load]] = field(default_factory=dict)  # open for vLLM: request -> connector, load
    promised: dict[str, set[int]] = field(default_factory=dict)
    tails: dict[str, set[int]] = field(default_factory=dict)
    answered: Counter[str] = field(default_factory=Counter)  # connectors that answered at a request's end
    failed: set[tuple[int, str]] = field(default_factory=set)
    saved: set[tuple[int, int, str]] = field(default_factory=set)  # reported: connector, rank, request
    alive: list[str] = field(default_factory=list)  # requests that the scheduler knows

    def arrive(self, request: str) -> None:
        """Note a new request, which may have the id of an earlier one."""
        self.promised.pop(request, None)
        self.tails.pop(request, None)
        del self.answered[request]
        self.failed = {each for each in self.failed if each[-1] != request}
        self.saved = {each for each in self.saved if each[-1] != request}

    def load_is_received(self, request: str) -> None:
        """Note that vLLM has been given this load."""
        self.loads.pop(request, None)

    def end(self, request: str, index: int, promises: bool) -> None:
        """Note a connector's answer at a request's end."""
        if promises:
            self.promised.setdefault(request, set()).add(index)
            self.run.seen["save promised"] += 1
            self.run.seen["save promised by several"] += len(self.promised[request]) > 1
            if request in self.loads and self.loads[request][1].is_async:
                self.run.mark(Cause.TWO_COMPLETIONS, request)
        self.answered[request] += 1
        if self.answered[request] == len(self.life.connectors):
            tails, promised = self.tails.get(request, set()), self.promised.get(request, set())
            if tails and request in self.loads and self.loads[request][1].is_async:
                self.run.mark(Cause.TWO_COMPLETIONS, request)
            if len(tails | promised) != max(1, len(promised)) and tails:
                self.run.mark(Cause.TAILS, request)
            self.promised[request] = tails | promised


class Half:
    """A connector in one process; ``on_`` and its name answers a hook, others do what vLLM's base class does."""

    def __init__(self, connector: Any, life: Life, index: int, books: Books) -> None:
        self.connector, self.life, self.index, self.books = connector, life, index, books
        self.character: Character = life.connectors[index]
        self.one_reports = life.one_reports or self.character.one_reports

    def dice(self, *what: object) -> float:
        return self.life.dice(self.index, *what)

    def happens(self, probability: float, *what: object) -> bool:
        return probability > 0 and self.dice(*what) < probability


class SchedulerHalf(Half):
    """A connector in the scheduler's process."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._calls: Counter[Any] = Counter()
        self._offers: dict[str, tuple[int, int, bool]] = {}  # the last lookup: local tokens, its own, is_async
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._load_count: Counter[str] = Counter()
        self._preemptions: dict[str, int] = {}  # of a request, before its last load
        self._receipts: dict[str, int] = {}  # loads that are reported in the output: request -> outputs to wait for
        self._withdrawn: dict[str, int] = {}
        self._messages = 0

    def _nth(self, *what: object) -> int:
        self._calls[what] += 1
        return self._calls[what]

    def on_get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        name, character = request.request_id, self.character
        nth = self._nth("lookup", name)
        self._offers.pop(name, None)
        if self.happens(character.pending, "pending", name, nth):
            self.books.run.seen["not yet"] += 1
            return None, False
        if not self.happens(character.hits, "hits", name) or self.happens(0.1, "misses", name, nth):
            return 0, False
        is_async = self.happens(character.asynchronous, "async", name)
        tokens = self._stored(request, is_async) - num_computed_tokens
        if tokens <= 0:
            return 0, False
        if (self.index, name) in self.books.failed:
            if not character.offers_again:
                return 0, False
            if request.num_preemptions == self._preemptions[name]:  # it has not run since
                self.books.run.mark(Cause.OFFERED_AGAIN, self.index, name)
        self._offers[name] = (num_computed_tokens, tokens, is_async)
        return tokens, is_async

    def _stored(self, request: Any, is_async: bool) -> int:
        """Return how many of the request's first tokens this connector has."""
        block, have = self.life.block, request.num_tokens
        if is_async and self.happens(self.character.ragged, "ragged", request.request_id):
            return have
        most = have // block if is_async else (have - 1) // block
        return min(most, 1 + int(self.dice("stored", request.request_id) * 8)) * block

    def on_get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (self.index % self.life.groups,)

    def on_get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return {SOURCES[self.index]: num_external_tokens}

    def on_update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        local, found, is_async = self._offers.pop(name, (0, 0, False))
        first, end = local // self.life.block, -(-(local + (num_external_tokens or found)) // self.life.block)
        ids = tuple(tuple(group[first:end]) for group in blocks.get_block_ids())
        if not num_external_tokens:
            # The end of one that is asynchronous is a stray report.
            may_load = found and (self.character.strays or not is_async)
            if may_load and self.happens(self.character.unchosen, "unchosen", name):
                self.books.run.seen["load unchosen"] += 1
                self._loads.append(Load(name, 0, is_async, ids, is_unchosen=True))
            return
        self._load_count[name] += 1
        self._preemptions[name] = request.num_preemptions
        load = Load(name, self._load_count[name], is_async, ids)
        self.books.loads[name] = (self.index, load)
        seen = self.books.run.seen
        seen["async load" if is_async else "sync load"] += 1
        seen["load after a load"] += load.number > 1
        seen["load after a local hit"] += local > 0
        seen["load with dcp"] += self.life.dcp > 1
        seen["load into several groups"] += self.life.groups > 1
        seen["load of a preempted request"] += request.status.name == "PREEMPTED"
        self._loads.append(load)
        if is_async and self.character.writes == RECEIVES:
            self._receipts[name] = 1 + int(self.dice("receives", name, load.number) * 5)

    def on_build_connector_meta(self, scheduler_output: Any) -> Message:
        self._messages += 1
        loads, self._loads = tuple(self._loads), []
        saves, self._saves = tuple(self._saves), []
        return Message(self.index, self._messages, loads, saves)

    def on_update_connector_output(self, connector_output: Any) -> None:
        """Do to the workers' output what this connector does to it."""
        output = connector_output
        if self.character.writes == RECEIVES:
            for name in _due(self._receipts):
                self.books.run.seen["load reported in the output"] += 1
                # Replaced, as FlexKV does, or added to.
                if self.happens(0.5, "replaces", name):
                    output.finished_recving = {*(output.finished_recving or ()), name}
                else:
                    output.finished_recving = output.finished_recving or set()
                    output.finished_recving.add(name)
        if self.character.writes == WITHDRAWS:
            self._withdraw(output)

    def _withdraw(self, output: Any) -> None:
        for name in sorted(output.finished_sending or ()):
            is_own = self.index in self.books.promised.get(name, ())
            if is_own and name not in self._withdrawn and self.happens(0.5, "withdraws", name):
                output.finished_sending = output.finished_sending - {name}
                self.books.run.seen["save withdrawn"] += 1
                self._withdrawn[name] = 2 + int(self.dice("withdrawn", name) * 4)
        for name in _due(self._withdrawn, forget=False):
            output.finished_sending = {*(output.finished_sending or ()), name}

    def on_request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.on_request_finished_all_groups(request, (block_ids,))

    def on_request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        name, character = request.request_id, self.character
        is_whole = request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
        may = (is_whole or character.promises_aborted) and any(block_ids)
        promises = may and self.happens(character.promises, "promises", name)
        if promises or self.index in self.books.tails.get(name, ()):
            self._saves.append(Save(name))
        self.books.end(name, self.index, promises)
        return promises, {f"connector {self.index}": name} if self.happens(0.2, "params", name) else None

    def on_register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        name, character = request.request_id, self.character
        promises = self.happens(character.promises, "promises", name)
        takes = self.happens(character.tails, "tail", name) and (promises or self.happens(0.2, "lone tail", name))
        if takes:
            self.books.run.seen["partial tail accepted"] += 1
            self.books.tails.setdefault(name, set()).add(self.index)
        return takes

    def on_get_finished_count(self) -> int | None:
        return 1 if self.one_reports else None

    def on_take_events(self) -> Any:
        events = [f"an event of connector {self.index}"] if self._at_times(self.character.chats, "events") else []
        return iter(events) if self.index % 2 else events

    def on_has_pending_block_frees(self) -> bool:
        return self._at_times(self.character.block_frees, "frees")

    def on_has_pending_push_work(self) -> bool:
        return self._at_times(self.character.chats / 3, "push")

    def on_reset_cache(self) -> bool | None:
        return (None, True, False)[int(self.dice("reset") * 3)]

    def on_set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Take those of every stage; vLLM's base class raises."""

    def on_get_kv_connector_stats(self) -> Count | None:
        return Count.of(f"connector {self.index}") if self._at_times(self.character.chats, "stats") else None

    def _at_times(self, probability: float, what: str) -> bool:
        """Return whether something happens at this call."""
        return self.happens(probability, what, self._nth(what))


class WorkerHalf(Half):
    """A connector in one worker."""

    def __init__(self, *args: Any, rank: int) -> None:
        super().__init__(*args)
        self.rank, self.step = rank, 0
        self._loads: dict[str, tuple[int, Load]] = {}  # request -> the step it is in, the load
        self._saves: dict[str, int] = {}
        self._bad: list[tuple[int, set[int]]] = []

    def forget(self) -> None:
        """Let open loads and saves go: nobody waits for them any more."""
        self._loads.clear()
        self._saves.clear()
        self._bad.clear()

    def on_bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begin a step with what the scheduler's half says."""
        KVConnectorBase_V1.bind_connector_metadata(self.connector, connector_metadata)
        self.step += 1
        for load in connector_metadata.loads:
            takes = self._takes("load", load.request, load.number) if load.is_async else 0
            if load.is_async:
                self._loads[load.request] = (self.step + takes, load)
            if self.happens(self.character.bad_blocks, "bad", load.request, load.number):
                self._spoil(load, self.step + int(takes * self.dice("bad at", load.request)))
        for save in connector_metadata.saves:
            self._saves[save.request] = self.step + self._takes("save", save.request)

    def _takes(self, *what: object) -> int:
        most = 8 if self.happens(self.character.slow, "slow", *what) else 2
        return int(self.dice("takes", *what, self.rank) * most)

    def _spoil(self, load: Load, at: int) -> None:
        if load.is_async and self.character.writes == RECEIVES:
            return
        blocks = load.blocks[0]
        if blocks and (self.rank == 0 or self.happens(0.5, "bad on", load.request)):
            first = int(self.dice("first bad", load.request) * len(blocks))
            self._bad.append((at, set(blocks[first : first + 2])))
            owner, _ = (
                self.books.loads.get(load.request, (self.index, load)) if load.is_unchosen else (self.index, load)
            )
            self.books.failed.add((owner, load.request))
            self.books.run.seen["bad blocks of a load unchosen"] += load.is_unchosen
            self.books.run.seen[f"bad blocks of {'an async' if load.is_async else 'a sync'} load"] += 1

    def on_start_load_kv(self, *_: Any, **__: Any) -> None:
        assert self.connector.has_connector_metadata()

    on_wait_for_layer_load = on_save_kv_layer = on_wait_for_save = on_start_load_kv

    def on_get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        saved, received, failed = self._results()
        return TransferResults(finished_sending=saved, finished_recving=received, failed_recving=failed)

    def on_get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, received, _ = self._results(can_fail=False)
        return saved or None, received or None

    def _results(self, can_fail: bool = True) -> tuple[set[str], set[str], set[str]]:
        """Return what is saved, what is received, and what of that failed."""
        received = {name for name, (due, _) in self._loads.items() if due <= self.step}
        failed = {name for name in received if can_fail and self._fails(self._loads[name][1])}
        for name in received:
            if self._loads.pop(name)[1].is_unchosen:
                cause = Cause.STRAY_FAILURE if name in failed else Cause.STRAY_RECEIPT
                self.books.run.mark(cause, self.index, name)
        if self.character.writes == RECEIVES:
            received, failed = set(), set()  # said in update_connector_output
        saved = {name for name, due in self._saves.items() if due <= self.step}
        for name in saved:
            del self._saves[name]
        if self.one_reports and self.rank:
            return set(), set(), set()
        if failed and self.one_reports and self.life.running.ranks > 1:
            self.books.run.mark(Cause.COUNTED_FAILURE, self.index, *sorted(failed))
        self.books.saved |= {(self.index, self.rank, name) for name in saved}
        self.books.failed |= {(self.index, name) for name in failed}
        self.books.run.seen["failed load"] += len(failed)
        self._stray(saved, received, failed)
        return saved, received, failed

    def _fails(self, load: Load) -> bool:
        fails = self.happens(self.character.fails, "fails", load.request, load.number)
        return fails and (self.rank == 0 or self.happens(0.5, "fails everywhere", load.request))

    def _stray(self, saved: set[str], received: set[str], failed: set[str]) -> None:
        """Add a report about a request that is not this connector's, now and then."""
        alive = self.books.alive
        if not alive or not self.happens(self.character.strays, "stray", self.step):
            return
        name = alive[int(self.dice("whose", self.step) * len(alive))]
        kind = int(self.dice("which stray", self.step) * 3)
        owner, _ = self.books.loads.get(name, (None, None))
        if kind == 2 and name not in self._saves and name not in saved:
            is_saved = (self.index, self.rank, name) in self.books.saved
            early = self.index not in self.books.promised.get(name, ()) and not is_saved
            self.books.run.mark(Cause.EARLY_SAVE if early else Cause.STRAY_SAVE, self.index, name)
            saved.add(name)
        elif kind < 2 and owner != self.index and name not in received and not self.books.run.spares(name):
            self.books.run.mark(Cause.STRAY_FAILURE if kind else Cause.STRAY_RECEIPT, self.index, name)
            received.add(name)
            if kind:
                self.books.run.doubt(name)
                failed.add(name)

    def on_get_block_ids_with_load_errors(self) -> set[int]:
        due = [blocks for at, blocks in self._bad if at <= self.step]
        self._bad = [(at, blocks) for at, blocks in self._bad if at > self.step]
        found = set().union(*due)
        others = [
            (index, load)
            for index, load in self.books.loads.values()
            if index != self.index and load.blocks[0] and not self.books.run.spares(load.request)
        ]
        if others and self.life.groups == 1 and self.happens(self.character.strays, "stray blocks", self.step):
            owner, load = others[0]
            found.add(load.blocks[0][0])
            self.books.failed.add((owner, load.request))
            self.books.run.doubt(block=load.blocks[0][0])
            self.books.run.seen["bad blocks in another's load"] += 1
        return found

    def on_get_kv_connector_kv_cache_events(self) -> Events | None:
        return Events(f"connector {self.index} rank {self.rank} {self.step}") if self._at_times("events") else None

    def on_build_connector_worker_meta(self) -> Note | None:
        return Note({self.rank: self.step}) if self._at_times("note") else None

    def on_get_handshake_metadata(self) -> Handshake:
        return Handshake(f"connector {self.index} rank {self.rank}")

    def on_get_kv_connector_stats(self) -> Count | None:
        return Count.of(f"connector {self.index}") if self._at_times("stats") else None

    def _at_times(self, what: str) -> bool:
        return self.happens(self.character.chats, what, self.step, self.rank)


def _due(waiting: dict[str, int], forget: bool = True) -> list[str]:
    """Count down; return the names that are due, once each."""
    for name in waiting:
        waiting[name] -= 1
    due = sorted(name for name, left in waiting.items() if left == 0)
    if forget:
        for name in due:
            del waiting[name]
    return due
