"""A best-effort connector fails, and only the operator notices it: vLLM's real scheduler, two ranks, two connectors.

By the rules N2 to N4 and N7 to N9 of the design: what it knew goes on being reported to it, what arrives while it is
out does not exist for it, and nothing is called, reset or saved that vLLM did not ask for.
"""

from collections.abc import Iterator

import pytest

from kvobs.routing import isolation
from kvobs.routing.isolation import GIVE_UP_NS
from kvobs.testing import BLOCK, Script
from tests.support.best_effort import FAILURE, KV, OF_SCHEDULER, OF_WORKER, Isolating, S, named
from tests.support.rig import assert_nothing_is_left, counted, entry_for
from tests.support.runners import Overlapping, Running


@pytest.mark.parametrize("hook", [*OF_SCHEDULER, *OF_WORKER])
def test_a_failure_in_any_hook_keeps_a_connector_out(engine: Isolating, a: Script, b: Script, hook: str) -> None:
    """The connector has a load under way; a sibling goes on; after the quarantine it loads again."""
    engine.rig.add("before", max_tokens=2)
    engine.run_to_end("before")
    a.offers["load"] = KV
    a.raises[hook] = FAILURE
    for request in ("load", "plain"):
        engine.rig.add(request, max_tokens=3)
    engine.step(2)
    engine.say(a, received="load")
    # Nobody asks it, without metadata; or it never answers.
    is_given_up = hook in ("get_transfer_results", "build_connector_meta")
    if is_given_up:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("load", "plain")
    engine.step()
    assert engine.is_out
    epoch = engine.epoch
    assert epoch == (2 if is_given_up else 1), "it was tried again meanwhile"
    assert engine.rig.connector._side.targets.isolation.states() == {0: (epoch, True)}

    a.raises.clear()
    a.offers["again"] = KV
    engine.rig.add("out", max_tokens=1)
    engine.run_to_end("out")
    assert len(b.called("request_finished")) == 4
    engine.step(seconds=epoch + 0.1)
    assert not engine.is_out, "the quarantine is over"
    engine.rig.add("again", max_tokens=1)
    engine.step(2)
    assert engine.rig.status("again") == "WAITING_FOR_REMOTE_KVS"
    engine.say(a, received="again")
    engine.run_to_end("again")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") >= 1
    engine.step(3, seconds=1)
    assert engine.epoch == epoch
    assert named(a, "out") == [], "a request that arrives while a connector is out does not exist for it"
    assert a.called("reset_cache") == []
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("ranks", [{0}, {1}, {0, 1}])
def test_a_load_that_did_not_begin_on_a_rank_is_recomputed(engine: Isolating, a: Script, ranks: set[int]) -> None:
    """What begins on the other rank is waited for."""
    a.offers["r"] = KV
    a.raises, a.raises_on = {"bind_connector_metadata": FAILURE}, ranks
    engine.rig.add("r", max_tokens=1)
    engine.step(3)
    if len(ranks) == 1:
        assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
        a.say(1 - min(ranks), received="r")
    engine.run_to_end("r")
    assert engine.epoch == 1
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_recomputed_tokens_total", 0) == 2 * BLOCK
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("ranks", [{0}, {0, 1}])
@pytest.mark.parametrize("is_reported", [True, False])
def test_a_load_that_may_have_begun_failed(engine: Isolating, a: Script, ranks: set[int], is_reported: bool) -> None:
    """``start_load_kv`` raised half-way: something may be writing into these blocks."""
    a.offers["r"] = KV
    a.raises, a.raises_on = {"start_load_kv": FAILURE}, ranks
    engine.rig.add("r", max_tokens=1)
    engine.step(4)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    for rank in (0, 1) if is_reported else ():
        a.say(rank, received="r")
    if not is_reported:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_recomputed_tokens_total", 0) == 2 * BLOCK
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("comes_late", [True, False])
def test_the_order_of_a_load_may_come_with_a_later_steps(engine: Isolating, a: Script, comes_late: bool) -> None:
    """Connectors keep their orders when they raise: had it failed at once, it would write into another's blocks."""
    a.offers["r"] = KV
    a.raises["build_connector_meta"] = FAILURE
    engine.rig.add("r", max_tokens=1)
    engine.step(3)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    if comes_late:
        a.raises.clear()
        engine.step()
        engine.say(a, received="r")
    else:
        engine.step(seconds=GIVE_UP_NS / S)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok" if comes_late else "failed") == 1
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("hook", ["handle_preemptions", "get_num_new_matched_tokens"])
def test_transfers_under_way_at_a_failure_may_still_arrive(engine: Isolating, a: Script, hook: str) -> None:
    """Also a load that begins in the step of the failure."""
    a.offers["r"] = KV
    a.promises.add("saved")
    engine.rig.add("saved", max_tokens=1)
    engine.step(3)
    engine.rig.add("r", max_tokens=1)
    engine.step(hook != "handle_preemptions")
    a.raises[hook] = FAILURE
    engine.rig.add("other", max_tokens=1)
    engine.run_to_end("other")
    assert engine.is_out
    engine.say(a, received="r", saved="saved")
    engine.run_to_end("r", "saved")
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == 1
    assert_nothing_is_left(engine.rig)


def test_quarantined_connector_is_asked_for_results(
    engine: Isolating, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """Some take results only while they have a step's metadata: those would fail in every step that they are out."""
    a.raises["update_state_after_alloc"] = FAILURE
    a.offers["r"] = KV
    engine.rig.add("r", max_tokens=8)
    engine.step(2)
    engine.say(a, received="r")
    engine.run_to_end("r")
    assert engine.is_out
    assert "failed in get_transfer_results" not in caplog.text
    a.raises["bind_connector_metadata"] = FAILURE
    engine.rig.add("other", max_tokens=2)
    engine.run_to_end("other")
    engine.step(3, seconds=2)
    assert_nothing_is_left(engine.rig)


def test_transfer_that_never_arrives_is_given_up(
    engine: Isolating, a: Script, caplog: pytest.LogCaptureFixture
) -> None:
    a.offers["r"] = KV
    a.promises.add("saved")
    engine.rig.add("r", max_tokens=1)
    engine.rig.add("saved", max_tokens=1)
    engine.step(3)
    a.raises["get_transfer_results"] = FAILURE
    engine.step(2)
    assert engine.is_out
    engine.step(seconds=GIVE_UP_NS / S - 0.1)
    assert engine.rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    engine.step(seconds=0.1)
    engine.run_to_end("r", "saved")
    assert "has not reported 1 loads and 1 saves 10 s after it failed" in caplog.text
    assert counted(engine.rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 1
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == 0
    assert_nothing_is_left(engine.rig)


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_promise_made_while_out_is_held_or_given_up(engine: Isolating, a: Script, is_reported: bool) -> None:
    a.raises["start_load_kv"] = FAILURE
    a.promises.add("r")
    engine.rig.add("r", max_tokens=2)
    engine.step(3)
    assert engine.is_out
    assert engine.rig.status("r") == "FINISHED_LENGTH_CAPPED"
    if is_reported:
        engine.say(a, saved="r")
    else:
        a.raises.clear()
        engine.step(2, seconds=GIVE_UP_NS / S + 1)
    engine.run_to_end("r")
    engine.step()
    assert counted(engine.rig, "kvobs_saves_total", 0, "ok") == int(is_reported)
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == int(not is_reported)
    assert_nothing_is_left(engine.rig)


def test_a_promise_made_in_a_quarantine_without_end_is_given_up(engine: Isolating, a: Script) -> None:
    """No probation follows, at whose begin the open saves would be noted."""
    a.promises.add("r")
    engine.rig.add("r", max_tokens=2)
    engine.step()
    a.raises["set_xfer_handshake_metadata"] = FAILURE
    engine.rig.connector.set_xfer_handshake_metadata({})
    engine.step(2)
    assert engine.rig.status("r") == "FINISHED_LENGTH_CAPPED"
    engine.step(2, seconds=GIVE_UP_NS / S)
    engine.run_to_end("r")
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 1
    assert_nothing_is_left(engine.rig)


def test_open_transfers_are_given_up_at_each_of_several_failures(engine: Isolating, a: Script) -> None:
    for request in ("first", "second"):
        a.promises.add(request)
        engine.rig.add(request, max_tokens=1)
        engine.step(3)
        a.raises["take_events"] = FAILURE
        engine.step()
        a.raises.clear()
        engine.step(4, seconds=1.5)  # out, and on probation
    assert engine.epoch == 2
    engine.step(seconds=GIVE_UP_NS / S - 12 + 4)
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 1
    engine.step(2, seconds=4)
    engine.run_to_end("first", "second")
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 2
    assert_nothing_is_left(engine.rig)


def test_recovered_connectors_promises_are_not_given_up(engine: Isolating, a: Script) -> None:
    a.raises["take_events"] = FAILURE
    engine.step()
    a.raises.clear()
    engine.step(4, seconds=1.5)  # out, and on probation
    engine.step(seconds=GIVE_UP_NS / S - 2)
    a.promises.add("after")
    engine.rig.add("after", max_tokens=1)
    engine.step(4, seconds=GIVE_UP_NS / S)
    assert engine.rig.status("after") == "FINISHED_LENGTH_CAPPED"
    assert counted(engine.rig, "kvobs_saves_total", 0, "abandoned") == 0
    engine.say(a, saved="after")
    engine.run_to_end("after")
    assert_nothing_is_left(engine.rig)


def test_events_that_fail_while_they_are_read_are_contained(engine: Isolating, a: Script) -> None:
    """Those of OffloadingConnector, LMCache and MooncakeStore are a generator."""

    def events() -> Iterator[str]:
        yield "one"
        raise FAILURE

    a.answers["take_events"] = events()
    assert list(engine.rig.connector.take_events()) == []
    assert engine.is_out


def test_saves_given_up_by_an_idle_engine_are_released(a: Script, b: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker in its process vLLM drops an output in which nothing is, and reads none."""
    monkeypatch.setattr(isolation, "GIVE_UP_NS", 1)
    connectors = [entry_for(a, "BestEffortConnector"), entry_for(b)]
    options = {"names": ["best", "other"], "best_effort": ["best"]}
    rig = Overlapping("kvobs", connectors=connectors, kvobs=options, running=Running(is_uni=True))
    a.promises = {"r"}
    rig.add("r")
    rig.run(6)
    assert rig.status("r").startswith("FINISHED")
    a.raises["build_connector_meta"] = FAILURE
    rig.run(3)
    assert rig.status("r") == "gone"
    assert not rig.is_busy
