"""Each option reaches the part that it is for, through the built product: see ``test_observed``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kvobs.schema.options import Options
from kvobs.testing import BLOCK, Script
from tests.support.cached import Cached
from tests.support.observed import KV, Observed, S
from tests.support.rig import entry_for

Play = Callable[[Observed, Script, Script], Any]


def admitted(engine: Observed, a: Script, b: Script) -> Any:
    engine.rig.add("r")
    engine.step(4)
    return engine.series("kvobs_admitted_tokens_total")


def larger(engine: Observed, a: Script, b: Script) -> Any:
    a.offers["r"], b.offers["r"] = (BLOCK, True), (3 * BLOCK, True)
    return admitted(engine, a, b)


def late_first(engine: Observed, a: Script, b: Script) -> Any:
    a.offers["r"], b.offers["r"] = (None, False), (3 * BLOCK, True)
    return admitted(engine, a, b)


def late_second(engine: Observed, a: Script, b: Script) -> Any:
    a.offers["r"], b.offers["r"] = (BLOCK, True), (None, False)
    return admitted(engine, a, b)


def loaded(engine: Observed, a: Script, b: Script) -> Any:
    """Load from the second one, in three steps on rank 1."""
    b.offers["r"] = KV
    engine.rig.add("r", max_tokens=4, kvobs={"report": True})
    engine.step()
    for rank in (0, 1):
        b.say(rank, received="r")
        engine.step(2)


def long_ago(engine: Any, a: Script, b: Script) -> Any:
    loaded(engine, a, b)
    return "connector 'two' took 0.6 s to load 32 tokens of request r, longer than slow_load_ms" in engine.caplog.text


def slow_calls(engine: Observed, a: Script, b: Script) -> Any:
    engine.rig.add("r")
    engine.step(3)
    return ("two", "wait_for_save") in {(name, hook) for name, hook in engine.series("kvobs_slow_calls_total")}


def stuck(engine: Observed, a: Script, b: Script) -> Any:
    b.offers["r"] = KV
    engine.rig.add("r")
    engine.step()
    b.say(0, received="r")
    engine.step(6)
    return engine.series("kvobs_stuck_transfers_total")


def stuck_in_aggregation(engine: Observed, a: Script, b: Script) -> Any:
    """What rank 1 says of a failed load does not reach vLLM's aggregation, which has its own clock."""
    b.offers["r"] = KV
    work = engine.rig._work
    engine.rig.aggregator._clock = lambda: engine.now

    def losing(worker: Any, *args: Any) -> Any:
        output = work(worker, *args)
        if worker is engine.rig.workers[1]:
            output.kv_connector_output.finished_recving = None
        return output

    engine.rig._work = losing
    engine.rig.add("r")
    engine.step()
    b.say(0, failed="r")
    b.say(1, received="r")
    engine.step(9)
    return engine.series("kvobs_stuck_transfers_total")


def fails(engine: Observed, a: Script, b: Script) -> Any:
    b.raises["on_new_request"] = TimeoutError()
    try:
        engine.rig.add("r")
    except TimeoutError:
        return "ends the engine"
    return in_quarantine(engine)


def hesitates(engine: Observed, a: Script, b: Script) -> Any:
    """Be slow for two seconds in a call."""

    def wait(hook: str, detail: Any) -> None:
        engine.now_ns += 2 * S * (hook == "on_new_request")

    b.on_call = wait
    engine.rig.add("r")
    return in_quarantine(engine)


def in_quarantine(engine: Observed) -> Any:
    engine.step(2)
    return engine.series("kvobs_quarantined")


def wrong(engine: Observed, a: Script, b: Script) -> Any:
    """Load wrong bytes on rank 1."""
    engine.rig.add("computed", max_tokens=1)
    engine.step(2)
    engine.rig.scheduler.reset_prefix_cache()
    b.offers["r"] = KV
    engine.rig.fill["r", 1] = {0: 9.0}
    engine.rig.add("r", prompt_of="computed")
    engine.step()
    for rank in (0, 1):
        engine.rig.fill_blocks(rank, "r")
        b.say(rank, received="r")
    engine.step(3)
    return engine.series("kvobs_loads_total"), bool(engine.series("kvobs_corrupt_blocks_total"))


def answered(engine: Observed, a: Script, b: Script) -> Any:
    loaded(engine, a, b)
    while not engine.rig.request_outputs or not engine.rig.request_outputs[0].finished:
        engine.step()
    params = engine.rig.request_outputs[0].kv_transfer_params
    return params and [load["connector"] for load in params["kvobs"]["report"]["loads"]]


class Row(NamedTuple):
    """An option, and what is read of a play without it and with it; ``others`` are those that both have."""

    option: str
    value: dict[str, Any]
    play: Play
    without: Any
    with_it: Any
    others: dict[str, Any] | None = None


OK, FAILED = ({("two", "async", outcome): 1.0} for outcome in ("ok", "failed"))
SHARE = {"sample_ratio": 1.0}
ROWS = [
    Row("load_policy", {"load_policy": "longest"}, larger, {("one",): BLOCK}, {("two",): 3 * BLOCK}),
    Row("min_tokens", {"min_tokens": {"one": 2 * BLOCK}}, larger, {("one",): BLOCK}, {("two",): 3 * BLOCK}),
    Row("wait_for", {"wait_for": "earlier"}, late_second, {}, {("one",): BLOCK}),
    Row("lookup_timeout_ms", {"lookup_timeout_ms": 1}, late_first, {}, {("two",): 3 * BLOCK}),
    Row("slow_call_ms", {"slow_call_ms": 1e-6}, slow_calls, False, True),
    Row("slow_load_ms", {"slow_load_ms": 300}, long_ago, False, True),
    Row("stuck_after_s", {"stuck_after_s": 0.5}, stuck, {}, {("two", "1"): 1}),
    Row("stuck_after_s", {"stuck_after_s": 0.5}, stuck_in_aggregation, {}, {("two", "1"): 1}),
    Row("best_effort", {"best_effort": ["two"]}, fails, "ends the engine", {("two",): 1}),
    Row("best_effort_slow_ms", {"best_effort_slow_ms": 3000}, hesitates, {("two",): 1}, {}, {"best_effort": ["two"]}),
    Row("request_report", {"request_report": True}, answered, None, ["two"]),
    Row("verify", {"verify": SHARE}, wrong, (OK, False), (OK, True)),
    Row(
        "verify",
        {"verify": {**SHARE, "on_mismatch": "recompute"}},
        wrong,
        (OK, True),
        (FAILED, True),
        {"verify": SHARE},
    ),
]
ELSEWHERE = {
    "names": "all",
    "link_gbps": "test_product",
    "request_log": "test_product",
    "exporter": "test_product",
    "tracing": "test_traced",
}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.option} {row.play.__name__}" for row in ROWS])
def test_each_option_reaches_its_part(
    row: Row, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Observed, "make_rig", Cached)
    second = "BestEffortConnector" if "best_effort" in {**row.value, **(row.others or {})} else "ScriptedConnector"
    for value, expected in (({}, row.without), (row.value, row.with_it)):
        caplog.clear()
        a, b = Script("a"), Script("b")
        connectors = [entry_for(a), entry_for(b, second)]
        engine: Any = Observed(monkeypatch, a, b, connectors=connectors, **{**(row.others or {}), **value})
        monkeypatch.setattr("kvobs.connectors.gate.perf_counter_ns", lambda engine=engine: engine.now_ns)
        engine.caplog = caplog
        assert row.play(engine, a, b) == expected


def test_every_option_has_a_row() -> None:
    assert Options.model_fields.keys() == {row.option for row in ROWS} | ELSEWHERE.keys()


def test_an_engine_serves_with_the_largest_times_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    second = Script("second")
    connectors = [entry_for(Script("first")), entry_for(second, "BestEffortConnector")]
    times = [name for name in Options.model_fields if name.endswith(("_ms", "_s"))]
    options: dict[str, Any] = {**dict.fromkeys(times, 10**9), "best_effort": ["two"]}
    engine = Observed(monkeypatch, Script("first"), second, connectors=connectors, **options)
    loaded(engine, Script("first"), second)
    engine.step(4)
    assert len(times) == 5
    assert engine.rig.status("r") == "gone"
    assert "internal error" not in caplog.text
