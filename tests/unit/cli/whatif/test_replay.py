"""Repeated lookups choose as they did, and under other settings as they would have, or it is not known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from kvobs.cli.whatif.history import History, PastLookup
from kvobs.cli.whatif.replay import Replay, Settings
from kvobs.cli.whatif.times import Outcome, Times
from kvobs.options import Options
from kvobs.routing.lookups import Offer, Offers
from kvobs.state.lookup import NOBODY, Answer
from kvobs.telemetry.recorder import Recorder
from kvobs.telemetry.telemetry import SETTINGS

MS = 10**6
REQUEST: Any = SimpleNamespace(request_id="r", num_tokens=129, num_output_tokens=0)


class Connector(NamedTuple):
    """Answers so many ms after it is asked first; None: never."""

    after_ms: int | None
    tokens: int
    is_async: bool


class Engine:
    """Asks connectors through the router, at the times it is given."""

    def __init__(self, connectors: list[Connector], options: Options, names: list[str] | None = None) -> None:
        self.now_ms = 0.0
        self.names = names or [f"c{i}" for i in range(len(connectors))]
        self.since: dict[int, float] = {}
        self.options = options
        children: list[Any] = [
            SimpleNamespace(name=name, get_num_new_matched_tokens=self._answering(i, connector))
            for i, (name, connector) in enumerate(zip(self.names, connectors, strict=True))
        ]
        self.offers = Offers(children, options, Recorder(len(children)), clock=lambda: int(self.now_ms * MS))

    def _answering(self, i: int, connector: Connector) -> Any:
        def answer(_request: Any, _computed: int) -> tuple[int | None, bool]:
            since = self.since.setdefault(i, self.now_ms)
            if connector.after_ms is None or self.now_ms - since < connector.after_ms:
                return None, False
            return connector.tokens, connector.is_async

        return answer

    def ask(self, times_ms: list[float], more: int = 0) -> Offer | None:
        """Return what the router chooses in the end, if it does, and ask so many times more."""
        offer, left = None, more
        for now_ms in times_ms:
            if offer is not None and not left:
                break
            self.now_ms = now_ms
            left -= offer is not None
            offer = self.offers.ask(REQUEST, 0)
        return offer

    def past(self, offer: Offer, later_ms: float = 0) -> tuple[History, PastLookup]:
        """Return what is recorded when vLLM allocates."""
        self.now_ms += later_ms
        found = self.offers.found("r")
        self.offers.settle("r", offer.child if offer.tokens else None, offer.tokens)
        lookup = PastLookup(
            1, 0, int(self.now_ms * MS), found.local, {one.child: one for one in found.answers}, found.chosen
        )
        settings = self.options.model_dump(mode="json", include=set(SETTINGS))
        return History(self.names, settings, [lookup], []), lookup


connectors = st.lists(
    st.builds(
        Connector,
        st.one_of(st.just(0), st.just(0), st.integers(0, 60), st.none()),
        st.sampled_from([0, 16, 32, 48]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
options = st.builds(
    lambda policy, wait_for, limit, least: Options(
        load_policy=policy,
        wait_for="all" if policy != "first" else wait_for,
        lookup_timeout_ms=limit,
        min_tokens={"c0": least} if least else {},
    ),
    st.sampled_from(["first", "longest"]),
    st.sampled_from(["all", "earlier"]),
    st.sampled_from([None, 7.0, 20.0, 40.0]),
    st.sampled_from([0, 0, 32]),
)
steps = st.lists(st.floats(0.01, 30), max_size=30)


def replay(history: History, settings: Settings) -> Replay:
    return Replay(history, settings, Times(history))


def chosen(outcome: Outcome | None) -> int:
    assert outcome is not None
    return outcome.offer.child if outcome.offer.tokens else NOBODY


@given(connectors, options, steps, st.integers(0, 3))
def test_under_the_recorded_settings_each_lookup_chooses_as_it_did(
    those: list[Connector], option: Options, pauses_ms: list[float], more: int
) -> None:
    """Whenever vLLM asked."""
    engine = Engine(those, option)
    times_ms = [0.0]
    for pause_ms in pauses_ms:
        times_ms.append(times_ms[-1] + pause_ms)
    offer = engine.ask(times_ms, more)
    assume(offer is not None)
    assert offer is not None
    history, lookup = engine.past(offer, later_ms=0.3)
    outcome = replay(history, Settings.of(history.children, history.settings)).repeat(lookup)
    assert chosen(outcome) == lookup.chosen == (offer.child if offer.tokens else NOBODY)
    assert outcome is not None
    assert outcome.offer == offer
    assert outcome.waited_s <= engine.now_ms / 1000 + 1e-9


@given(connectors, options, options, st.data())
def test_under_other_settings_it_chooses_as_the_router_would_or_does_not_know(
    those: list[Connector], recorded: Options, other: Options, data: st.DataObject
) -> None:
    """An engine that asks every millisecond shows the truth."""
    often: list[float] = [float(ms) for ms in range(400)]
    engine = Engine(those, recorded)
    offer = engine.ask(often)
    assume(offer is not None)
    assert offer is not None
    history, lookup = engine.past(offer)
    order = data.draw(st.permutations(range(len(those))))
    outcome = replay(history, Settings(tuple(f"c{i}" for i in order), other)).repeat(lookup)
    truth = Engine([those[i] for i in order], other, [f"c{i}" for i in order])
    best = truth.ask(often)
    if outcome is None:
        assert any(answer.tokens is None for answer in lookup.answers.values()), "all answers are known"
        return
    assert best is not None
    assert outcome.offer == (best._replace(child=order[best.child]) if best.tokens else best)
    assert outcome.waited_s * 1000 == pytest.approx(truth.now_ms, abs=1e-6)


def past(*answers: Answer, **settings: Any) -> tuple[History, PastLookup]:
    lookup = PastLookup(1, 0, 100 * MS, 0, {answer.child: answer for answer in answers})
    return History(["a", "b", "c"], Options(**settings).model_dump(mode="json"), [lookup], []), lookup


def repeated(history: History, lookup: PastLookup, *order: str, **settings: Any) -> tuple[int, float] | None:
    outcome = replay(history, Settings(order or tuple(history.children), Options(**settings))).repeat(lookup)
    return None if outcome is None else (chosen(outcome), outcome.waited_s * 1000)


QUICK, LATE = Answer(0, 16, True), Answer(1, 64, True, 0, 30 * MS)


def test_the_longest_offer_is_worth_its_wait() -> None:
    assert repeated(*past(QUICK, LATE)) == (0, 30)
    assert repeated(*past(QUICK, LATE), load_policy="longest") == (1, 30)
    assert repeated(*past(QUICK, LATE), wait_for="earlier") == (0, 0)
    assert repeated(*past(QUICK, LATE), load_policy="longest", lookup_timeout_ms=20) == (0, 20)


def test_a_connector_that_is_left_out_is_not_asked() -> None:
    assert repeated(*past(QUICK, LATE), "b") == (1, 30)
    assert repeated(*past(QUICK, LATE), "b", "a") == (1, 30)
    assert repeated(*past(QUICK, LATE), "c") == (NOBODY, 0)


def test_lookups_that_wait_for_each_other_add_up() -> None:
    """With ``first`` no connector is asked after one that has not answered, with ``longest`` all are."""
    later = Answer(2, 0, False, 30 * MS, 50 * MS)
    assert repeated(*past(LATE, later)) == (1, 80)
    assert repeated(*past(LATE, later), load_policy="longest") == (1, 50)


def test_an_answer_that_nobody_waited_for_is_not_guessed() -> None:
    """Unless the settings do not need it either."""
    open_ = Answer(1, None, False, 0, 20 * MS)
    limited = past(QUICK, open_, lookup_timeout_ms=20)
    assert repeated(*limited, lookup_timeout_ms=20) == (0, 20)
    assert repeated(*limited, lookup_timeout_ms=10) == (0, 10)
    assert repeated(*limited, lookup_timeout_ms=21) is None
    assert repeated(*limited) is None
    assert repeated(*limited, wait_for="earlier") == (0, 0)
    assert repeated(*limited, "b", "a", wait_for="earlier") is None
    assert repeated(*limited, "a", "c") == (0, 0)


def test_an_answer_after_the_limit_was_in_time_if_vllm_asked_no_earlier() -> None:
    """It asks once a step. Under another limit it is taken to ask at once."""
    history, lookup = past(QUICK, LATE, load_policy="longest", lookup_timeout_ms=20)
    assert repeated(history, lookup, load_policy="longest", lookup_timeout_ms=20) == (1, 30)
    assert repeated(history, lookup, load_policy="longest", lookup_timeout_ms=25) == (0, 25)
