"""What was, the model of it and what would have been, on an engine whose costs are known."""

from __future__ import annotations

import pytest

from kvobs.cli.whatif.comparison import P50, P95, Column, compare
from kvobs.cli.whatif.history import History, PastLoad
from kvobs.cli.whatif.replay import Settings
from kvobs.options import Options
from kvobs.state.lookup import Answer
from kvobs.telemetry.flight import OWN
from tests.support.past_lookups import (
    CHILDREN,
    MS,
    PROMPT,
    QUEUED,
    RESUME,
    S,
    both,
    compared,
    computing_ms,
    load_ms,
    lookup,
)


def test_the_model_of_what_was_is_what_was_where_its_assumptions_hold() -> None:
    found = compared(*both())
    assert (found.lookups, found.known, found.repeated, found.changed) == (20, 20, 20, 0)
    assert found.was.tokens == found.model.tokens == found.what_if.tokens == {"near": 2560, "far": 5120}
    for share in (P50, P95):
        was_s = found.was.first_token_s(share)
        assert was_s is not None
        assert found.model.first_token_s(share) == pytest.approx(was_s, rel=1e-6)
    assert found.model.waited_s == pytest.approx(found.was.waited_s)
    assert found.model.saved_s == pytest.approx(found.was.saved_s)
    assert found.was.saved_s == pytest.approx(10 * 0.2 * (256 + 512) / 1000)


def test_another_choice_is_predicted_from_the_loads_of_that_connector() -> None:
    found = compared(*both(), load_policy="longest")
    assert (found.known, found.changed) == (20, 10)
    assert found.what_if.tokens == {"far": 20 * 512}
    assert (found.was.loads, found.what_if.loads) == (20, 20)
    far_ms = load_ms(1, 512) + RESUME
    assert found.what_if.waited_s == pytest.approx(20 * far_ms / 1000)
    assert found.what_if.first_token_s(P95) == pytest.approx((QUEUED + 1 + far_ms + computing_ms(512)) / 1000)


def test_what_the_model_misses_of_a_request_stays() -> None:
    """A pause in full, and so what does not change; but nothing is quicker than its parts."""
    slow, quick = both(2)
    assert slow.first_token_ns is not None
    assert quick.first_token_ns is not None
    assert quick.arrived_ns is not None
    slow.first_token_ns += 500 * MS
    quick.first_token_ns -= (quick.first_token_ns - quick.arrived_ns) // 2
    lookups = [*both(10), slow, quick]
    same, other = compared(*lookups), compared(*lookups, load_policy="longest")
    assert same.what_if.first_tokens_s == pytest.approx(same.was.first_tokens_s)
    assert same.what_if.first_tokens_s != pytest.approx(same.model.first_tokens_s)
    paused_s, usual_s = other.what_if.first_tokens_s[10], other.what_if.first_tokens_s[8]
    assert paused_s == pytest.approx(usual_s + 0.5)
    assert other.what_if.first_tokens_s[11] == pytest.approx(other.was.first_tokens_s[11])


def test_without_a_connector_all_is_computed() -> None:
    found = compared(*both(), order=["near"])
    assert found.what_if.tokens == {"near": 2560}
    assert found.what_if.first_token_s(P95) == pytest.approx((QUEUED + 1 + computing_ms(PROMPT)) / 1000)
    assert found.requests == found.predicted == 20


def test_what_a_request_waited_beyond_its_answers_stays() -> None:
    """For free blocks, say; a time limit shortens the rest only."""
    slow = [lookup(i, 256, None, chosen=0, took_ms=70) for i in range(10)]
    for one in slow:
        one.answers = {0: Answer(0, 256, True), 1: Answer(1, 0, False, one.began_ns, 50 * MS)}
    found = compared(*slow, lookup_timeout_ms=20)
    model_s, what_if_s = found.model.first_token_s(P50), found.what_if.first_token_s(P50)
    assert model_s is not None
    assert what_if_s == pytest.approx(model_s - 0.030)


def test_an_unknown_answer_keeps_its_lookup_out_of_every_column() -> None:
    open_ = [lookup(i, 256, None, chosen=0) for i in range(4)]
    found = compared(*both(), *open_, recorded={"wait_for": "earlier"}, wait_for="all")
    assert (found.lookups, found.known, found.unknown) == (24, 20, {"far": 4})
    assert found.was.loads == 20
    assert found.requests == 20


def test_a_connector_of_which_no_load_is_recorded_has_no_prediction() -> None:
    """What it offers is known."""
    found = compared(*[lookup(i, 256, 512, chosen=0) for i in range(5)], load_policy="longest")
    assert found.what_if.tokens == {"far": 5 * 512}
    assert (found.requests, found.predicted, found.unpredicted) == (5, 0, {"far": 5})
    assert found.was.first_tokens_s == found.what_if.first_tokens_s == []


def test_a_request_before_the_estimate_is_counted() -> None:
    early = lookup(0, 256, 512, chosen=0, computing={OWN: None, 0: None, 1: None})
    found = compared(early, *both())
    assert (found.requests, found.predicted, found.unestimated) == (21, 20, 1)


def test_a_load_that_failed_fails_again_unless_another_one_is_chosen() -> None:
    """Then its request would not have been looked up again."""
    failed = lookup(5, 256, 512, chosen=0)
    assert failed.load is not None
    failed.load = PastLoad(0, 256, failed.load.ended_ns, "failed", None, 0.5)
    again = lookup(6, None, 512, chosen=1, request=5)
    del again.answers[0]
    failed.is_only = again.is_only = False
    same = compared(*both(4), failed, again)
    assert same.was.tokens == same.what_if.tokens == {"near": 512, "far": 1024 + 512}
    assert same.what_if.waited_s == pytest.approx(same.was.waited_s, rel=0.01)
    assert same.requests == 4
    other = compared(*both(4), failed, again, load_policy="longest")
    assert other.what_if.tokens == {"far": 5 * 512}


def test_a_load_that_has_not_ended_is_not_compared() -> None:
    for outcome in ("aborted", "open"):
        open_ = lookup(5, 256, 512, chosen=0)
        open_.load = PastLoad(0, 256, open_.ended_ns, outcome, None, None)
        assert compared(*both(4), open_).lookups == 4


def test_what_vllm_has_not_taken_is_not_loaded() -> None:
    refused = lookup(5, 256, 0, chosen=0, load=None)
    found = compared(*both(4), refused)
    assert found.known == 5
    assert found.was.loads == found.model.loads == found.what_if.loads == 4


def test_engines_add_up() -> None:
    was = {"load_policy": "first"}
    histories = [History(CHILDREN, was, both(4), []) for _ in range(2)]
    found = compare(histories, [Settings(CHILDREN, Options())] * 2)
    assert (found.lookups, found.was.tokens.total()) == (8, 2 * (512 + 1024))
    assert (found.began_ns, found.ended_ns) == (0, 3 * S + MS)


def test_quantiles_are_times_that_were() -> None:
    column = Column(first_tokens_s=[5.0, 1.0, 4.0, 2.0, 3.0])
    assert (column.first_token_s(P50), column.first_token_s(P95)) == (3.0, 5.0)
    assert Column().first_token_s(P50) is None
