"""Verify loaded blocks on one rank: note computed blocks after the forward, compare loaded ones with them."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from kvobs.clock import wall_ns
from kvobs.faults import contained
from kvobs.log import line, log, once
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import ReportKind, WrongBlocks
from kvobs.telemetry.verify.fingerprints import Fingerprints, Taken
from kvobs.telemetry.verify.noted import Fingerprint, NotedBlocks, Outcome, compare_sent
from kvobs.telemetry.verify.sample import Block, LoadedBlocks, NotedBlock, VerifyOrders

_OUTCOMES = signals.slots(signals.VERIFIED_BLOCKS)
OPEN_AT_MOST = 4096  # loads; a rank need not report one whose request has ended
SILENT_NS = 60 * 10**9  # after an error was logged: a broken connector would fill the log
_NO_ORDERS = VerifyOrders((), ())
_DECISIVE: tuple[Outcome, ...] = ("match", "mismatch", "lossy", "unknown")
"""Of the outcomes of a block the one that counts: two engines may compute it differently, and both are right."""


class _Reading(NamedTuple):
    taken: Taken
    noted: Sequence[Block]
    forgotten: set[tuple[int, bytes]]  # of the noted ones, since they were queued
    loads: Sequence[LoadedBlocks]
    reporters: Collection[int]  # connectors that reported bad blocks in that step, which they do not load


class Verifier:
    """Verifies the loads of one rank; an asynchronous one when it is received, another after its step.

    Connectors may load what they were not chosen for: a received load that they may overwrite is compared twice.

    With ``refuses`` asynchronous loads with a wrong block must fail; with ``hands_over`` other engines also compare.
    """

    def __init__(
        self,
        names: Sequence[str],
        rank: int,
        recorder: Recorder,
        fingerprints: Fingerprints,
        *,
        refuses: bool = False,
        hands_over: bool = False,
    ) -> None:
        self.refuses = refuses
        self._hands_over = hands_over
        self._names = names
        self._rank = rank
        self._recorder = recorder
        self._fingerprints = fingerprints
        self._blocks = NotedBlocks()
        self._orders = _NO_ORDERS
        self._open: dict[str, LoadedBlocks] = {}  # by request
        self._received: dict[str, LoadedBlocks] = {}  # in this step
        self._reporters: set[int] = set()  # in this step
        self._wrong: dict[str, set[tuple[int, int]]] = {}  # by request: blocks, of loads that are compared twice
        self._readings: deque[_Reading] = deque()
        self._notes: list[WrongBlocks | NotedBlock] = []
        self._silent_until_ns = [0] * len(names)

    @contained("verify")
    def step_begun(self, orders: VerifyOrders | None) -> None:
        """Receive the scheduler's orders, and read what has arrived since the last step before the forward."""
        if self._received:
            self._orders = _NO_ORDERS
            self.step_ended()
        self._orders = orders if orders is not None else _NO_ORDERS
        if self._orders.forgotten:
            self._forget(self._orders.forgotten)
        for load in self._orders.loads:
            (self._open if load.is_async else self._received)[load.request] = load
        while len(self._open) > OPEN_AT_MOST:
            del self._open[next(iter(self._open))]

    def _forget(self, blocks: frozenset[tuple[int, bytes]]) -> None:
        """Forget noted blocks, also those whose fingerprints have not been read or sent yet."""
        for group, key in blocks:
            self._blocks.forget(group, key)
        for reading in self._readings:
            reading.forgotten.update(blocks)
        self._notes = [note for note in self._notes if isinstance(note, WrongBlocks) or note[:2] not in blocks]

    @contained("verify")
    def reported(self, index: int | None, kind: ReportKind, requests: Iterable[str]) -> None:
        """Receive a report on loads; failed ones are not verified, since vLLM does not use them."""
        if not self._open and not self._received:
            return
        for request in requests:
            if kind in (ReportKind.BAD_BLOCKS, ReportKind.UNMAPPED_BAD_BLOCKS) and index is not None:
                load = self._open.get(request) or self._received.get(request)
                if load is None or load.connector_index != index:
                    self._reporters.add(index)
            if kind is ReportKind.RECEIVED:
                if (load := self._open.get(request)) is not None and index in (load.connector_index, None):
                    self._received[request] = self._open.pop(request)
            elif kind is not ReportKind.SAVED and kind is not ReportKind.SYNC_DONE:
                self._open.pop(request, None)
                self._received.pop(request, None)

    @contained("verify")
    def refused(self, index: int, requests: Iterable[str]) -> set[str]:
        """Compare the blocks of these received loads now, and return the requests that got wrong ones."""
        loads = [load for request in requests if (load := self._open.get(request)) and load.connector_index == index]
        for load in loads:
            del self._open[load.request]
        self._queue((), loads)
        return self._compare_read(waits=bool(loads)) & {load.request for load in loads}

    @contained("verify")
    def step_ended(self) -> None:
        """Queue the reading of this step's blocks, and compare those that have been read."""
        orders, received = self._orders, self._received
        if orders.noted or received:
            self._orders, self._received = _NO_ORDERS, {}
            self._queue(orders.noted, received.values())
        self._reporters = set()
        self._compare_read()

    def take_notes(self) -> list[WrongBlocks | NotedBlock]:
        """Return the wrong blocks that were found, and the fingerprints for other engines, since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _queue(self, blocks: Iterable[Block], received: Iterable[LoadedBlocks]) -> None:
        noted = [block for block in blocks if self._fingerprints.can_read(block)]
        loads = [self._readable(load) for load in received]
        if every := [*noted, *(block for load in loads for block in load.blocks)]:
            self._readings.append(_Reading(self._fingerprints.take(every), noted, set(), loads, self._reporters))

    def _compare_read(self, *, waits: bool = False) -> set[str]:
        """Compare the blocks that have been read, or all that are queued; return the requests that got wrong ones."""
        wrong: set[str] = set()
        while self._readings and (waits or self._readings[0].taken.is_ready()):
            wrong |= self._compare(self._readings.popleft())
        return wrong

    def _readable(self, load: LoadedBlocks) -> LoadedBlocks:
        blocks = tuple([block for block in load.blocks if self._fingerprints.can_read(block)])
        if not load.is_again and (left_out := len(_positions(load.blocks)) - len(_positions(blocks))):
            self._recorder.count(load.connector_index, _OUTCOMES["unknown"], left_out)
        return load._replace(blocks=blocks)

    def _compare(self, reading: _Reading) -> set[str]:
        fingerprints, requests = iter(reading.taken.read()), set[str]()
        for block in reading.noted:
            fingerprint = next(fingerprints)
            if (block.group, block.key) in reading.forgotten:
                continue
            self._blocks.note(block.group, block.key, fingerprint)
            if self._hands_over:
                sent = fingerprint.sent(self._fingerprints.form(block.group))
                self._notes.append(NotedBlock(block.group, block.key, self._rank, sent))
        for load in reading.loads:
            found = defaultdict[tuple[int, int], set[Outcome]](set)
            for block in load.blocks:
                found[block.group, block.position].add(self._outcome(block, next(fingerprints)))
            outcomes = {position: next(each for each in _DECISIVE if each in found[position]) for position in found}
            wrong = {position for position, outcome in outcomes.items() if outcome == "mismatch"}
            if load.is_again:
                wrong -= self._wrong.pop(load.request, set())
            else:
                self._count(load, outcomes.values())
                if wrong and load.is_async and load.others:
                    self._wrong[load.request] = wrong
                    if len(self._wrong) > OPEN_AT_MOST:
                        del self._wrong[next(iter(self._wrong))]
            if wrong:
                requests.add(load.request)
                self._report(load, len(outcomes), wrong, reading.reporters)
        return requests

    def _count(self, load: LoadedBlocks, outcomes: Iterable[Outcome]) -> None:
        """Count the outcomes of a load, but wrong blocks, whose writer may be another."""
        for outcome in outcomes:
            if outcome != "mismatch":
                self._recorder.count(load.connector_index, _OUTCOMES[outcome])
        if "lossy" in outcomes:
            text = (
                "connector %r loads blocks on rank %d whose values are close to the computed ones but not equal: it "
                "compresses them, or another engine computed them (kvobs_verified_blocks_total, outcome lossy)"
            )
            name = self._names[load.connector_index]
            once(f"lossy:{name}", logging.INFO, text, name, self._rank)

    def _outcome(self, block: Block, fingerprint: Fingerprint) -> Outcome:
        if block.sent is None:
            return self._blocks.compare(block.group, block.key, fingerprint)
        return compare_sent(block.sent.get(str(self._rank), ""), self._fingerprints.form(block.group), fingerprint)

    def _report(
        self, load: LoadedBlocks, compared: int, wrong: Collection[tuple[int, int]], reporters: Collection[int]
    ) -> None:
        """Count the wrong blocks of a load for their writer, note them for the scheduler's side, and log them."""
        writer, did, why = self._blamed(load, reporters)
        self._recorder.count(writer, _OUTCOMES["mismatch"], len(wrong))
        for _ in wrong:
            self._recorder.count_dynamic(writer, signals.CORRUPT_BLOCKS, str(self._rank))
        self._notes.append(WrongBlocks(load.connector_index, load.request, len(wrong), writer))
        if (now_ns := wall_ns()) >= self._silent_until_ns[writer]:
            self._silent_until_ns[writer] = now_ns + SILENT_NS
            text = (
                "connector %r %s on rank %d: %d of %d verified blocks of request %s differ from the blocks computed "
                "for the same tokens, the first at token %d. Its answer may be wrong; see KvobsCorruptLoads in the "
                "runbook%s"
            )
            name, first = self._names[writer], min(position for _, position in wrong)
            log.error(text, name, did, self._rank, len(wrong), compared, line(load.request), first, why)

    def _blamed(self, load: LoadedBlocks, reporters: Collection[int]) -> tuple[int, str, str]:
        """Return the connector that is taken to have written wrong blocks, what it did, and why it is named."""
        owner, others = self._names[load.connector_index], ", ".join(repr(self._names[index]) for index in load.others)
        if suspects := set(load.others).intersection(reporters):
            did = f"wrote wrong bytes into blocks that connector {owner!r} loaded"
            return min(suspects), did, ". In this step it reported bad blocks of loads for which it was not chosen"
        if load.is_again:
            did = f"wrote wrong bytes into blocks that connector {owner!r} had loaded"
            why = f". They were right when they arrived. Connectors that also had a hit for this request: {others}"
            return load.others[0], did, why
        why = (
            f". Or a connector that also had a hit for this request wrote into these blocks: {others}" if others else ""
        )
        return load.connector_index, "loaded wrong bytes", why


def _positions(blocks: Iterable[Block]) -> set[tuple[int, int]]:
    """Return group and position of blocks: one may be compared with several fingerprints."""
    return {(block.group, block.position) for block in blocks}
