"""Loads that are received, failed, or ended elsewhere, and what is counted and said of their blocks."""

import logging
from collections import Counter
from typing import Any

import pytest

from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.transfers import ReportKind, WrongBlocks
from kvobs.telemetry.verify import verifier
from kvobs.telemetry.verify.fingerprints import Fingerprints
from kvobs.telemetry.verify.sample import Block, LoadedBlocks, NotedBlock, VerifyOrders
from kvobs.telemetry.verify.verifier import OPEN_AT_MOST, Verifier
from tests.support.layers import layers_of, random_cache
from tests.support.numbers import numbers

ENDED = (ReportKind.FAILED, ReportKind.UNMAPPED_BAD_BLOCKS, ReportKind.BAD_BLOCKS, ReportKind.SYNC_FAILED)


class Rank:
    """One rank with a cache of one layer, in which block 9 was computed, and noted."""

    def __init__(self, parallel: object = 1) -> None:
        self.cache = random_cache()
        self.recorder = Recorder(2)
        fingerprints = Fingerprints(layers_of(self.cache), reads_all=True, parallel=parallel)
        self.verifier = Verifier(["one", "two"], 3, self.recorder, fingerprints, hands_over=parallel != 1)
        self.step(noted=[block(9)])

    def step(self, *loads: LoadedBlocks, noted: Any = (), reports: Any = ()) -> None:
        self.verifier.step_begun(VerifyOrders(tuple(noted), loads) if loads or noted else None)
        for report in reports:
            self.verifier.reported(*report)
        self.verifier.step_ended()

    def counted(self, index: int = 0) -> dict[str, int]:
        found = {}
        for outcome in signals.VERIFIED_BLOCKS.labels["outcome"]:
            slot = signals.word(index, signals.slot(signals.VERIFIED_BLOCKS, outcome))
            if n := self.recorder.words[self.recorder.page.layout.counts + slot]:
                found[outcome] = int(n)
        return found


def block(number: int, key: bytes = b"computed", group: int = 0) -> Block:
    return Block(key, group, number, 16 * number)


def load(*numbers: int, request: str = "a", is_async: bool = True, key: bytes = b"computed") -> LoadedBlocks:
    return LoadedBlocks(0, request, is_async, tuple(block(number, key) for number in numbers))


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_an_asynchronous_load_is_compared_when_it_is_received(rank: Rank) -> None:
    rank.cache[5] = rank.cache[9]
    rank.step(load(5))
    assert rank.counted() == {}
    rank.step(reports=[(0, ReportKind.RECEIVED, ["a", "another"])])
    assert rank.counted() == {"match": 1}
    rank.step(reports=[(0, ReportKind.RECEIVED, ["a"])])
    assert rank.counted() == {"match": 1}


def test_another_load_is_compared_after_its_step(rank: Rank) -> None:
    rank.cache[5] = rank.cache[9]
    rank.step(load(5, is_async=False), reports=[(0, ReportKind.SYNC_DONE, ["a"])])
    assert rank.counted() == {"match": 1}


@pytest.mark.parametrize("kind", ENDED)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_load_is_not_compared(rank: Rank, kind: ReportKind, is_async: bool) -> None:
    reports = [(0, ReportKind.RECEIVED, ["a"]), (0, kind, ["a"])]
    rank.step(load(5, is_async=is_async), reports=reports)
    rank.step(reports=[(None, ReportKind.RECEIVED, ["a"])])
    assert rank.counted() == {}


def test_a_load_received_in_the_scheduler_is_compared_at_once(rank: Rank) -> None:
    rank.cache[5] = rank.cache[9]
    rank.step(load(5))
    rank.verifier.reported(None, ReportKind.RECEIVED, ["a"])
    rank.verifier.step_begun(None)
    rank.cache[5] = 0
    rank.verifier.step_ended()
    assert rank.counted() == {"match": 1}


def test_a_report_of_another_connector_changes_nothing(rank: Rank) -> None:
    rank.cache[5] = rank.cache[9]
    rank.step(load(5), reports=[(1, ReportKind.RECEIVED, ["a"]), (0, ReportKind.SAVED, ["a"])])
    assert rank.counted() == {}
    rank.step(reports=[(0, ReportKind.RECEIVED, ["a"])])
    assert rank.counted() == {"match": 1}


def test_a_load_that_is_asked_about_is_compared_once_and_at_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    take = rank.verifier._fingerprints.take
    monkeypatch.setattr(
        rank.verifier._fingerprints, "take", lambda blocks: take(blocks)._replace(is_ready=lambda: False)
    )
    rank.cache[5] = rank.cache[9]
    rank.step(load(5, request="right"), load(6, request="wrong"), load(7, request="of another"))
    asked = ["right", "wrong", "unknown"]
    assert rank.verifier.refused(1, asked) == set()
    assert rank.verifier.refused(0, asked) == {"wrong"}
    assert rank.verifier.refused(0, asked) == set()
    rank.step(reports=[(0, ReportKind.RECEIVED, ["right"]), (0, ReportKind.FAILED, ["wrong"])])
    assert rank.counted() == {"match": 1, "mismatch": 1}


@pytest.mark.parametrize("is_read", [False, True])
def test_a_block_is_forgotten_whether_or_not_it_has_been_read(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, key = Rank(parallel="one"), b"behind a failed load"
    rank.verifier.take_notes()
    take, is_ready = rank.verifier._fingerprints.take, is_read
    monkeypatch.setattr(
        rank.verifier._fingerprints, "take", lambda blocks: take(blocks)._replace(is_ready=lambda: is_ready)
    )
    rank.step(noted=[block(2, key), block(9, b"right")])
    assert len(rank.verifier._readings) == int(not is_read)
    is_ready = True
    rank.verifier.step_begun(VerifyOrders((block(3, key),), (), frozenset({(0, key)})))
    rank.verifier.step_ended()
    sent = [(note.key, note.sent) for note in rank.verifier.take_notes() if isinstance(note, NotedBlock)]
    assert [key for key, _ in sent] == [b"right", key]
    rank.cache[5] = rank.cache[3]
    rank.cache[6] = rank.cache[2]
    rank.step(load(5, 6, key=key), load(9, request="b"), reports=[(0, ReportKind.RECEIVED, ["a", "b"])])
    assert rank.counted() == {"match": 2, "mismatch": 1}


def test_blocks_from_another_engine_are_compared_with_its_own() -> None:
    prefill, decode, other = Rank(parallel="two ranks"), Rank(parallel="two ranks"), Rank(parallel="four ranks")
    (note,) = prefill.verifier.take_notes()
    assert isinstance(note, NotedBlock)
    assert note[:3] == (0, b"computed", 3)
    for rank in (decode, other):
        rank.cache[5] = prefill.cache[9]
        sent = {str(note.rank): note.sent}
        blocks = [block(number)._replace(sent=sent) for number in (5, 6)] + [block(7)._replace(sent={"2": note.sent})]
        rank.step(LoadedBlocks(0, "a", False, tuple(blocks)))
    assert decode.counted() == {"match": 1, "mismatch": 1, "unknown": 1}
    assert other.counted() == {"unknown": 3}


OWN = [block(5), block(6, b"unknown")]
"""Blocks of this engine's prompt, of which it has computed the first."""


@pytest.mark.parametrize("bytes_are", ["right", "near", "wrong"])
@pytest.mark.parametrize("sent", ["right", "near", "wrong", "of another form", "malformed"])
def test_a_block_is_compared_with_both_engines_fingerprints(bytes_are: str, sent: str) -> None:
    rank, theirs = Rank(parallel="one"), Rank(parallel="two" if sent == "of another form" else "one")
    right = rank.cache[9].clone()
    variants = {"right": right, "near": right * 1.1, "wrong": rank.cache[2]}
    theirs.cache[9] = variants.get(sent, right)
    theirs.step(noted=[block(9)])
    note = theirs.verifier.take_notes()[-1]
    assert isinstance(note, NotedBlock)
    rank.cache[5] = rank.cache[6] = variants[bytes_are]
    by_rank = {"3": "" if sent == "malformed" else note.sent}
    blocks = [*OWN, *[each._replace(key=b"another", sent=by_rank) for each in OWN]]
    rank.step(LoadedBlocks(0, "a", False, tuple(blocks)))
    own = {"right": "match", "near": "lossy", "wrong": "mismatch"}[bytes_are]
    if sent in ("of another form", "malformed"):
        both, alone = own, "unknown"
    else:
        alone = "match" if sent == bytes_are else "mismatch" if "wrong" in (sent, bytes_are) else "lossy"
        both = next(each for each in ("match", "mismatch", "lossy") if each in (own, alone))
    assert rank.counted() == Counter((both, alone))


def test_the_connector_that_reported_bad_blocks_is_blamed(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """It overwrote blocks of loads for which it was not chosen, and reported some of them."""
    wrong = load(8, is_async=False)._replace(others=(1,))
    failed = load(6, request="failed", is_async=False)
    rank.step(wrong, failed, reports=[(1, ReportKind.BAD_BLOCKS, ["failed"]), (0, ReportKind.SYNC_DONE, ["a"])])
    assert (rank.counted(0), rank.counted(1)) == ({}, {"mismatch": 1})
    assert numbers(rank.recorder).opened == [[signals.CORRUPT_BLOCKS.name, 1, "3", 1]]
    assert rank.verifier.take_notes() == [WrongBlocks(0, "a", 1, 1)]
    assert [record.getMessage() for record in caplog.records] == [
        "connector 'two' wrote wrong bytes into blocks that connector 'one' loaded on rank 3: 1 of 1 verified blocks "
        "of request a differ from the blocks computed for the same tokens, the first at token 128. Its answer may be "
        "wrong; see "
        "KvobsCorruptLoads in the runbook. In this step it reported bad blocks of loads for which it was not chosen"
    ]
    rank.step(wrong)
    assert (rank.counted(0), rank.counted(1)) == ({"mismatch": 1}, {"mismatch": 1})


@pytest.mark.parametrize(
    "reports",
    [
        [(1, ReportKind.FAILED, ["failed"])],
        [(1, ReportKind.BAD_BLOCKS, ["its own"])],
        [(None, ReportKind.FAILED, ["failed"])],
    ],
)
def test_a_connector_whose_own_load_failed_is_not_blamed(rank: Rank, reports: Any) -> None:
    own = load(6, request="its own")._replace(connector_index=1)
    rank.step(load(8, is_async=False)._replace(others=(1,)), own, reports=reports)
    assert (rank.counted(0), rank.counted(1)) == ({"mismatch": 1}, {})


def test_a_connector_without_a_hit_for_the_request_is_not_blamed(rank: Rank) -> None:
    """It may have reported a load of its own, of which no block is in the sample."""
    rank.step(load(8, is_async=False), reports=[(1, ReportKind.BAD_BLOCKS, ["not sampled"])])
    assert (rank.counted(0), rank.counted(1)) == ({"mismatch": 1}, {})


def test_connectors_that_had_a_hit_are_named_as_well(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    rank.step(load(8, is_async=False)._replace(others=(1,)))
    assert (rank.counted(0), rank.counted(1)) == ({"mismatch": 1}, {})
    text = " Or a connector that also had a hit for this request wrote into these blocks: 'two'"
    assert caplog.records[0].getMessage().endswith("see KvobsCorruptLoads in the runbook." + text)


def test_a_received_block_that_is_overwritten_is_found(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """Of its load: one that was wrong when it arrived, one that stays right, and one that is overwritten."""
    rank.cache[5] = rank.cache[6] = rank.cache[9]
    loaded = load(5, 6, 7)._replace(others=(1,))
    rank.step(loaded)
    rank.step(reports=[(0, ReportKind.RECEIVED, ["a"])])
    assert rank.counted() == {"match": 2, "mismatch": 1}
    rank.cache[6] = rank.cache[7]
    rank.step(loaded._replace(is_async=False, is_again=True))
    assert (rank.counted(0), rank.counted(1)) == ({"match": 2, "mismatch": 1}, {"mismatch": 1})
    assert rank.verifier.take_notes() == [WrongBlocks(0, "a", 1, 0), WrongBlocks(0, "a", 1, 1)]
    assert caplog.records[-1].getMessage() == (
        "connector 'two' wrote wrong bytes into blocks that connector 'one' had loaded on rank 3: 1 of 3 verified "
        "blocks of request a differ from the blocks computed for the same tokens, the first at token 96. Its answer "
        "may be wrong; see "
        "KvobsCorruptLoads in the runbook. They were right when they arrived. Connectors that also had a hit for this "
        "request: 'two'"
    )
    assert rank.verifier._wrong == {}


def test_blocks_that_are_not_noted_or_not_readable_are_unknown(rank: Rank) -> None:
    rank.step(LoadedBlocks(0, "a", False, (block(5, b"elsewhere"), block(5, group=1))))
    rank.step(LoadedBlocks(1, "b", False, (block(5, group=1),)))
    rank.step(LoadedBlocks(1, "b", False, (block(5, group=1),), is_again=True))
    assert (rank.counted(0), rank.counted(1)) == ({"unknown": 2}, {"unknown": 1})


def test_wrong_blocks_are_logged_with_where_they_came_from(
    rank: Rank, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10**18]
    monkeypatch.setattr(verifier, "wall_ns", lambda: now[0])
    rank.cache[8] = rank.cache[9]
    for _ in range(3):
        rank.step(load(8, 7, 6, request="bad\n", is_async=False))
    now[0] += verifier.SILENT_NS
    rank.step(load(5, request="later", is_async=False))
    assert rank.counted() == {"match": 3, "mismatch": 7}
    assert rank.verifier.take_notes() == [WrongBlocks(0, "bad\n", 2, 0)] * 3 + [WrongBlocks(0, "later", 1, 0)]
    assert rank.verifier.take_notes() == []
    assert numbers(rank.recorder).opened == [[signals.CORRUPT_BLOCKS.name, 0, "3", 7]]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.ERROR,
            "connector 'one' loaded wrong bytes on rank 3: 2 of 3 verified blocks of request bad\\n differ from the "
            "blocks computed for the same tokens, the first at token 96. Its answer may be wrong; see "
            "KvobsCorruptLoads in the runbook",
        ),
        (
            logging.ERROR,
            "connector 'one' loaded wrong bytes on rank 3: 1 of 1 verified blocks of request later differ from the "
            "blocks computed for the same tokens, the first at token 80. Its answer may be wrong; see "
            "KvobsCorruptLoads in the runbook",
        ),
    ]


def test_near_blocks_are_logged_once(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rank.cache[5] = rank.cache[9] * 1.02
    for _ in range(2):
        rank.step(load(5, is_async=False))
    assert rank.counted() == {"lossy": 2}
    assert len(caplog.records) == 1


def test_results_that_the_device_still_computes_are_read_later(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [False]
    take = rank.verifier._fingerprints.take
    monkeypatch.setattr(
        rank.verifier._fingerprints, "take", lambda blocks: take(blocks)._replace(is_ready=lambda: ready[0])
    )
    rank.cache[5] = rank.cache[9]
    rank.step(load(5, is_async=False))
    assert rank.counted() == {}
    ready[0] = True
    rank.step()
    assert rank.counted() == {"match": 1}


def test_loads_that_nobody_reports_do_not_pile_up(rank: Rank) -> None:
    for number in range(OPEN_AT_MOST + 10):
        rank.step(load(5, request=str(number)))
    assert len(rank.verifier._open) == OPEN_AT_MOST


def test_wrong_loads_that_do_not_begin_do_not_pile_up(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "OPEN_AT_MOST", 5)
    for number in range(8):
        rank.step(load(5, request=str(number))._replace(others=(1,)))
        rank.step(reports=[(0, ReportKind.RECEIVED, [str(number)])])
    assert len(rank.verifier._wrong) == 5
