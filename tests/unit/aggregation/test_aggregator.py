"""Workers' outputs, combined: against a model, and what is wrong in vLLM's own class, which must fail here."""

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs import faults
from kvobs.aggregation import aggregator, rank_tally
from kvobs.aggregation.aggregator import KVOutputAggregator
from kvobs.routing.metadata import MultiKVEvents
from kvobs.state.transfers import Stuck
from tests.support.scripted import Events, Stats
from tests.support.stock import wrong_in_stock
from tests.support.worker_outputs import STUCK_AFTER, Clock, Meta, build, result, said, silent


def memory_of(aggregator: Any) -> int:
    """Count the requests that an aggregator remembers, kvobs's or stock's."""
    if isinstance(aggregator, KVOutputAggregator):
        counts: Any = [aggregator._failures]
        counts += [book for tally in (aggregator._loads, aggregator._saves) for book in (tally.open, tally.completed)]
        return sum(map(len, counts))
    counts = (aggregator._recv_remaining_count, aggregator._send_remaining_count, aggregator._failed_recving_pending)
    return sum(map(len, counts))


# Against a model

RANKS = 4
REQUESTS = ("r0", "r1", "r2", "r3")


class Noted:
    """What the model knows of one request: obviously right."""

    def __init__(self) -> None:
        self.expected = 0
        self.recorded: set[object] = set()  # in the open round
        self.before: set[object] | None = None  # in the completed round that late reports may still belong to

    def count(self, reporters: list[object], expected: int) -> bool:
        """Take in who reports in one step; return whether that completes a round."""
        for reporter in reporters:
            if self.before is not None and reporter not in self.before:
                self.before.add(reporter)
                late = True
            else:
                late = False
            if not late:
                self.expected = self.expected if self.recorded else expected
                # With more reports expected than there are ranks, each report is one of its own.
                self.recorded.add(reporter if self.expected <= RANKS else object())
        if self.before is not None and len(self.before) >= RANKS:
            self.before = None
        if not self.recorded or len(self.recorded) < self.expected:
            return False
        self.before = self.recorded if len(self.recorded) < RANKS else None
        self.recorded = set()
        return True


ids = st.sets(st.sampled_from(REQUESTS))
one: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict, finished_sending=ids, finished_recving=ids, failed_recving=ids,
    expected_finished_count=st.sampled_from([0, 0, 0, 1, 2, 3, 4]), invalid_block_ids=st.sets(st.integers(0, 9))
)  # fmt: skip
step = st.fixed_dictionaries(
    {
        "outputs": st.lists(st.none() | one, min_size=RANKS, max_size=RANKS),
        "salvaged": st.lists(one, max_size=1),
        "rank": st.integers(0, RANKS - 1),
        "wait": st.integers(0, 7),
    }
)


class Model:
    """The aggregator, request by request; twelve steps of at most seven seconds: nothing is old enough to forget."""

    def __init__(self) -> None:
        self.expected = RANKS
        self.strangers = RANKS
        self.noted = {kind: {request: Noted() for request in REQUESTS} for kind in ("load", "save")}
        self.failed: dict[str, set[int]] = {}
        self.done: dict[str, set[str]] = {"load": set(), "save": set()}
        self.invalid: set[int] = set()
        self.opened: dict[tuple[str, str], float] = {}
        self.found: set[tuple[str, str]] = set()

    def take_in(self, spoken: list[tuple[int, dict[str, Any]]]) -> None:
        """Take in what is said in one step, by (reporter, fields); up to each change of what is expected at once."""
        while spoken:
            self.expected = spoken[0][1]["expected_finished_count"] or self.expected
            same = 1
            while same < len(spoken) and spoken[same][1]["expected_finished_count"] in (0, self.expected):
                same += 1
            part, spoken = spoken[:same], spoken[same:]
            for kind, field in (("load", "finished_recving"), ("save", "finished_sending")):
                for request in REQUESTS:
                    reporters: list[object] = [who for who, fields in part if request in fields[field]]
                    if self.noted[kind][request].count(reporters, self.expected):
                        self.done[kind].add(request)
                        self.close(kind, request)
            for who, fields in part:
                self.invalid |= fields["invalid_block_ids"]
                for request in fields["failed_recving"]:
                    self.failed.setdefault(request, set()).add(who)

    def close(self, kind: str, request: str) -> None:
        self.opened.pop((kind, request), None)
        self.found.discard((kind, request))

    def note_time(self, now: float) -> set[tuple[str, str]]:
        """Return (kind, request) of what is found to be stuck at this time."""
        is_open = {
            (kind, r) for kind, requests in self.noted.items() for r, noted in requests.items() if noted.recorded
        }
        is_open |= {("failure", request) for request in self.failed}
        self.opened = {key: self.opened.get(key, now) for key in is_open}
        self.found &= is_open
        stuck = {key for key, at in self.opened.items() if now - at >= STUCK_AFTER} - self.found
        self.found |= stuck
        return {key for key in stuck if key[0] != "failure" or ("load", key[1]) not in is_open}


@settings(max_examples=300)
@given(st.lists(step, max_size=12))
def test_the_scheduler_gets_what_the_model_predicts(steps: list[dict[str, Any]]) -> None:
    clock, stuck = Clock(), list[Stuck]()
    aggregator = KVOutputAggregator(RANKS, stuck_after_s=STUCK_AFTER, on_stuck=stuck.append, clock=clock)
    model = Model()
    salvaged: list[tuple[int, dict[str, Any]]] = []
    for each in steps:
        clock.now += each["wait"]
        aggregator.ft_defer_kv_connector_outputs([None, *(KVConnectorOutput(**fields) for fields in each["salvaged"])])
        for fields in each["salvaged"]:
            salvaged.append((model.strangers, fields))
            model.strangers += 1
        outputs = [None if fields is None else said(**fields) for fields in each["outputs"]]
        answer = aggregator.aggregate(outputs, each["rank"])
        if not any(outputs):
            assert answer is None
            continue
        model.take_in(salvaged + [(rank, fields) for rank, fields in enumerate(each["outputs"]) if fields is not None])
        salvaged = []
        assert sorted((noted.kind, noted.request) for noted in stuck) == sorted(model.note_time(clock.now))
        stuck.clear()
        assert answer is outputs[each["rank"]]
        if answer is None:
            continue
        failed = model.failed.keys() & model.done["load"]
        assert answer.kv_connector_output == KVConnectorOutput(
            finished_sending=model.done["save"] or None,
            finished_recving=model.done["load"] or None,
            failed_recving=failed,
            invalid_block_ids=model.invalid,
            expected_finished_count=model.expected,
        )
        for request in failed:
            del model.failed[request]
            model.close("failure", request)
        model.done, model.invalid = {"load": set(), "save": set()}, set()


# What is wrong in stock


@pytest.mark.parametrize("field", ["finished_recving", "finished_sending", "failed_recving"])
@wrong_in_stock(AssertionError, "a request that only some ranks report, or a failure without a receipt, stays for ever")
def test_round_that_some_ranks_never_report_is_forgotten(router: str, field: str) -> None:
    clock = Clock()
    aggregator = KVOutputAggregator(2, clock=clock) if router == "kvobs" else build(router, 2)
    result(aggregator, said(**{field: {"r"}}), said())
    assert memory_of(aggregator) == 1
    for clock.now in (61, 601):
        result(aggregator, said(), said())
    assert memory_of(aggregator) == 0


@wrong_in_stock(AssertionError, "drops what the others say when the output rank has nothing")
def test_reports_next_to_an_empty_output_rank_come_a_step_later(router: str) -> None:
    aggregator = build(router, 2)
    early = said(finished_recving={"r"}, failed_recving={"r"}, invalid_block_ids={7})
    assert aggregator.aggregate([None, early]) is None
    noted = result(aggregator, said(finished_recving={"r"}), said())
    assert (noted.finished_recving, noted.failed_recving, noted.invalid_block_ids) == ({"r"}, {"r"}, {7})


@wrong_in_stock(AssertionError, "finished again with each further rank: the scheduler asserts")
def test_a_load_that_one_report_completes_is_finished_once(router: str) -> None:
    aggregator = build(router, 1)
    finished = [
        result(aggregator, *(said(finished_recving={"r"} if rank == speaking else None) for rank in range(3)))
        for speaking in range(3)
    ]
    assert [noted.finished_recving for noted in finished] == [{"r"}, None, None]


@wrong_in_stock(AssertionError, "a rank that reports twice stands for two")
def test_a_rank_counts_once(router: str) -> None:
    aggregator = build(router, 2)
    for _ in range(2):
        assert result(aggregator, said(finished_sending={"r"}), said()).finished_sending is None
    assert result(aggregator, said(), said(finished_sending={"r"})).finished_sending == {"r"}


@wrong_in_stock(AssertionError, "the result's stats are also a worker's")
def test_the_results_stats_are_nobody_elses(router: str) -> None:
    outputs = [said(kv_connector_stats=Stats(data={"n": rank})) for rank in (1, 2, 4)]
    assert result(build(router, 3), *outputs, rank=2).kv_connector_stats.data == {"n": 7}
    assert [output.kv_connector_output.kv_connector_stats for output in outputs[:2]] == [None] * 2


@wrong_in_stock(TypeError, "stats that do not merge end the engine")
@pytest.mark.usefixtures("in_production")
def test_stats_that_do_not_merge_cost_only_themselves(router: str) -> None:
    outputs = [
        said(kv_connector_stats=Stats(data={"n": 1})),
        said(kv_connector_stats=Stats(data={"n": "many"}), finished_sending={"r"}),  # a TypeError
        said(kv_connector_stats=Stats(data={"n": 4})),
    ]
    noted = result(build(router, 1), *outputs)
    assert noted.kv_connector_stats.data == {"n": 5}
    assert noted.finished_sending == {"r"}
    assert faults.take() == {"merge": 1}


# What is not a matter of requests


def test_metadata_is_merged_by_its_own_rule_over_ranks_and_steps() -> None:
    aggregator = KVOutputAggregator(3)
    assert aggregator.aggregate([None, said(kv_connector_worker_meta=Meta(1)), None]) is None
    noted = result(aggregator, said(kv_connector_worker_meta=Meta(0)), None, said(kv_connector_worker_meta=Meta(2)))
    assert noted.kv_connector_worker_meta.ranks == (1, 0, 2)


def test_metadata_that_does_not_merge_is_an_error() -> None:
    with pytest.raises(AttributeError):
        KVOutputAggregator(2).aggregate([said(kv_connector_worker_meta=Meta(0)), said(kv_connector_worker_meta="?")])


@pytest.mark.parametrize("of", [lambda events: events, lambda events: MultiKVEvents({0: events})])
def test_an_event_is_common_once_every_rank_had_it_in_any_step(of: Callable[[Events], Any]) -> None:
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate([None, said(kv_cache_events=of(Events("a", "b")))]) is None
    assert aggregator.aggregate([None, said(kv_cache_events=of(Events("c")))]) is None
    noted = result(aggregator, said(kv_cache_events=of(Events("a", "c"))), said(kv_cache_events=of(Events("d"))))
    assert noted.kv_cache_events.get_number_of_workers() == 2
    noted.kv_cache_events.aggregate()
    common = noted.kv_cache_events.get_all_events()
    assert (common if isinstance(noted.kv_cache_events, Events) else common[0][1].get_all_events()) == ["a", "c"]
    assert result(aggregator, said(), said()).kv_cache_events is None


def test_salvaged_outputs_join_the_next_step_without_events() -> None:
    aggregator = KVOutputAggregator(2)
    salvaged = KVConnectorOutput(
        finished_recving={"r"}, kv_cache_events=Events("a"), kv_connector_stats=Stats(data={"n": [1]})
    )
    aggregator.ft_defer_kv_connector_outputs([None, salvaged])
    assert aggregator.aggregate([None, None]) is None
    noted = result(aggregator, said(finished_recving={"r"}), said(kv_cache_events=Events("b")))
    assert noted.finished_recving == {"r"}
    assert noted.kv_connector_stats.data == {"n": [1]}
    assert noted.kv_cache_events.get_all_events() == ["b"]
    assert result(aggregator, said(), said()).finished_recving is None


def test_ranks_without_an_output_are_no_fault() -> None:
    assert result(KVOutputAggregator(1), None, silent(), rank=1) == KVConnectorOutput(expected_finished_count=1)


# Stuck


def test_stuck_rounds_are_reported_once_with_the_missing_ranks() -> None:
    clock, stuck = Clock(), list[Stuck]()
    aggregator = KVOutputAggregator(3, on_stuck=stuck.append, clock=clock)
    result(aggregator, said(finished_recving={"r"}), said(finished_sending={"s"}), said(failed_recving={"f"}))
    clock.now = 30
    result(aggregator, said(finished_recving={"later"}), said(), said(expected_finished_count=1))
    for clock.now in (59, 60, 61):
        result(aggregator, said(), said(), said())
    assert stuck == [Stuck("load", "r", (1, 2)), Stuck("save", "s", (0, 2)), Stuck("failure", "f", (0, 1))]
    assert result(aggregator, said(), *[said(finished_recving={"r"})] * 2).finished_recving == {"r"}
    clock.now = 90
    result(aggregator, said(), said(), said())
    assert stuck[3:] == [Stuck("load", "later", (1, 2))]


def test_a_failure_is_not_forgotten_while_its_load_is_open() -> None:
    clock, stuck = Clock(), list[Stuck]()
    aggregator = KVOutputAggregator(2, on_stuck=stuck.append, clock=clock)
    result(aggregator, said(failed_recving={"r"}), said())
    clock.now = 50
    result(aggregator, said(finished_recving={"r"}), said())
    for clock.now in (115, 605):
        result(aggregator, said(), said())
    noted = result(aggregator, said(), said(finished_recving={"r"}))
    assert noted.failed_recving == noted.finished_recving == {"r"}
    assert [noted.kind for noted in stuck] == ["load"], "the load is what is stuck"


def test_only_an_open_load_lets_unreceived_failures_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tally, "MOST", 5)
    aggregator = KVOutputAggregator(2)
    result(aggregator, said(finished_recving={"r"}, failed_recving={"r"}), said())
    for i in range(20):
        result(aggregator, said(failed_recving={f"f{i}"}), said())
    assert memory_of(aggregator) == 6
    assert result(aggregator, said(), said(finished_recving={"r"})).failed_recving == {"r"}


def test_the_result_has_the_fields_of_older_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregator, "_MISSING_FIELDS", {"failed_recving"})
    monkeypatch.setattr(aggregator, "KVConnectorOutput", dict)
    assert "failed_recving" not in result(KVOutputAggregator(1), said(failed_recving={"r"}))


def test_aggregated_output_can_be_pickled() -> None:
    noted = result(KVOutputAggregator(2), *[said(finished_sending={"r"}) for _ in range(2)])
    assert pickle.loads(pickle.dumps(noted)) == noted


@dataclasses.dataclass
class NewerOutput(KVConnectorOutput):
    """The workers' output of vLLM's main branch."""

    prefix_replay_checkpoints: dict[str, int] = dataclasses.field(default_factory=dict)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(aggregator, "_MISSING_FIELDS", set())
    monkeypatch.setattr(aggregator, "_HAS_CHECKPOINTS", True)
    monkeypatch.setattr(aggregator, "KVConnectorOutput", NewerOutput)
    return lambda received=(), **checkpoints: ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=NewerOutput(finished_recving={*received}, prefix_replay_checkpoints=checkpoints),
    )


@pytest.mark.parametrize(
    ("first", "second", "certified"),
    [
        ({"r": 48}, {"r": 48}, {"r": 48}), ({"r": 48}, {"r": 32}, {}), ({"r": 48}, {}, {}), ({}, {}, {}),
        ({"q": 8}, {"q": 8}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_is_certified_when_every_rank_agrees(
    first: dict[str, int], second: dict[str, int], certified: dict[str, int], newer: Callable[..., Any]
) -> None:
    """With the request's receipt, which may come in a later step on one rank."""
    combined: Any = KVOutputAggregator(2)
    assert result(combined, newer("r", **first), newer()).prefix_replay_checkpoints == {}
    assert result(combined, newer(), newer("r", **second)).prefix_replay_checkpoints == certified
    assert result(combined, newer("r"), newer("r")).prefix_replay_checkpoints == {}, "once"


def test_checkpoints_that_are_never_received_are_bounded(
    newer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator, "MOST", 3)
    combined: Any = KVOutputAggregator(1)
    for i in range(9):
        result(combined, newer(**{f"r{i}": i}))
    assert list(combined._checkpoints) == ["r6", "r7", "r8"]
