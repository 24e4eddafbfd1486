"""Who asks gets a report of the own request, nobody else sees a difference, and the log has a line for each request.

vLLM's real scheduler; what a client sends is what vLLM passes on of it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given

from kvobs.page.writer import plain
from kvobs.schema import signals
from kvobs.schema.config import read
from kvobs.state.transfers import Gain, Load, Save
from kvobs.telemetry import recorders
from kvobs.telemetry.requests import request_log, request_reports
from kvobs.telemetry.requests.request_reports import ENDING_AT_MOST, Reports, asks
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.telemetry.tracing.trace_context import of_params
from kvobs.testing import BLOCK, Rig, Script
from tests.support.contexts import json_values, lookup, no_otel_variables, request
from tests.support.numbers import numbers
from tests.support.rig import assert_nothing_is_left, entry_for, observer_of

NAMES = ["one", "two"]
KV, SYNC = (2 * BLOCK, True), (2 * BLOCK, False)
ASK: dict[str, Any] = {"report": True}
PROMPT = 4 * BLOCK + 1


class Engine:
    def __init__(self, folder: Path, *scripts: Script, **kvobs: Any) -> None:
        self.path = folder / "log"
        more = {key: kvobs.pop(key) for key in ("ranks", "lag", "policy") if key in kvobs}
        self.rig = Rig("kvobs", *scripts, kvobs={"names": NAMES[: len(scripts)], **kvobs}, **more)
        self.answers: dict[str, Any] = {}
        finish = self.rig.connector.request_finished_all_groups

        def noting(request: Any, blocks: Any) -> Any:
            holds, params = finish(request, blocks)
            self.answers[request.request_id] = msgspec.msgpack.decode(msgspec.msgpack.encode(params))
            return holds, params

        self.rig.connector.request_finished_all_groups = noting

    def report(self, request: str = "r") -> dict[str, Any]:
        return self.answers[request]["kvobs"]["report"]

    def lines(self) -> list[dict[str, Any]]:
        self.rig.connector.shutdown()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(request_log, "CLOSING_S", 60.0)  # the machine may have other things to do
    made: list[Engine] = []

    def begin(**kvobs: Any) -> Engine:
        if kvobs.pop("log", False):
            kvobs["request_log"] = str(tmp_path / "log")
        made.append(Engine(tmp_path, a, b, **kvobs))
        return made[-1]

    yield begin
    for engine in made:
        assert_nothing_is_left(engine.rig)
        engine.rig.connector.shutdown()


def loaded(engine: Engine, script: Script, request: str = "r", **params: Any) -> None:
    engine.rig.add(request, **params)
    engine.rig.run(2)
    script.say(0, received=request)
    engine.rig.run(5)


# --- who gets one


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("sent", [{}, {"kvobs": ASK}, {"kvobs": {"report": False}}, {"remote": 1}])
@pytest.mark.parametrize("own", [None, {}, {"key": 1}])
def test_who_asks_gets_a_report_and_nobody_else(option: bool, sent: Any, own: Any, make: Make, a: Script) -> None:
    a.offers["r"], a.params = KV, {} if own is None else {"r": own}
    engine = make(request_report=option)
    loaded(engine, a, **sent)
    found = engine.answers["r"]
    if option and sent.get("kvobs") == ASK:
        report = found.pop("kvobs")["report"]
        assert report["asked"] is True
        assert found == (own or {})
        assert [load["connector"] for load in report["loads"]] == ["one"]
    else:
        assert found == own
    if own is not None:
        assert own in ({}, {"key": 1}), "the connector's object is left alone"


def test_without_the_options_nothing_listens(make: Make) -> None:
    assert observer_of(make().rig, Reports) is None


def test_requests_that_nobody_asks_about_are_not_kept(make: Make, a: Script) -> None:
    a.offers["r"] = KV
    engine = make(request_report=True)
    engine.rig.add("r")
    engine.rig.run(2)
    assert observer_of(engine.rig, Reports) is not None
    assert not observer_of(engine.rig, Reports)
    a.say(0, received="r")
    engine.rig.run(4)


@given(json_values | st.dictionaries(st.just("kvobs"), json_values | st.dictionaries(st.just("report"), json_values)))
@example({"kvobs": {"report": {"asked": "true"}}})
@example({"kvobs": {"report": {"asked": 1}}})
def test_whatever_is_sent_asks_or_does_not(params: Any) -> None:
    own = params.get("kvobs") if isinstance(params, dict) else None
    assert asks(params) is (isinstance(own, dict) and own.get("report") is True)


def test_a_decode_engine_reports_if_its_params_bring_a_report(
    make: Make, a: Script, b: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the trace context, which it reads as without the report."""
    no_otel_variables(monkeypatch, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    b.params["prefill"] = {"remote_block_ids": [1]}
    prefill = make(request_report=True)
    prefill.rig.add("prefill", max_tokens=1, kvobs=ASK)
    prefill.rig.run(3)
    handed = prefill.answers["prefill"]
    assert handed["remote_block_ids"] == [1]
    assert handed["kvobs"].keys() == {"traceparent", "report"}
    assert of_params(handed) is not None

    a.offers["decode"] = KV
    decode = make(request_report=True)
    loaded(decode, a, "decode", **handed)
    assert decode.report("decode")["loads"][0]["outcome"] == "ok"
    assert decode.report("decode")["asked"] is True
    counts = numbers(decode.rig.connector._telemetry._recorders.page).counts
    assert not counts.keys() & {signals.slot(signals.MALFORMED_CONTEXTS, source) for source in ("headers", "params")}


# --- what it says


def test_report_of_an_async_load(make: Make, a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = [(None, False), (None, False), KV], (3 * BLOCK, True)
    b.promises.add("r")
    engine = make(request_report=True, log=True)
    engine.rig.add("r", kvobs=ASK)
    engine.rig.run(4)
    a.say(0, received="r")
    engine.rig.run(5)
    b.say(0, saved="r")
    engine.rig.step()
    report = dict(engine.report())
    (load,) = report.pop("loads")
    assert report.pop("lookup_s") > 0
    assert report.pop("offered_tokens") == {"one": 2 * BLOCK, "two": 3 * BLOCK}
    tokens = {"prompt_tokens": PROMPT, "local_tokens": 0, "seen_tokens": 0}
    assert report == {"asked": True, **tokens, "lookups": 3, "saves": ["two"]}
    assert load["waited_s"] >= load["duration_s"] > 0
    (line,) = engine.lines()
    about = {key: line.pop(key) for key in ("time", "engine", "pid", "request_id", "finish_reason")}
    assert about["time"] > 1.7e9
    assert (about["engine"], about["request_id"], about["finish_reason"]) == (0, "r", "length")
    assert {"asked": True, **line} == engine.report()
    load = dict(load)
    times = {key: load.pop(key) for key in ("duration_s", "waited_s", "saved_s")}
    assert load == {"connector": "one", "tokens": 2 * BLOCK, "mode": "async", "outcome": "ok", "prefills_seen": 0}
    assert times["saved_s"] is None, "nothing is known yet of what computing costs"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_last_steps_sync_load_is_open_in_answers_ended_in_logs(lag: int, make: Make, a: Script) -> None:
    """As on a prefill engine: vLLM ends the request before it passes on the workers' reports of that step."""
    a.offers["r"] = SYNC
    engine = make(request_report=True, log=True, lag=lag, ranks=2)
    engine.rig.add("r", max_tokens=1, kvobs=ASK)
    engine.rig.run(1 + lag)
    (load,) = engine.report()["loads"]
    assert (load["outcome"], load["duration_s"], load["mode"]) == ("open", None, "sync")
    engine.rig.run(2)
    (line,) = engine.lines()
    (load,) = line["loads"]
    assert load["outcome"] == "ok"
    assert load["waited_s"] == load["duration_s"] >= 0


@pytest.mark.parametrize(("reason", "policy"), [("error", "fail"), ("abort", "recompute")])
def test_a_load_that_fails_or_is_aborted_is_reported(reason: str, policy: str, make: Make, a: Script) -> None:
    a.offers["r"] = KV
    engine = make(request_report=True, log=True, policy=policy)
    engine.rig.add("r", kvobs=ASK)
    engine.rig.step()
    if reason == "error":
        a.bad_blocks[0] = {a.called("update_state_after_alloc")[0][2][0][1]}
    else:
        engine.rig.abort("r")
        engine.rig.step()
    a.say(0, received="r")
    engine.rig.run(3)
    (line,) = engine.lines()
    ((outcome, duration_s),) = ((load["outcome"], load["duration_s"]) for load in line["loads"])
    assert (line["finish_reason"], outcome) == (reason, "failed" if reason == "error" else "aborted")
    assert reason == "error" or duration_s is None


def test_the_log_has_a_line_for_each_finished_request(make: Make, a: Script) -> None:
    ids = [*(f"cmpl-{i}-0-0123abcd" for i in range(10)), "x" * 1000]
    engine = make(log=True)
    a.offers |= dict.fromkeys(ids, SYNC)
    for name in ids:
        engine.rig.add(name, max_tokens=1, tokens=BLOCK * 2)
        engine.rig.run(2)
    assert set(engine.answers.values()) == {None}
    assert [line["request_id"] for line in engine.lines()] == [*ids[:-1], "x" * 256]


# --- bounds and faults


def test_requests_whose_last_load_never_ends_are_logged_as_is(a: Script) -> None:
    """The ranks always report a sync load; here one never does."""
    lines: list[Any] = []
    reports = Reports(NAMES, False, lines.append)
    for name in ["0", "0", *[str(i) for i in range(1, ENDING_AT_MOST)], "more", "more"]:
        one = request(name)
        one.get_finished_reason = lambda: "length"
        reports.looked_up(one, 1, 2)
        reports.admitted(name, Load(0, 64, False, 1))
        assert reports.finished(one, None) is None
        reports.request_ended(one)
    assert len(reports) == ENDING_AT_MOST
    assert [line["request_id"] for line in lines] == ["0", "0", "more"], "an id that comes again, and the oldest"
    assert lines[0]["loads"][0]["outcome"] == "open"


def finished(reports: Reports, one: Any) -> Any:
    answer = reports.finished(one, None)
    reports.request_ended(one)
    return answer


EVENTS: dict[str, Callable[[Reports, Any, Load, int], Any]] = {
    "looked_up": lambda reports, one, load, n: reports.looked_up(one, n, n + 1),
    "allocated": lambda reports, one, load, n: reports.allocated(one, lookup((0, n), (1, 64), local=n), 0, n),
    "admitted": lambda reports, one, load, n: reports.admitted(one.request_id, load),
    "load_ended": lambda reports, one, load, n: reports.load_ended(one.request_id, load),
    "load_weighed": lambda reports, one, load, n: reports.load_weighed(one.request_id, load, Gain(n, n)),
    "aborted": lambda reports, one, load, n: reports.aborted(one.request_id, load, by_error=n > 1),
    "promised": lambda reports, one, load, n: reports.promised(one.request_id, {n % 2: Save()}, {}),
    "finished": lambda reports, one, load, n: finished(reports, one),
}


@given(
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.sampled_from("pq"), st.integers(0, 3)), max_size=60),
)
def test_in_any_order_each_request_is_logged(asyncs: list[bool], sequence: list[tuple[str, str, int]]) -> None:
    """Ids come again, and a load may belong to another request than its event says."""
    lines: list[Any] = []
    reports = Reports(NAMES, True, lines.append)
    loads = [Load(i % 2, 64, is_async, 1) for i, is_async in enumerate(asyncs)]
    for event, name, n in sequence:
        one = request(name, params={"kvobs": ASK} if n % 2 else None)
        one.get_finished_reason = lambda: "stop"
        answer = EVENTS[event](reports, one, loads[n], n)
        if event == "finished":
            assert (answer is not None) is (n % 2 == 1)
    for name in "pq":
        reports.request_ended(request(name))
        for load in loads:
            reports.load_weighed(name, load, Gain(1, 1))
    assert len(reports) == 0
    assert len(lines) == sum(event == "finished" for event, *_ in sequence)
    assert json.loads(json.dumps(lines)) == lines


def test_live_requests_are_gathered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reports, "LIVE_AT_MOST", 3)
    reports = Reports(NAMES, True)
    asking = [request(str(i), params={"kvobs": ASK}) for i in range(5)]
    for one in asking:
        reports.looked_up(one, 1, 2)
    assert len(reports) == 3
    found: Any = reports.finished(asking[4], None)
    assert found["kvobs"]["report"]["lookups"] == 0


@pytest.mark.usefixtures("in_production")
def test_a_fault_costs_the_report_and_nothing_else(make: Make, a: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    a.offers["r"], a.params["r"] = KV, {"key": 1}
    engine = make(request_report=True, log=True)
    monkeypatch.setattr(request_reports, "into_params", None)
    loaded(engine, a, kvobs=ASK)
    assert engine.answers == {"r": {"key": 1}}


def test_stderr_is_an_output_too(capfd: pytest.CaptureFixture[str], a: Script) -> None:
    rig = Rig("kvobs", a, kvobs={"request_log": "stderr"})
    rig.add("r", max_tokens=1)
    rig.run(3)
    rig.connector.shutdown()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith('{"time"')]
    assert json.loads(line)["request_id"] == "r"


def test_workers_report_nothing(a: Script) -> None:
    options = read({"connectors": [entry_for(a)], "kvobs": {"request_report": True}}).options
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="engine"), instance_id="start")
    built = recorders.build(plain(["a"]), options, config, TracingSettings.of(options, config), rank=0)
    assert (built.traces, built.loads, built.reports, built.log) == (None, None, None, None)
