"""Who loads, against a plain statement of each policy; and lookups that are left open until they are answered."""

from collections.abc import Collection
from itertools import product
from types import SimpleNamespace
from typing import Any, cast, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from vllm.v1.request import RequestStatus

from kvobs.connectors.sub_connector import SubConnector
from kvobs.probe.recorder import Recorder
from kvobs.routing import lookups
from kvobs.routing.lookups import POLICIES, Lookups, OpenLookups
from kvobs.routing.visibility import Visibility
from kvobs.schema import signals
from kvobs.schema.options import Options
from kvobs.state.transfers import NO_RESULT, NOTHING, InProgress, LookupResult, Offer
from kvobs.telemetry.transfers.offers import OfferCounts
from kvobs.testing import BLOCK, Rig, Script
from kvobs.vllm_api import versions
from tests.support.probes import counts
from tests.support.rig import assert_gone_after, assert_nothing_is_left, counted, counts_of, started

Answer = tuple[int | None, bool]
ANSWERS: tuple[Answer, ...] = ((None, False), (0, False), (16, True), (16, False), (32, True))
R = SimpleNamespace(request_id="r", num_tokens=100, skip_reading_prefix_cache=False)


class Clock:
    now_ms: float = 0

    def __call__(self) -> int:
        return int(self.now_ms * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lookups, "wall_ns", clock)
    return clock


class Asker:
    """Connectors whose answers are given, and count how often they were asked."""

    def __init__(
        self, *answers: Answer, isolation: Any = None, async_only: Collection[int] = (), **options: Any
    ) -> None:
        self.answers = list(answers)
        self.asked = [0] * len(answers)
        self.recorder = Recorder(len(answers))
        connectors = [
            SubConnector(i, str(i), SimpleNamespace(get_num_new_matched_tokens=self._lookup(i)), self.recorder)
            for i in range(len(answers))
        ]
        chosen = Options(**options)
        self.visibility = [Visibility() for _ in answers]
        self.awaited = [InProgress[str]() for _ in answers]
        self.counts = OfferCounts(self.recorder, [chosen.min_tokens.get(connector.name, 1) for connector in connectors])
        self.lookups = Lookups(
            connectors,
            chosen,
            self.counts,
            self.visibility,
            awaited=self.awaited,
            isolation=isolation,
            async_only=async_only,
        )

    def _lookup(self, i: int) -> Any:
        def lookup(request: Any, num_computed_tokens: int) -> Answer:
            self.asked[i] += 1
            return self.answers[i]

        return lookup

    def settle(self, owner: int | None, tokens: int) -> LookupResult:
        """Let vLLM allocate tokens of a connector; return the lookup that this ends."""
        result = self.lookups.resolve("r")
        self.counts.allocated(cast("Any", R), result, owner, tokens)
        return result

    def ask(self, local: int = 0) -> Offer | None:
        return self.lookups.look_up(R, local)

    def count(self, index: int, metric: str, *labels: str) -> int:
        return counts_of(self.recorder, index, metric, *labels)


def first(answers: tuple[Answer, ...]) -> Offer | None:
    """As vLLM: the first hit, once all have answered."""
    return None if any(tokens is None for tokens, _ in answers) else earlier(answers)


def earlier(answers: tuple[Answer, ...]) -> Offer | None:
    for i, (tokens, is_async) in enumerate(answers):
        if tokens is None:
            return None
        if tokens:
            return Offer(i, tokens, is_async)
    return NOTHING


def longest(answers: tuple[Answer, ...]) -> Offer | None:
    if any(tokens is None for tokens, _ in answers):
        return None
    hits = [Offer(i, tokens, is_async) for i, (tokens, is_async) in enumerate(answers) if tokens]
    return max(hits, key=lambda offer: offer.tokens, default=NOTHING)


def test_the_policies_choose_as_they_are_stated() -> None:
    for answers in product(ANSWERS, repeat=3):
        assert Asker(*answers).ask() == first(answers), answers
        assert Asker(*answers, wait_for="earlier").ask() == earlier(answers), answers
        assert Asker(*answers, load_policy="longest").ask() == longest(answers), answers


def test_each_value_of_the_option_has_a_policy() -> None:
    assert tuple(POLICIES) == get_args(Options.model_fields["load_policy"].annotation)


def test_a_numpy_number_is_offered_as_a_plain_encodable_one() -> None:
    offer = Asker((cast("Any", np.int64(32)), True)).ask()
    assert offer == Offer(0, 32, True)
    assert type(offer.tokens if offer else None) is int


def outcomes_of(answers: tuple[Answer, ...], wait_for: str, policy: str) -> list[str]:
    """Return the outcome of each connector that is asked."""
    found = []
    for tokens, _ in answers:
        found.append("pending" if tokens is None else "hit" if tokens else "miss")
        if policy == "first" and tokens is None and (wait_for == "all" or "hit" not in found):
            break
    return found


@pytest.mark.parametrize(("policy", "wait_for"), [("first", "all"), ("first", "earlier"), ("longest", "all")])
@given(st.lists(st.tuples(*[st.sampled_from(ANSWERS)] * 3), max_size=8))
def test_a_lookup_is_judged_by_its_answers(policy: str, wait_for: str, repetitions: list[tuple[Answer, ...]]) -> None:
    """And counted, and in progress, once for each outcome of a request."""
    asker = Asker(*[(0, False)] * 3, load_policy=policy, wait_for=wait_for)
    choose = longest if policy == "longest" else first if wait_for == "all" else earlier
    seen: set[tuple[int, str]] = set()
    pending: set[int] = set()
    asked = [0] * 3
    for answers in repetitions:
        asker.answers = list(answers)
        assert asker.ask() == choose(answers)
        outcomes = outcomes_of(answers, wait_for, policy)
        seen |= set(enumerate(outcomes))
        for index, outcome in enumerate(outcomes):
            asked[index] += 1
            is_open = outcome != "pending" or (wait_for == "earlier" and "hit" in outcomes[:index])
            (pending.discard if is_open else pending.add)(index)
        assert asker.asked == asked
        assert {index for index, waiting in enumerate(asker.awaited) if len(waiting)} == pending
        if choose(answers) is not None:
            left_open = {index for index, outcome in enumerate(outcomes) if outcome == "pending"}
            for expected in (left_open, set()):  # an asynchronous load is allocated twice
                assert set(asker.settle(None, 0).left_open) == expected
    for index, outcome in product(range(3), ("hit", "miss", "pending")):
        assert asker.count(index, "kvobs_lookups_total", outcome) == ((index, outcome) in seen)


EITHER_POLICY = pytest.mark.parametrize("policy", POLICIES)


@EITHER_POLICY
@given(st.lists(st.integers(0, 48), min_size=1, max_size=4), st.lists(st.integers(1, 48), min_size=4, max_size=4))
def test_an_offer_below_its_minimum_is_never_used(policy: str, tokens: list[int], minima: list[int]) -> None:
    """And all are asked, as without a minimum."""
    least = {str(i): minima[i] for i in range(len(tokens))}
    asker = Asker(*((n, True) for n in tokens), load_policy=policy, min_tokens=least)
    best: Any = asker.ask()
    usable = tuple((n if n >= minima[i] else 0, True) for i, n in enumerate(tokens))
    assert best == (longest(usable) if policy == "longest" else first(usable))
    assert asker.asked == [1] * len(tokens)
    asker.settle(best.connector_index if best.tokens else None, best.tokens)
    for i, n in enumerate(tokens):
        assert asker.count(i, "kvobs_offered_tokens_total") == n
        reason = "below_minimum" if n < minima[i] else "other_chosen"
        in_vain = 0 if i == best.connector_index else max(0, n - best.tokens)
        assert lost(asker, i) == ({reason: in_vain} if in_vain else {})


def test_an_offer_below_its_minimum_is_no_hit_that_ends_the_wait() -> None:
    assert Asker((16, True), (None, False), wait_for="earlier", min_tokens={"0": 17}).ask() is None


def test_first_asks_nobody_after_one_that_has_not_answered() -> None:
    """N1: as vLLM's own MultiConnector."""
    asker = Asker((16, True), (None, False), (32, True))
    assert asker.ask() is None
    assert asker.asked == [1, 1, 0]
    assert set(asker.settle(None, 0).left_open) == set()


def test_an_offer_of_less_than_nothing_is_no_hit() -> None:
    """ExampleConnector's, where vLLM has more itself."""
    asker = Asker((-16, False), (16, True))
    assert asker.ask() == Offer(1, 16, True)
    assert asker.count(0, "kvobs_lookups_total", "miss") == 1
    assert asker.settle(1, 16).offers == [Offer(0, 0, False), Offer(1, 16, True)]


@EITHER_POLICY
def test_a_banned_connector_is_asked_and_its_answer_is_dropped(policy: str) -> None:
    """N4."""
    asker = Asker((32, True), (16, True), load_policy=policy)
    asker.ask()
    asker.lookups.ban("r", 0)
    assert asker.ask() == Offer(1, 16, True)
    assert asker.asked == [2, 2]
    asker.lookups.lift_bans("another")
    assert asker.ask() == Offer(1, 16, True)
    asker.lookups.lift_bans("r")
    assert asker.ask() == Offer(0, 32, True)


def test_synchronous_offers_of_some_are_not_used() -> None:
    asker = Asker((32, False), (16, False), async_only={0})
    assert asker.ask() == Offer(1, 16, False)
    assert asker.settle(1, 16).offers == [Offer(0, 32, False), Offer(1, 16, False)], "it is unused"
    assert lost(asker, 0) == {"other_chosen": 16}
    asker.answers[0] = (32, True)
    assert asker.ask() == Offer(0, 32, True)
    alone = Asker((32, False), async_only=(0,))
    alone.ask()
    alone.settle(None, 0)
    assert lost(alone, 0) == {"declined": 32}, "vLLM has no part in it"


@EITHER_POLICY
def test_a_slow_connector_is_awaited_only_until_the_timeout(policy: str, clock: Clock) -> None:
    asker = Asker((None, False), (16, True), load_policy=policy, lookup_timeout_ms=50)
    assert asker.ask() is None
    clock.now_ms = 49
    assert asker.ask() is None
    clock.now_ms = 50
    assert asker.ask() == Offer(1, 16, True)
    assert set(asker.settle(None, 0).left_open) == {0}
    assert asker.ask() == Offer(1, 16, True)
    assert asker.count(0, "kvobs_lookups_total", "pending") == 1
    assert asker.count(0, "kvobs_lookups_total", "timeout") == 1


def test_the_load_begins_where_the_winning_lookup_found_it() -> None:
    asker = Asker((16, True))
    asker.ask(local=48)
    assert asker.settle(0, 16).local == 48


REASONS = signals.UNUSED_HIT_TOKENS.labels["reason"]


def lost(asker: Asker, index: int) -> dict[str, int]:
    """Return reason -> tokens that a connector has offered in vain."""
    counts = {reason: asker.count(index, "kvobs_unused_hit_tokens_total", reason) for reason in REASONS}
    return {reason: n for reason, n in counts.items() if n}


@given(st.lists(st.sampled_from([0, 16, 32, 48]), min_size=1, max_size=4), st.data())
def test_offered_admitted_and_unused_hit_tokens(tokens: list[int], data: st.DataObject) -> None:
    """Offers count once a request, whoever wins; unused is what a loser had beyond the winner; admitted counts all."""
    owner = data.draw(st.sampled_from([None, *(i for i, n in enumerate(tokens) if n)]))
    asker = Asker(*((n, True) for n in tokens))
    won = 0 if owner is None else tokens[owner]
    taken = max(0, won - data.draw(st.sampled_from([0, 8]))) if owner is not None else 0
    for _ in range(2):  # the second is a lookup after a preemption
        asker.ask()
        asker.settle(owner, taken)
    for i, n in enumerate(tokens):
        assert asker.count(i, "kvobs_offered_tokens_total") == n
        assert asker.count(i, "kvobs_unused_offers_total") == int(bool(n) and i != owner)
        assert asker.count(i, "kvobs_admitted_tokens_total") == (2 * taken if i == owner else 0)
        reason = "other_chosen" if owner not in (None, i) else "not_taken"
        in_vain = won - taken if i == owner else max(0, n - won)
        assert lost(asker, i) == ({reason: in_vain} if in_vain else {})
    asker.ask()
    asker.lookups.discard("r")
    assert [asker.count(i, "kvobs_offered_tokens_total") for i in range(len(tokens))] == tokens


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_the_last_offers_of_a_request_ended_unallocated_are_lost(is_withdrawn: bool) -> None:
    """vLLM asks again in each step as long as it has no blocks."""
    asker = Asker((32, True), (0, False))
    for _ in range(3):
        asker.ask()
    assert asker.count(0, "kvobs_offered_tokens_total") == 0
    if is_withdrawn:
        asker.answers[0] = (None, False)
        asker.ask()
    asker.lookups.discard("r")
    assert asker.count(0, "kvobs_offered_tokens_total") == (0 if is_withdrawn else 32)
    assert (lost(asker, 0), lost(asker, 1)) == ({} if is_withdrawn else {"not_allocated": 32}, {})


def test_an_allocation_without_a_lookup_before_it_counts_nothing() -> None:
    asker = Asker((16, True))
    asker.ask()
    asker.settle(0, 16)
    before = counts(asker.recorder)
    asker.settle(None, 0)
    assert counts(asker.recorder) == before


def test_a_request_that_has_ended_is_forgotten() -> None:
    asker = Asker((None, False))
    asker.ask()
    assert len(asker.lookups._asked) == 1
    asker.lookups.discard("r")
    asker.lookups.discard("r")
    assert len(asker.lookups._asked) == len(asker.awaited[0]) == 0
    assert asker.settle(None, 0) == NO_RESULT
    asker.ask()
    assert asker.count(0, "kvobs_lookups_total", "pending") == 2, "another request of the same id"


def test_a_connector_that_is_no_longer_asked_is_not_waited_for() -> None:
    """As in a quarantine by a slow call: the request runs without its answer."""
    asked = {0, 1}
    isolation = SimpleNamespace(asks=lambda index, request: index in asked, discards=lambda index, request: False)
    asker = Asker((16, True), (None, False), isolation=isolation)
    assert asker.ask() is None
    asked.remove(1)
    assert asker.ask() == Offer(0, 16, True)
    assert [len(lookups) for lookups in asker.awaited] == [0, 0]


@pytest.mark.parametrize("answer", [(32, True), (None, False)])
def test_a_discarded_answer_is_neither_used_nor_awaited(answer: Answer) -> None:
    """A connector that failed while it knew a request may hold nonsense about that request, and about no other."""
    isolation = SimpleNamespace(
        asks=lambda index, request: True, discards=lambda index, request: (index, request) == (0, "r")
    )
    asker = Asker(answer, (16, True), isolation=isolation)
    assert asker.ask() == Offer(1, 16, True)
    assert asker.lookups.look_up(SimpleNamespace(**vars(R) | {"request_id": "s"}), 0) == (
        None if answer[0] is None else Offer(0, 32, True)
    )


# --- where an option says not to wait

OUTCOMES = signals.LOOKUPS.labels["outcome"]
KV = (2 * BLOCK, True)
NOT_YET, MISS = (None, False), (0, False)


def test_an_open_lookup_is_repeated_and_then_gets_no_tokens() -> None:
    """But not in a step in which its last call was slow, and not about what has ended."""
    calls: list[Any] = []
    answers = {"r": NOT_YET, "ended": KV}

    def lookup(request: Any, local: int) -> Answer:
        calls.append((request.request_id, local))
        return answers[request.request_id]

    connector = SimpleNamespace(
        get_num_new_matched_tokens=lookup,
        update_state_after_alloc=lambda request, *given: calls.append((request.request_id, *given)),
    )
    connectors = [SubConnector(0, "0", SimpleNamespace(), Recorder(2)), SubConnector(1, "1", connector, Recorder(2))]
    answered: list[Any] = []
    lookups = OpenLookups(connectors, [Visibility(), Visibility()], lambda *answer: answered.append(answer))
    for request_id in answers:
        lookups.leave_open(SimpleNamespace(request_id=request_id, status=RequestStatus.RUNNING), "blocks", 48, {1})
    for _ in range(2):
        lookups.discard("ended")
    assert [lookups.has(index, "r") for index in (0, 1)] == [False, True]
    lookups.poll(lambda index: index == 1)
    assert calls == []
    for _ in range(2):
        lookups.poll(lambda index: False)
    answers["r"] = KV
    for _ in range(2):
        lookups.poll(lambda index: False)
    assert calls == [("r", 48)] * 3 + [("r", "blocks", 0)]
    assert answered == [("r", 1, KV[0])]
    assert lookups._open == {}


# --- under vLLM's scheduler


def waiting_for_earlier(a: Script, b: Script, *answers: Any) -> Rig:
    a.offers["r"], b.offers["r"] = [KV, MISS], [NOT_YET, *answers]
    rig = started("kvobs", a, b, kvobs={"wait_for": "earlier"}, max_tokens=4)
    assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    return rig


def tokens_of(script: Script) -> list[int]:
    return [tokens for _, tokens, _ in script.called("update_state_after_alloc")]


def test_a_lookup_answered_while_its_sibling_loads_closes_once(a: Script, b: Script) -> None:
    """The allocation after the load is no lookup: it must not be opened again."""
    rig = waiting_for_earlier(a, b, NOT_YET, KV)
    rig.run(3)
    asked = len(b.called("get_num_new_matched_tokens"))
    assert tokens_of(b) == [0]
    assert_gone_after(rig, a, 8, received="r")
    assert len(b.called("get_num_new_matched_tokens")) == asked == 3
    assert tokens_of(b) == [0, 0], "the second is that of the allocation after the load, as in vLLM"
    assert [counted(rig, "kvobs_lookups_total", 1, outcome) for outcome in ("pending", "hit", "miss")] == [1, 1, 0]
    assert all("r" not in shown.scheduled for shown in b.called("build_connector_meta"))
    assert "r" in frozenset().union(*(shown.finished for shown in b.called("build_connector_meta")))
    assert_nothing_is_left(rig)


@pytest.mark.skipif(not versions.ignores_answers(), reason="this vLLM loads what is offered")
@pytest.mark.parametrize("options", [{}, {"wait_for": "earlier"}, {"load_policy": "longest"}], ids=str)
@pytest.mark.parametrize("answer", [KV, MISS, NOT_YET, [NOT_YET, KV]], ids=str)
def test_an_answer_that_vllm_ignores_is_no_hit_offer_or_wait(
    answer: Any, options: dict[str, Any], a: Script, b: Script
) -> None:
    """As that about prompt_logprobs: the request runs at once."""
    a.offers["r"], b.offers["r"] = MISS, answer
    rig = Rig("kvobs", a, b, kvobs=options)
    rig.add("r", max_tokens=4).skip_reading_prefix_cache = True
    rig.run(2)
    assert rig.status("r") == "RUNNING"
    assert not any(map(len, rig.connector._side.lookups._awaited))
    rig.run(4)
    for index in range(2):
        found = {outcome: counted(rig, "kvobs_lookups_total", index, outcome) for outcome in OUTCOMES}
        assert found == dict.fromkeys(OUTCOMES, 0) | {"not_read": 1}
        assert counted(rig, "kvobs_offered_tokens_total", index) == 0
    assert_nothing_is_left(rig)


def test_lookup_answered_after_the_load_is_given_the_blocks_then(a: Script, b: Script) -> None:
    rig = waiting_for_earlier(a, b, *[NOT_YET] * 3, MISS)
    a.say(0, received="r")
    rig.run(2)
    assert rig.status("r") == "RUNNING"
    assert tokens_of(b) == [], "it is not given 0 tokens before it has answered"
    rig.run(2)
    assert tokens_of(b) == [0]
    rig.run(5)
    assert_nothing_is_left(rig)


def test_a_request_that_ends_first_is_reported_as_vllm_would(a: Script, b: Script) -> None:
    rig = waiting_for_earlier(a, b)
    rig.abort("r")
    rig.step()
    asked = len(b.called("get_num_new_matched_tokens"))
    a.say(0, received="r")
    rig.run(3)
    assert len(b.called("get_num_new_matched_tokens")) == asked
    assert b.called("request_finished") == ["r"]
    assert tokens_of(b) == []
    assert_nothing_is_left(rig)


def test_an_open_lookup_is_not_given_blocks_lost_by_preemption(a: Script, b: Script) -> None:
    """In the step of a preemption vLLM looks up no request."""
    b.offers["r"] = NOT_YET
    rig = Rig("kvobs", a, b, blocks=12, kvobs={"lookup_timeout_ms": 1e-6})
    rig.add("s", max_tokens=40)
    rig.add("r", max_tokens=20)
    given: list[tuple[Any, Any]] = []

    def compare(hook: str, detail: Any) -> None:
        if hook == "update_state_after_alloc" and detail[0] == "r":
            given.append((detail[2], rig.scheduler.kv_cache_manager.get_block_ids("r")))

    b.on_call = compare
    rig.run(17)
    assert (rig.status("r"), given) == ("RUNNING", [])
    b.offers["r"] = MISS
    rig.step()
    assert rig.status("r") == "PREEMPTED"
    rig.run(60)
    assert given
    assert all(blocks == held for blocks, held in given)
    assert_nothing_is_left(rig)


@pytest.mark.parametrize("is_preempted", [True, False])
def test_lookup_not_waited_for_does_not_load_within_a_step(a: Script, b: Script, is_preempted: bool) -> None:
    """A connector whose lookup was left open is not shown the request's steps, from which LMCache takes its loads."""
    a.offers["r"], b.offers["r"] = [MISS if is_preempted else KV, MISS], [NOT_YET, NOT_YET, (2 * BLOCK, False)]
    rig = Rig("kvobs", a, b, kvobs={"lookup_timeout_ms": 1e-6})
    request = rig.add("r", max_tokens=9)
    rig.run(3)
    if is_preempted:
        assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        a.say(0, failed="r")
    rig.run(3)
    assert set(tokens_of(b)) == {0}
    assert request.num_computed_tokens > 2 * BLOCK
    rig.run(9)
    assert_nothing_is_left(rig)


def test_a_failed_load_is_looked_up_anew(a: Script, b: Script) -> None:
    """vLLM asks itself then: what was open is forgotten, and a hit that comes late loads the request."""
    rig = waiting_for_earlier(a, b, NOT_YET, KV)
    a.say(0, failed="r")
    rig.run(4)
    assert_gone_after(rig, b, 8, received="r")
    assert tokens_of(b)[0] == 0
    assert_nothing_is_left(rig)
