"""Every child is shown one output with all receipts, saves and failures; what it changes of its own counts (N6)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from kvobs.children.child import Child
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata, MultiKVEvents
from kvobs.routing.output_view import OutputView, Over
from kvobs.routing.visibility import Visibility
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import Report, ReportKind, Stray
from kvobs.telemetry.payload.kvobs_stats import KvobsStats
from kvobs.telemetry.payload.stats import MultiKVConnectorStats, RawStats
from kvobs.telemetry.recording.recorder import Recorder
from kvobs.testing import BLOCK, Rig, Script
from tests.support.rig import assert_nothing_is_left, child_config, counted
from tests.support.scripted import Events, Stats, Tally

KV, SYNC = (2 * BLOCK, True), (2 * BLOCK, False)


class Watcher:
    """A connector that notes what it is shown, and then does something to it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.change: Callable[[Any], None] = lambda output: None

    def update_connector_output(self, connector_output: Any) -> None:
        self.seen.append({
            "received": set(connector_output.finished_recving or ()),
            "sent": set(connector_output.finished_sending or ()),
            "failed": set(connector_output.failed_recving),
            "meta": connector_output.kv_connector_worker_meta,
            "events": connector_output.kv_cache_events,
            "stats": connector_output.kv_connector_stats,
            "output": connector_output,
        })  # fmt: skip
        self.change(connector_output)


class Idle:
    """Does not look at outputs."""

    def update_connector_output(self, connector_output: Any) -> None:
        pass


class Shown:
    """Three children, of which the first loads ``own`` and the second ``other``; both have promised ``saved``."""

    def __init__(self) -> None:
        self.watchers = [Watcher(), Watcher(), Watcher()]
        recorder = Recorder(3)
        self.ledger = Ledger()
        self.visibility = [Visibility() for _ in self.watchers]
        self.stray: list[Stray] = []
        children = [Child(i, str(i), watcher, recorder) for i, watcher in enumerate(self.watchers)]
        self.view = OutputView(children, self.ledger, self.visibility, self.stray.append)
        for request, child in (("own", 0), ("other", 1)):
            self.ledger.propose(request, (child, True))
            self.ledger.admit(request, 16, 2)
        self.ledger.finish("saved", [(0, 2), (1, 2)])
        self.output = KVConnectorOutput(failed_recving=set())

    def all_in(self) -> None:
        """Let every rank report everything."""
        for rank in (0, 1):
            for kind, request, child in (
                (ReportKind.RECEIVED, "own", 0),
                (ReportKind.RECEIVED, "other", 1),
                (ReportKind.SAVED, "saved", 0),
                (ReportKind.SAVED, "saved", 1),
            ):
                self.ledger.record(Report(rank, kind, request, child, 0))

    def show(self, meta: Any = None) -> Over:
        over = self.view.show(self.output, meta, self.ledger.take_loads_in(), set(self.ledger.take_saves_in()))
        return Over(sorted(over.loads), over.saves)


def assign(**fields: Any) -> Callable[[Any], None]:
    def change(output: Any) -> None:
        for name, value in fields.items():
            setattr(output, name, value)

    return change


def raising(output: Any) -> None:
    raise OSError("no")


ALL = Over(["other", "own"], {"saved"})
NOTHING = Over([], set())


def test_all_are_shown_the_one_output_with_everything() -> None:
    """HiSparse needs its siblings' receipts, and failures."""
    shown = Shown()
    shown.all_in()
    shown.output.failed_recving = {"other"}
    assert shown.show() == ALL
    for watcher in shown.watchers:
        (seen,) = watcher.seen
        assert seen["output"] is shown.output
        assert (seen["received"], seen["sent"], seen["failed"]) == ({"own", "other"}, {"saved"}, {"other"})
    assert shown.stray == []


def test_what_a_child_adds_to_its_own_is_in_and_is_shown_to_those_after_it() -> None:
    """FlexKV reports its receipts there."""
    shown = Shown()
    shown.watchers[0].change = assign(finished_recving={"own"}, finished_sending={"saved"})
    shown.watchers[1].change = assign(finished_sending={"saved"})
    assert shown.show() == Over(["own"], {"saved"})
    assert shown.watchers[1].seen[0]["received"] == {"own"}
    assert shown.watchers[1].seen[0]["sent"] == set(), "the second promise is open"
    assert shown.watchers[2].seen[0]["sent"] == {"saved"}
    assert shown.stray == []


def test_what_a_child_wipes_of_its_siblings_stays() -> None:
    """FlexKV assigns both sets, whatever was in them; with vLLM's own router its siblings' requests hang."""
    shown = Shown()
    shown.all_in()
    shown.watchers[2].change = assign(finished_recving=None, finished_sending=None)
    assert shown.show() == ALL
    assert shown.stray == []


def test_what_a_child_wipes_in_the_middle_is_shown_to_those_after_it() -> None:
    shown = Shown()
    shown.all_in()
    shown.ledger.close_saves("saved")
    shown.ledger.take_saves_in()
    shown.watchers[0].change = assign(finished_recving={"own"})
    assert shown.show().loads == ["other", "own"]
    assert [watcher.seen[0]["received"] for watcher in shown.watchers] == [{"own", "other"}] * 3


@pytest.mark.parametrize("in_steps", [1, 3])
def test_a_child_may_keep_its_save_back_and_complete_it_later(in_steps: int) -> None:
    """MoRIIO parks acknowledgements, and reaps those that never came."""
    shown = Shown()
    shown.all_in()
    shown.watchers[0].change = assign(finished_sending=None)
    assert shown.show().saves == set()
    assert [watcher.seen[0]["sent"] for watcher in shown.watchers] == [{"saved"}, set(), set()]
    shown.watchers[0].change = lambda output: None
    for _ in range(in_steps):
        assert shown.show() == NOTHING
    shown.watchers[0].change = assign(finished_sending={"saved"})
    assert shown.show().saves == {"saved"}
    assert set(shown.ledger.close_saves("saved")) == {0, 1}


def test_a_child_may_keep_its_load_back_and_complete_it_later() -> None:
    shown = Shown()
    shown.all_in()
    shown.watchers[0].change = lambda output: output.finished_recving.discard("own")
    assert shown.show().loads == ["other"]
    shown.ledger.close_load("other")
    shown.watchers[0].change = assign(finished_recving={"own"})
    assert shown.show().loads == ["own"]


def test_a_child_is_shown_the_set_that_vllm_is_to_read_and_may_put_another_in_its_place() -> None:
    """A copy may have another order, in which blocks would be freed."""
    shown = Shown()
    shown.all_in()
    sent = set(shown.ledger.take_saves_in())
    seen: list[Any] = []
    for watcher in shown.watchers:
        watcher.change = lambda output: seen.append(output.finished_sending)
    assert shown.view.show(shown.output, None, [], sent).saves is sent
    assert all(each is sent for each in seen)
    other = set(sent)
    shown.watchers[1].change = assign(finished_sending=other)
    assert shown.view.show(shown.output, None, [], sent).saves is other
    assert seen[-1] is other


def test_what_is_not_a_childs_own_is_stray_and_has_no_effect() -> None:
    shown = Shown()
    shown.watchers[2].change = assign(finished_recving={"own", "nobody"}, finished_sending={"saved", "own"})
    assert shown.show() == NOTHING
    assert sorted(shown.stray) == sorted([
        Stray(2, "load", "own"),
        Stray(2, "load", "nobody"),
        Stray(2, "save", "saved"),
        Stray(2, "save", "own"),
    ])  # fmt: skip
    assert shown.ledger.take_received() == shown.ledger.take_sent() == set()


@pytest.mark.parametrize("is_in", [False, True])
def test_a_failure_that_a_child_adds_goes_round_by_the_workers(is_in: bool) -> None:
    """vLLM has read the failures before it shows the output; every rank reports it in the next step."""
    shown = Shown()
    if is_in:
        shown.all_in()
    shown.watchers[0].change = lambda output: output.failed_recving.add("own")
    over = shown.show()
    assert "own" not in over.loads
    assert shown.output.failed_recving == set()
    assert shown.ledger.take_failures() == ("own",)
    assert shown.watchers[1].seen[0]["failed"] == set()
    shown.ledger.echoed("own")
    shown.watchers[0].change = lambda output: None
    shown.output.failed_recving = {"own"}
    assert "own" in shown.show().loads
    load = shown.ledger.close_load("own")
    assert load is not None
    assert load.failed


@pytest.mark.parametrize("request_id", ["other", "nobody", "saved"])
def test_a_failure_of_what_is_not_a_childs_own_is_stray(request_id: str) -> None:
    shown = Shown()
    shown.watchers[0].change = lambda output: output.failed_recving.add(request_id)
    assert shown.show() == NOTHING
    assert shown.stray == [Stray(0, "failure", request_id)]
    assert shown.output.failed_recving == set()
    assert shown.ledger.take_failures() == ()


def test_a_synchronous_load_is_over_and_shown_to_nobody() -> None:
    shown = Shown()
    shown.ledger.propose("sync", (0, False))
    shown.ledger.admit("sync", 16, 1)
    shown.ledger.record(Report(0, ReportKind.SYNC_DONE, "sync", 0, 0))
    assert shown.show().loads == ["sync"]
    assert [watcher.seen[0]["received"] for watcher in shown.watchers] == [set()] * 3


def test_hidden_requests_are_not_shown_and_end_all_the_same() -> None:
    shown = Shown()
    shown.all_in()
    shown.visibility[2].hidden |= {"own", "saved"}
    assert shown.show() == ALL
    assert shown.watchers[2].seen[0]["received"] == {"other"}
    assert shown.watchers[2].seen[0]["sent"] == set()


@pytest.mark.parametrize("raises", [False, True])
def test_each_child_sees_its_own_metadata_and_events_and_the_output_gets_them_back(raises: bool) -> None:
    shown = Shown()
    meta = MultiKVConnectorWorkerMetadata(metadata=(Tally(1), None, Tally(3)))
    mine: Any = Events("x")
    events = MultiKVEvents({0: mine})
    shown.output.kv_cache_events = events
    if raises:
        shown.watchers[2].change = raising
        with pytest.raises(OSError, match="no"):
            shown.show(meta)
    else:
        shown.show(meta)
    assert [watcher.seen[0]["meta"] for watcher in shown.watchers] == [meta.metadata[0], None, meta.metadata[2]]
    assert [watcher.seen[0]["events"] for watcher in shown.watchers] == [mine, None, None]
    assert shown.output.kv_connector_worker_meta is meta
    assert shown.output.kv_cache_events is events


def stats_of(output: KVConnectorOutput) -> Any:
    """Return the children's own stats in the output, by name."""
    stats = output.kv_connector_stats
    return stats and {name: own.data for name, own in stats.data.items() if name != "kvobs"}


@pytest.mark.parametrize("raises", [False, True])
def test_each_child_sees_its_own_stats_or_none_and_the_output_gets_all_of_them_back(raises: bool) -> None:
    shown, mine, others = Shown(), Stats(data={"n": 1}), Stats(data={"n": 2})
    all_stats = MultiKVConnectorStats(data={"0": mine, "1": others, "kvobs": KvobsStats.bare({})})
    shown.output.kv_connector_stats = all_stats
    shown.watchers[2].change = raising if raises else shown.watchers[2].change
    with pytest.raises(OSError, match="no") if raises else contextlib.nullcontext():
        shown.show()
    assert [watcher.seen[0]["stats"] for watcher in shown.watchers] == [mine, others, None]
    assert shown.output.kv_connector_stats is all_stats
    assert list(all_stats.data) == ["0", "1", "kvobs"]


def test_what_a_child_changes_of_its_own_stats_counts() -> None:
    shown = Shown()
    shown.output.kv_connector_stats = MultiKVConnectorStats(data={n: Stats(data={"n": 1}) for n in ("0", "1", "2")})
    shown.watchers[0].change = lambda output: output.kv_connector_stats.data.update(n=5)
    shown.watchers[1].change = assign(kv_connector_stats=Stats(data={"n": 6}))
    shown.watchers[2].change = assign(kv_connector_stats=None)
    shown.show()
    assert stats_of(shown.output) == {"0": {"n": 5}, "1": {"n": 6}}


def test_stats_that_a_child_adds_to_an_output_without_any_can_be_rebuilt_by_their_class() -> None:
    shown = Shown()
    shown.watchers[1].change = assign(kv_connector_stats=Stats(data={"n": 6}))
    shown.show()
    assert [watcher.seen[0]["stats"] for watcher in shown.watchers] == [None] * 3
    assert stats_of(shown.output) == {"1": {"n": 6}}
    assert shown.output.kv_connector_stats is not None
    assert shown.output.kv_connector_stats.data["kvobs"].children["1"].endswith(":Watcher")
    shown.watchers[1].change = lambda output: None
    shown.output.kv_connector_stats = None
    shown.show()
    assert shown.output.kv_connector_stats is None


@pytest.mark.parametrize("raw", [{"n": 3}, RawStats(data={"n": 3})], ids=["dict", "RawStats"])
def test_raw_stats_are_shown_as_an_object_of_the_childs_class_or_not_at_all(raw: Any, a: Script, b: Script) -> None:
    """An object of another class would end a connector that insists on its own."""
    rig = Rig("kvobs", connectors=[child_config(a, "SummedConnector"), child_config(b)])
    found: dict[str, Any] = {}
    a.on_output = lambda output: found.update(a=output.kv_connector_stats)
    b.on_output = lambda output: found.update(b=output.kv_connector_stats)
    stats = MultiKVConnectorStats(data={"SummedConnector": raw, "ScriptedConnector": raw})
    rig.connector.update_connector_output(KVConnectorOutput(kv_connector_stats=stats))
    assert type(found["a"]) is Stats
    assert stats.data["SummedConnector"] is found["a"]
    assert found["a"].data == {"n": 3}
    assert found["b"] is None
    assert stats.data["ScriptedConnector"] is raw


def test_children_that_do_not_look_are_not_called() -> None:
    recorder = Recorder(1)
    stray: list[Stray] = []
    view = OutputView([Child(0, "idle", Idle(), recorder)], Ledger(), [Visibility()], stray.append)
    assert view.show(KVConnectorOutput(), None, ["r"], {"s"}) == Over(["r"], {"s"})


# --- under vLLM's scheduler


def test_a_child_that_receives_on_the_schedulers_side_completes_its_loads(a: Script, b: Script) -> None:
    """FlexKV, beside a sibling whose receipts it wipes."""
    rig = Rig("kvobs", b, a, ranks=2)
    a.offers["mine"], b.offers["theirs"] = KV, KV
    for request in ("mine", "theirs"):
        rig.add(request, max_tokens=2)
    rig.step()
    for rank in (0, 1):
        b.say(rank, received="theirs")
    a.on_output = assign(finished_recving={"mine"}, finished_sending=None)
    assert rig.step().finished_recving == {"mine", "theirs"}
    a.on_output = assign(finished_recving=None, finished_sending=None)
    rig.run(3)
    assert counted(rig, "kvobs_loads_total", 1, "async", "ok") == 1
    assert counted(rig, "kvobs_stray_reports_total", 1, "load") == 0
    assert_nothing_is_left(rig)


def test_the_promise_at_an_abort_in_mid_load_ends_with_the_load(a: Script, b: Script) -> None:
    """FlexKV promises, and then reports the load only."""
    rig = Rig("kvobs", connectors=[child_config(a, "FlexKVConnectorV1"), child_config(b)])
    a.offers["r"] = KV
    a.promises.add("r")
    rig.add("r")
    rig.step()
    rig.abort("r")
    rig.step()
    assert rig.status("r") == "FINISHED_ABORTED"
    a.on_output = assign(finished_recving={"r"}, finished_sending=None)
    rig.step()
    assert rig.status("r") == "gone"
    a.on_output = None
    assert counted(rig, "kvobs_saves_total", 0, "ok") == 1
    seen = len(b.calls)
    rig.run(3)
    later = [detail for hook, detail in b.calls[seen:] if hook == "update_connector_output"]
    assert all(shown["received"] == shown["sent"] == set() for shown in later), "it is gone"
    assert_nothing_is_left(rig)


def test_the_workers_forget_a_promise_that_ended_with_its_load(a: Script, b: Script) -> None:
    """Also where both become known to them in the same step."""
    rig = Rig("kvobs", connectors=[child_config(a, "FlexKVConnectorV1"), child_config(b)], ranks=2)
    a.finished_count = 1
    rig.connector.get_finished_count()
    a.offers["r"] = KV
    a.promises.add("r")
    rig.add("r")
    rig.step()
    a.say(0, received="r")
    rig.abort("r")
    rig.step()
    rig.run(2)
    assert rig.status("r") == "gone"
    assert_nothing_is_left(rig)


def test_a_failure_said_on_the_schedulers_side_is_recomputed(a: Script, b: Script) -> None:
    a.offers["r"] = [KV, (0, False)]
    rig = Rig("kvobs", a, b, ranks=2)
    request = rig.add("r", max_tokens=2)
    rig.step()
    a.on_output = lambda output: output.failed_recving.add("r")
    rig.step()
    a.on_output = None
    rig.step()
    assert request.num_computed_tokens == 0
    rig.run(4)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert_nothing_is_left(rig)
