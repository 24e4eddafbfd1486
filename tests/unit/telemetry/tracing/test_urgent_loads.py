"""Where nothing is traced, slow and failed loads and calls are written all the same, each once, and nothing else is."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.page.layout import ORDINARY, SPAN_BYTES, URGENT
from kvobs.page.span_ring import SpanReader
from kvobs.probe.recorder import CallEvent
from kvobs.schema.spans import Reason, Record
from kvobs.state.transfers import Gain, Load, LookupResult, Offer, WrongBlocks
from kvobs.telemetry.tracing.urgent_loads import UrgentLoads, untraced_request
from kvobs.testing import Script
from tests.support.contexts import TRACING, journal, no_otel_variables, request, written
from tests.support.observed import KV, SYNC, Observed
from tests.support.reports import took
from tests.support.rig import observer_of

MS = 1_000_000
REQUEST = "r-0123abcd"


class Loads:
    def __init__(self) -> None:
        self.journal = journal()
        self.observer = UrgentLoads(["disk", "cpu"], self.journal, TRACING)

    def written(self) -> list[Record]:
        return written(self.journal)


def load(ms: int = 0, *, failed: bool = False, aborted: bool = False) -> Load:
    return Load(1, 64, True, 2, 100, arrived_ns=100 + ms * MS, failed_on={1} if failed else set(), aborted=aborted)


def said(record: Record) -> dict[str, Any]:
    return {key.removeprefix("kv_transfer."): value for key, value in record.attributes.items()}


@pytest.mark.parametrize(("slow", "failed", "aborted"), list(product([False, True], repeat=3)))
def test_a_load_is_written_once_if_it_was_slow_or_has_failed(slow: bool, failed: bool, aborted: bool) -> None:
    loads = Loads()
    ended = load(1001 if slow else 999, failed=failed, aborted=aborted)
    loads.observer.load_ended(REQUEST, ended)
    if not aborted:
        assert loads.written() == [], "its gain is not known yet"
        loads.observer.load_weighed(REQUEST, ended, Gain(2 * MS, 3 * MS))
    records = loads.written()
    loads.observer.request_ended(request(REQUEST))
    assert loads.written() == []
    assert len(loads.observer) == 0
    assert [record.reason for record in records] == [Reason.ERROR if failed else Reason.SLOW] * (slow or failed)
    for record in records:
        assert (record.name, record.parent_id) == ("kv.load", "")
        assert said(record)["outcome"] == ended.outcome
        assert said(record).get("saved") == (None if aborted else 0.002)


def test_a_slow_load_whose_request_ends_first_is_written_then() -> None:
    loads = Loads()
    loads.observer.load_ended(REQUEST, load(2000))
    loads.observer.load_ended("quick", load(1))
    assert len(loads.observer) == 1
    for request_id in (REQUEST, "quick", "another"):
        loads.observer.request_ended(request(request_id))
    (record,) = loads.written()
    assert (record.reason, said(record)["request.id"]) == (Reason.SLOW, REQUEST)
    assert "waited" not in said(record)
    assert len(loads.observer) == 0


def test_its_ranks_are_below_it_in_a_trace_of_its_own() -> None:
    loads = Loads()
    for request_id in ("r", "q"):
        slow = Load(0, 64, False, 1, 100, arrived=took(3 * MS, 400 * MS))
        loads.observer.load_ended(request_id, slow)
        loads.observer.load_weighed(request_id, slow, Gain(None, 0))
    head, *ranks, other, _, _ = loads.written()
    assert [record.name for record in (head, *ranks)] == ["kv.load", "kv.load.rank", "kv.load.rank"]
    assert {(record.trace_id, record.parent_id) for record in ranks} == {(head.trace_id, head.span_id)}
    assert head.trace_id != other.trace_id


def test_it_has_the_offers_and_the_age_of_its_request() -> None:
    """Of the lookup before it; vLLM allocates a second time after the load, without one."""
    loads = Loads()
    asked = request(REQUEST)
    asked.arrival_time, asked.num_prompt_tokens = 5.0, 200
    asked.kv_transfer_params = {"do_remote_prefill": True, "remote_host": "gpu-1"}
    slow = Load(1, 64, True, 1, 7 * 10**9, arrived_ns=9 * 10**9)
    loads.observer.allocated(asked, LookupResult([Offer(0, 32, True), Offer(1, 64, True)], 16), 1, 64)
    loads.observer.allocated(request("miss"), LookupResult(), None, 0)
    loads.observer.allocated(asked, LookupResult(), None, 0)
    assert len(loads.observer) == 1
    loads.observer.load_ended(REQUEST, slow)
    loads.observer.load_weighed(REQUEST, slow, Gain(None, 0))
    (record,) = loads.written()
    assert said(record)["queued"] == 2
    assert (said(record)["offered_tokens.disk"], said(record)["offered_tokens.cpu"]) == (32, 64)
    assert (said(record)["local_tokens"], said(record)["prompt_tokens"]) == (16, 200)
    assert said(record)["remote.host"] == "gpu-1"
    assert len(loads.observer) == 0


def test_wrong_bytes_are_an_error() -> None:
    loads = Loads()
    loads.observer.noted([WrongBlocks(0, REQUEST, 3, 1), object()])
    (record,) = loads.written()
    assert (record.name, record.reason, said(record)["connector"]) == ("kv.load.wrong", Reason.ERROR, "cpu")


@pytest.mark.parametrize("subject", [SimpleNamespace(request_id=REQUEST), SimpleNamespace(request_id=7), None, "r"])
def test_a_call_about_a_request_names_it_if_it_can_be_seen(subject: Any) -> None:
    context, labels = untraced_request(CallEvent(0, "request_finished", 1, 1, True, subject=subject))
    assert (context.span_id, context.is_sampled) == ("", False)
    named = {"kv_transfer.request.id": REQUEST, "gen_ai.request.id": "r"}
    assert labels == (named if getattr(subject, "request_id", None) == REQUEST else {})


# --- in the product


def rings(engine: Observed) -> tuple[list[Record], list[Record]]:
    """Return what is in the urgent and in the ordinary rings of all processes."""
    found: dict[int, list[Record]] = {}
    for router in (engine.rig.connector, *engine.rig.workers):
        page = router._telemetry._recorders.page
        for ring in (URGENT, ORDINARY):
            reader = SpanReader(page.words, page.layout.spans(ring), SPAN_BYTES[ring])
            found.setdefault(ring, []).extend(one for group in reader.read() for one in group)
    return found[URGENT], found[ORDINARY]


def live(engine: Observed, a: Script, b: Script) -> None:
    """Load well, slowly, badly and in vain; save; compute; and let one call of a worker fail."""
    for name, steps in (("good", 1), ("slow", 7), ("bad", 1)):
        a.offers[name] = KV
        engine.rig.add(name, max_tokens=1)
        engine.step(steps)
        a.say(0, received=name)
        a.say(1, **{"failed" if name == "bad" else "received": name})
        engine.step(4)
    a.offers["vain"] = KV
    engine.rig.add("vain", max_tokens=1)
    engine.step(7)
    a.say(0, received="vain")
    a.say(1, received="vain")
    engine.step()
    engine.rig.abort("vain")
    b.promises.add("saved")
    engine.rig.add("saved", max_tokens=1)
    engine.step(2)
    b.say(0, saved="saved")
    b.say(1, saved="saved")
    engine.step(2)
    a.offers["within"] = SYNC
    engine.rig.add("within", max_tokens=1)
    engine.step(2)


@pytest.mark.parametrize("level", [None, "off", "calls"])
def test_only_slow_and_failed_ones_are_urgent_without_tracing(
    level: Any, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    no_otel_variables(monkeypatch)
    # In steps of 200 ms two loads take more than a second; a call is slow after a minute, so none is.
    engine = Observed(monkeypatch, a, b, tracing={"level": level}, slow_load_ms=1000, slow_call_ms=60_000)
    live(engine, a, b)
    urgent, ordinary = rings(engine)
    loads = {said(record)["request.id"]: record.reason for record in urgent if record.name == "kv.load"}
    assert loads == {"slow": Reason.SLOW, "bad": Reason.ERROR, "vain": Reason.SLOW}
    assert {record.name for record in urgent} == {"kv.load", "kv.load.rank"}
    assert all("queued" in said(record) for record in urgent if record.name == "kv.load")
    assert ordinary == []
    assert len(observer_of(engine.rig, UrgentLoads) or ()) == 0
    assert engine.value("kvobs_spans_dropped_total", None, where="rate") == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_tracing_both_sides_failed_calls_are_urgent(
    ranks: int, monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    no_otel_variables(monkeypatch)
    engine = Observed(monkeypatch, a, b, ranks=ranks, slow_call_ms=60_000)
    engine.rig.add("r")
    for hook in ("get_num_new_matched_tokens", "wait_for_save"):
        b.raises[hook] = OSError("no disk")
        with pytest.raises(OSError, match="no disk"):
            engine.step()
        b.raises.clear()
    urgent, ordinary = rings(engine)
    found = [(record.reason, said(record)["hook"], said(record).get("rank")) for record in urgent]
    assert found == [(Reason.ERROR, "get_num_new_matched_tokens", None), (Reason.ERROR, "wait_for_save", 0)]
    assert said(urgent[0])["request.id"] == "r"
    assert ordinary == []


def test_without_tracing_slow_calls_are_urgent_as_counted(
    monkeypatch: pytest.MonkeyPatch, a: Script, b: Script
) -> None:
    no_otel_variables(monkeypatch)
    engine = Observed(monkeypatch, a, b, ranks=1, slow_call_ms=1e-6)
    engine.rig.add("r", max_tokens=1)
    engine.step(2)
    urgent, ordinary = rings(engine)
    slow = sum(engine.series("kvobs_slow_calls_total").values())
    dropped = engine.value("kvobs_spans_dropped_total", None, where="rate")
    assert len(urgent) + dropped == slow > 0
    assert {record.name for record in urgent} == {"kv.call"}
    assert ordinary == []


def test_without_tracing_a_step_costs_nothing_more(monkeypatch: pytest.MonkeyPatch, a: Script, b: Script) -> None:
    """No message to the workers, no lookup timed, no connector's call noticed."""
    no_otel_variables(monkeypatch)
    engine = Observed(monkeypatch, a, b)
    engine.rig.add("r", max_tokens=3)
    engine.step()
    for router in (engine.rig.connector, *engine.rig.workers):
        recorders = router._telemetry._recorders
        assert recorders.traces is None
        assert not recorders.recorder.traces_all
        tracer = recorders.tracer
        monkeypatch.setattr(tracer, "note", None)
        monkeypatch.setattr(tracer, "begin_step", None)
        monkeypatch.setattr(tracer, "join_step", None)
    engine.step(2)
    metadata = engine.rig.scheduled.kv_connector_metadata
    assert metadata.note is None
    assert not engine.rig.connector._side.observer.wants_lookups
