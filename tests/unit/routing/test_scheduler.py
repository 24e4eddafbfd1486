"""What the router announces of each request; and random reports: nothing raises, and nothing is left."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.serial_utils import MsgpackEncoder

from kvobs import faults
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals
from kvobs.state.events import EVENTS, Observer
from kvobs.state.transfers import Report, ReportKind
from kvobs.telemetry.transfers.offers import OfferCounts
from kvobs.testing import BLOCK, Rig, Script, ScriptedConnector
from kvobs.vllm_api import versions
from tests.support.probes import counts
from tests.support.rig import assert_nothing_is_left, counted, started

LIVE = ("async", "sync", "saved", "plain")
times = st.sampled_from([0, 1, -1, -(2**63), 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)
requests = st.sampled_from([*LIVE, "nobody", "", "x" * 10_000, "line\nbreak"])
reports = st.builds(
    lambda *same, each: Report(*same, *zip(*each, strict=True)),
    st.integers(0, 1),
    st.sampled_from(ReportKind),
    st.integers(0, 1),
    times,
    each=st.lists(st.tuples(requests, times, times), min_size=1, max_size=3),
)


@pytest.mark.usefixtures("in_production")
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(reports, max_size=8), max_size=3), st.integers(0, 1))
def test_whatever_workers_report(steps: list[list[Report]], lag: int) -> None:
    """Beside what they have to report, across vLLM's pickle and aggregator: a request of every kind is open."""
    a, b = Script("a"), Script("b")
    a.offers |= {"async": (BLOCK, True), "sync": (BLOCK, False)}
    b.promises.add("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        rig = Rig("kvobs", a, b, ranks=2, kvobs={"tracing": {"level": "calls"}}, lag=lag)
    for name in LIVE:
        rig.add(name, trace_headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"})
    rig.run(2 + lag)
    for step in steps:
        for report in step:
            rig.workers[report.rank]._side._reports.append(report)
        rig.step()
    for aborts in (False, True):  # and once more what has begun again
        for name in LIVE if aborts else ():
            rig.abort(name)
        for rank in (0, 1):
            a.say(rank, received="async")
            b.say(rank, saved="saved")
        rig.run(3 + lag)
    assert_nothing_is_left(rig)
    assert not rig.connector._side.ledger.incomplete.recent
    MsgpackEncoder().encode(rig.stats)  # or vLLM's engine ends
    faults.take()


def test_where_a_hit_comes_from_says_the_connector_that_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the lookup, and without a hit, it is what vLLM says of any connector."""
    a, b = Script("a"), Script("b")
    b.offers["r"] = (2 * BLOCK, True)
    rig = Rig("kvobs", a, b)
    for connector in rig.connector._side.connectors:
        monkeypatch.setattr(
            connector, "get_external_cache_hit_sources", lambda request, tokens, name=connector.name: {name: tokens}
        )
    request = rig.add("r")
    names = [connector.name for connector in rig.connector._side.connectors]
    unchosen = rig.connector.get_external_cache_hit_sources(request, 32)
    assert sum(unchosen.values()) == 32
    assert not set(unchosen) & set(names)
    b.answers["get_loaded_kv_cache_group_ids"] = (7,)
    assert rig.connector.get_num_new_matched_tokens(request, 0) == (2 * BLOCK, True)
    for _ in range(2):  # vLLM may ask before it allocates
        assert rig.connector.get_external_cache_hit_sources(request, 32) == {names[1]: 32}
        assert rig.connector.get_loaded_kv_cache_group_ids(request) == (7,)
        rig.step()


def hit_tokens(rig: Rig, index: int) -> dict[str, int]:
    sources = signals.HIT_TOKENS.labels["source"]
    return {name: n for name in sources if (n := counted(rig, signals.HIT_TOKENS.name, index, name))}


@pytest.mark.skipif("get_external_cache_hit_sources" not in versions.hooks(), reason="since vLLM 0.33")
@pytest.mark.parametrize("is_async", [True, False])
def test_a_loads_tiers_count_once_at_the_connector_that_loads(
    is_async: bool, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when an async load has ended, nor after a preemption."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    b.offers["r"] = (2 * BLOCK, is_async)
    rig = Rig("kvobs", a, b)
    tiers = {CacheHitSource.HOST: 20, CacheHitSource.DISK: 12}
    monkeypatch.setattr(rig.connector._side.connectors[1], "get_external_cache_hit_sources", lambda *_: tiers)
    rig.add("r", max_tokens=9)
    rig.run(2)
    b.say(0, received="r")
    rig.run(3)
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run(3)
    assert (hit_tokens(rig, 0), hit_tokens(rig, 1)) == ({}, {"host": 20, "disk": 12})
    assert counted(rig, "kvobs_admitted_tokens_total", 1) == 4 * BLOCK


@pytest.mark.parametrize(
    "tiers", [{}, {"host": 31}, {"external_unspecified": 32}, {"new tier": 32}, {"new tier": 30, "host": 3}]
)
def test_unknown_tiers_or_ones_that_do_not_sum_are_unspecified(tiers: dict[str, int]) -> None:
    recorder = Recorder(1)
    OfferCounts(recorder, [1]).sourced(0, 32, tiers)
    assert counts(recorder) == {signals.word(0, signals.slot(signals.HIT_TOKENS, "unspecified")): 32}


def test_the_end_of_a_request_that_nobody_saves_makes_no_orders(a: Script) -> None:
    """They would be pickled for every worker."""
    rig = started("kvobs", a, max_tokens=1)
    assert not rig.scheduler.requests
    assert rig.connector._side.next_orders.made is None


class Announced(Observer):
    """A rig that notes its events, by request; of loads and saves what they have come to."""

    def __init__(self, *scripts: Script, **more: Any) -> None:
        self.rig = rig = Rig("kvobs", *scripts, **more)
        self.events: dict[Any, list[tuple[Any, ...]]] = {}
        for event in set(EVENTS) - {"answered", "waited", "reused", "sourced", "laid_out"}:
            setattr(self, event, partial(self._note, event))
        rig.connector._side.observer = rig.connector._side.completions.observer = self

    def _note(self, event: str, subject: Any, *details: Any, **more: Any) -> None:
        request_id = getattr(subject, "request_id", subject)
        match event, details:
            case "looked_up", (int(began_ns), int(ended_ns)):
                assert 0 < began_ns <= ended_ns
                details = ()
            case "allocated", (lookup, owner, tokens):
                details = ([offer[:2] for offer in lookup.offers], lookup.local, owner, tokens)
            case "admitted", (load,):
                assert load.blocks
                assert load.size > 0
                details = (load.connector_index, load.tokens, load.local_tokens, load.rest_tokens)
            case "load_ended" | "aborted", (load,):
                details = (load.connector_index, load.outcome, *more.values())
            case "sync_loads_failed", (loads,):
                details = ([load.outcome for load in loads],)
            case "promised", _:
                details = tuple(map(sorted, details))
            case "saved", (index, save, ended_ns):
                assert ended_ns >= save.promised_ns > 0
                details = (index, save.outcome)
        self.events.setdefault(request_id, []).append((event, *details))


KV = (2 * BLOCK, True)
LOADED: list[tuple[Any, ...]] = [
    ("looked_up",),
    ("allocated", [(0, 2 * BLOCK), (1, 0)], 0, 0, 2 * BLOCK),
    ("admitted", 0, 2 * BLOCK, 0, 2 * BLOCK + 1),
]
AGAIN: tuple[Any, ...] = ("allocated", [], 0, None, 0)  # after an async load


def test_orders_of_a_load_and_a_promised_save(a: Script, b: Script) -> None:
    a.offers["r"] = KV
    b.promises.add("r")
    announced = Announced(a, b)
    announced.rig.add("r", max_tokens=1)
    announced.rig.run(2)
    a.say(0, received="r")
    announced.rig.run(4)
    b.say(0, saved="r")
    announced.rig.run(2)
    assert announced.events == {
        "r": [*LOADED, ("load_ended", 0, "ok"), AGAIN, ("promised", [1], []), ("request_ended",), ("saved", 1, "ok")]
    }


def test_orders_of_an_aborted_load_with_a_promised_save(a: Script, b: Script) -> None:
    a.offers["r"] = KV
    a.promises.add("r")
    announced = Announced(a, b)
    announced.rig.add("r")
    announced.rig.step()
    announced.rig.abort("r")
    announced.rig.step()
    a.say(0, received="r")
    announced.rig.step()
    a.say(0, saved="r")
    announced.rig.run(4)
    ended = [("promised", [0], []), ("aborted", 0, "aborted", False), ("request_ended",), ("load_ended", 0, "aborted")]
    assert announced.events == {"r": [*LOADED, *ended, ("saved", 0, "ok")]}


def test_orders_of_a_save_done_before_its_promise(a: Script, b: Script) -> None:
    b.promises.add("r")
    announced = Announced(a, b)
    announced.rig.add("r", max_tokens=3)
    announced.rig.step()
    b.say(0, saved="r")
    announced.rig.run(6)
    assert announced.events["r"][2:] == [("promised", [], [1]), ("request_ended",)]


def test_failed_sync_load_is_announced_when_it_has_ended(a: Script, b: Script) -> None:
    a.offers["r"] = [(2 * BLOCK, False), (0, False)]
    announced = Announced(a, b)
    announced.rig.add("r", max_tokens=1)
    a.bad_blocks[0] = {2}
    announced.rig.run(4)
    assert announced.events[0] == [("sync_loads_failed", ["failed"])]
    assert ("load_ended", 0, "failed") in announced.events["r"]


@pytest.mark.parametrize("hook", ["can_load_prefix_replay_checkpoint", "consume_prefix_replay_checkpoint"])
@pytest.mark.parametrize("best_effort", [[], ["two"]])
def test_a_prefix_replay_is_the_chosen_connectors(
    hook: str, best_effort: list[str], monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    """vLLM's main branch asks between lookup and allocation, and after the receipt; 0.33 does not have these hooks."""
    asked: list[Any] = []

    def answer(self: ScriptedConnector, request: Any, *tokens: int) -> bool:
        asked.append((self.script.tag, request.request_id, *tokens))
        if best_effort:
            raise OSError("no store")
        return True

    monkeypatch.setattr(KVConnectorBase_V1, hook, lambda self, request, *tokens: False, raising=False)
    monkeypatch.setattr(ScriptedConnector, hook, answer, raising=False)
    b.offers["r"] = (2 * BLOCK, True)
    rig = Rig("kvobs", a, b, kvobs={"names": ["one", "two"], "best_effort": best_effort})
    request = rig.add("r")
    assert getattr(rig.connector, hook)(request, 0, 32) is False, "nothing is chosen"
    rig.step()
    assert bool(getattr(rig.connector, hook)(request, 0, 32)) is (not best_effort)
    assert asked == [("b", "r", 0, 32)]
