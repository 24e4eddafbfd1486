"""What has ended is closed and reported once, whether any connector looks at the output or none does.

Every connector is shown one output with all receipts, saves and failures; its changes to its own requests count (N6).
"""

import contextlib
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from vllm.v1.outputs import KVConnectorOutput

from kvobs.connectors.sub_connector import SubConnector
from kvobs.probe.recorder import Recorder
from kvobs.routing.completions import Completions, OutputView, released_set
from kvobs.routing.metadata import MultiKVConnectorWorkerMetadata, MultiKVEvents
from kvobs.routing.visibility import Visibility
from kvobs.state.ledger import Ledger
from kvobs.state.transfers import ReportKind, UnexpectedReport
from kvobs.telemetry.payload.stats import Classes, MultiKVConnectorStats, RawStats, StatsParts, class_path
from kvobs.testing import BLOCK, Rig, Script
from tests.support.reports import report
from tests.support.rig import assert_gone_after, assert_nothing_is_left, counted, entry_for, started
from tests.support.scripted import Events, Stats, Tally

Said: TypeAlias = tuple[int, int, int]  # connector, rank, request


@pytest.fixture
def idle() -> Completions:
    """Return the completions of an engine without requests, at which no connector looks."""
    rig = Rig("kvobs", connectors=[entry_for(Script(name), "UnwatchingConnector") for name in "ab"])
    completions: Completions = rig.connector._side.completions
    return completions


def test_an_output_without_news_is_not_looked_into(idle: Completions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvobs.routing.completions.checked", pytest.fail)
    output = KVConnectorOutput(finished_recving=set(), finished_sending={"vLLM's own count of another router"})
    idle.take_in(output)
    assert (output.finished_recving, output.finished_sending) == (None, None)


def test_ends_without_a_report_are_taken_in(idle: Completions) -> None:
    """As a save that was given up: it is reported with the next output."""
    ledger = idle.ledger
    ledger.finish("r", [(0, 1)], 5)
    ledger.give_up(0, 5, 10)
    assert ledger.has_ended
    output = KVConnectorOutput()
    idle.take_in(output)
    assert output.finished_sending == {"r"}
    assert not ledger.has_ended
    assert "r" not in ledger


def test_saves_that_were_done_before_their_promise_are_not_kept(idle: Completions) -> None:
    idle.early.add("r")
    idle.take_in(KVConnectorOutput())
    assert idle.early == set()


def freed(router: str, plan: Sequence[Sequence[Said]], promises: Sequence[set[int]], *, is_aggregated: bool) -> Any:
    """Return the free blocks after each step, in their order; ``promises`` are the connectors', by request."""
    a, b = Script("a"), Script("b")
    rig = Rig(router, a, b, ranks=2 if is_aggregated else 1, blocks=200)
    rig.scheduler.max_num_running_reqs = len(promises)
    if not is_aggregated:
        rig.aggregator = SimpleNamespace(aggregate=lambda outputs, rank: outputs[rank])
    for i, connectors in enumerate(promises):
        for script in (a, b):
            script.promises |= {f"r{i}"} if (script is b) in connectors else set()
        rig.add(f"r{i}", max_tokens=1, tokens=2 * BLOCK + i)
    rig.run(2)
    orders = []
    for step in plan:
        for index, rank, request in step:
            (a, b)[index].say(rank, saved=f"r{request}")
        rig.step()
        free = rig.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        orders.append([block.block_id for block in free])
    return orders


@pytest.mark.parametrize("is_aggregated", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_are_freed_in_the_order_of_vllms_own_router(is_aggregated: bool, data: st.DataObject) -> None:
    """It is that of sets that are made again and again: of a worker, by pickle, of the aggregator."""
    promises = data.draw(st.lists(st.sampled_from([{0}, {1}, {0, 1}]), min_size=2, max_size=14))
    reports = [
        (connector, rank, request)
        for request, connectors in enumerate(promises)
        for connector in connectors
        for rank in range(1 + is_aggregated)
    ]
    plan: list[list[Said]] = [[], [], []]
    for said in data.draw(st.permutations(reports)):
        plan[data.draw(st.sampled_from([0, 0, 0, 1, 2]))].append(said)
    with pytest.MonkeyPatch.context() as patch:
        if not is_aggregated:  # the worker is in the scheduler's process: nothing is pickled
            patch.setattr("kvobs.testing.rig.pickle", SimpleNamespace(dumps=lambda sent: sent, loads=lambda sent: sent))
        stock, ours = (freed(router, plan, promises, is_aggregated=is_aggregated) for router in ("stock", "kvobs"))
    assert ours == stock


requests = st.lists(st.sampled_from([f"r{i}" for i in range(30)]), unique=True)


@given(requests, requests)
def test_a_save_that_no_rank_has_reported_is_released_too(ended: list[str], reported: list[str]) -> None:
    """A connector may be given up, or has reported before its promise."""
    assert released_set(ended, [reported], is_aggregated=True) == set(ended)


# --- what connectors are shown, and change

KV = (2 * BLOCK, True)


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
            "output": connector_output
        })  # fmt: skip
        self.change(connector_output)


class Shown:
    """Three connectors, of which the first loads ``own`` and the second ``other``; both have promised ``saved``."""

    def __init__(self) -> None:
        self.watchers = [Watcher(), Watcher(), Watcher()]
        recorder = Recorder(3)
        self.ledger = Ledger()
        self.visibility = [Visibility() for _ in self.watchers]
        self.unexpected: list[UnexpectedReport] = []
        connectors = [SubConnector(i, str(i), watcher, recorder) for i, watcher in enumerate(self.watchers)]
        self.parts = StatsParts({connector.name: class_path(type(connector.wrapped)) for connector in connectors})
        self.view = OutputView(connectors, self.ledger, self.visibility, self.parts, self.unexpected.append)
        for request, connector in (("own", 0), ("other", 1)):
            self.ledger.propose(request, (connector, True))
            self.ledger.admit(request, 16, 2)
        self.ledger.finish("saved", [(0, 2), (1, 2)])
        self.output = KVConnectorOutput(failed_recving=set())

    def all_in(self) -> None:
        """Let every rank report everything."""
        for rank in (0, 1):
            for kind, request, index in (
                (ReportKind.RECEIVED, "own", 0),
                (ReportKind.RECEIVED, "other", 1),
                (ReportKind.SAVED, "saved", 0),
                (ReportKind.SAVED, "saved", 1),
            ):
                self.ledger.record(report(rank, kind, request, index))

    def show(self, meta: Any = None, read: Sequence[str] = ()) -> tuple[list[str], set[str]]:
        settled = self.ledger.settle((), read)
        over = self.view.show(self.output, meta, settled.loads, set(settled.saves))
        return sorted(over[0]), over[1]


def assign(**fields: Any) -> Callable[[Any], None]:
    def change(output: Any) -> None:
        for name, value in fields.items():
            setattr(output, name, value)

    return change


def raising(output: Any) -> None:
    raise OSError("no")


ALL = (["other", "own"], {"saved"})
NOTHING: tuple[list[str], set[str]] = ([], set())


def test_receipts_that_a_connector_adds_are_shown_to_the_next() -> None:
    """FlexKV reports its receipts there."""
    shown = Shown()
    shown.watchers[0].change = assign(finished_recving={"own"}, finished_sending={"saved"})
    shown.watchers[1].change = assign(finished_sending={"saved"})
    assert shown.show() == (["own"], {"saved"})
    assert shown.watchers[1].seen[0]["received"] == {"own"}
    assert shown.watchers[1].seen[0]["sent"] == set(), "the second promise is open"
    assert shown.watchers[2].seen[0]["sent"] == {"saved"}
    assert shown.unexpected == []


@pytest.mark.parametrize("wipes", [0, 1, 2])
def test_receipts_that_a_sibling_wipes_are_shown_to_the_next(wipes: int) -> None:
    """FlexKV assigns both sets, and its siblings' requests hang with vLLM's own router; HiSparse needs theirs."""
    shown = Shown()
    shown.all_in()
    shown.output.failed_recving = {"other"}
    own = [{"own"}, {"other"}, None][wipes]
    shown.watchers[wipes].change = assign(finished_recving=own, finished_sending={"saved"} if own else None)
    assert shown.show() == ALL
    (seen,) = {tuple(map(frozenset, itemgetter("received", "sent", "failed")(w.seen[0]))) for w in shown.watchers}
    assert [*map(set, seen)] == [{"own", "other"}, {"saved"}, {"other"}]
    assert all(watcher.seen[0]["output"] is shown.output for watcher in shown.watchers)
    assert shown.unexpected == []


@pytest.mark.parametrize("in_steps", [1, 3])
def test_a_connector_may_hold_a_save_back_and_complete_it_later(in_steps: int) -> None:
    """MoRIIO parks acknowledgements, and reaps those that never came."""
    shown = Shown()
    shown.all_in()
    shown.watchers[0].change = assign(finished_sending=None)
    assert shown.show()[1] == set()
    assert [watcher.seen[0]["sent"] for watcher in shown.watchers] == [{"saved"}, set(), set()]
    shown.watchers[0].change = lambda output: None
    for _ in range(in_steps):
        assert shown.show() == NOTHING
    shown.watchers[0].change = assign(finished_sending={"saved"})
    assert shown.show()[1] == {"saved"}
    assert [index for _, index, _ in shown.ledger.close([], ["saved"]).saves] == [0, 1]


def test_a_connector_may_hold_a_load_back_and_complete_it_later() -> None:
    shown = Shown()
    shown.all_in()
    shown.watchers[0].change = lambda output: output.finished_recving.discard("own")
    assert shown.show()[0] == ["other"]
    shown.ledger.close(["other"], [])
    shown.watchers[0].change = assign(finished_recving={"own"})
    assert shown.show()[0] == ["own"]
    shown.watchers[0].change = assign(finished_recving=None)
    assert not shown.view.show(shown.output, None, ["own"], set())[0], "nothing else is in"


def test_a_connector_sees_and_may_replace_the_set_vllm_reads() -> None:
    """A copy may have another order, in which blocks would be freed."""
    shown = Shown()
    shown.all_in()
    sent = set(shown.ledger.settle((), ()).saves)
    seen: list[Any] = []
    for watcher in shown.watchers:
        watcher.change = lambda output: seen.append(output.finished_sending)
    assert shown.view.show(shown.output, None, [], sent)[1] is sent
    assert all(each is sent for each in seen)
    other = set(sent)
    shown.watchers[1].change = assign(finished_sending=other)
    assert shown.view.show(shown.output, None, [], sent)[1] is other
    assert seen[-1] is other


def test_receipt_of_another_connectors_transfer_is_stray() -> None:
    shown = Shown()
    shown.watchers[2].change = assign(finished_recving={"own", "nobody"}, finished_sending={"saved", "own"})
    assert shown.show() == NOTHING
    assert sorted(shown.unexpected) == sorted([
        UnexpectedReport(2, "load", "own"),
        UnexpectedReport(2, "load", "nobody"),
        UnexpectedReport(2, "save", "saved"),
        UnexpectedReport(2, "save", "own")
    ])  # fmt: skip
    assert shown.ledger.settle((), ()) == ([], [], [])


@pytest.mark.parametrize(("is_in", "is_hidden"), [(False, False), (True, False), (True, True)])
def test_an_added_failure_comes_back_from_the_workers(is_in: bool, is_hidden: bool) -> None:
    """vLLM has read the failures before it shows the output; every rank reports it in the next step.

    The load of a request that has ended is hidden from its connector if another one comes with its id in the
    quarantine.
    """
    shown = Shown()
    if is_in:
        shown.all_in()
    if is_hidden:
        shown.visibility[0].hidden.add("own")
    shown.watchers[0].change = lambda output: output.failed_recving.add("own")
    over = shown.show()
    assert "own" not in over[0]
    assert shown.output.failed_recving == set()
    assert shown.ledger.take_failures() == ("own",)
    assert shown.watchers[1].seen[0]["failed"] == set()
    shown.watchers[0].change = lambda output: None
    shown.output.failed_recving = {"own"}
    assert "own" in shown.show(read=["own"])[0]
    ((_, load),) = shown.ledger.close(["own"], []).loads
    assert load.failed


@pytest.mark.parametrize("request_id", ["other", "nobody", "saved"])
def test_a_failure_of_what_is_not_a_connectors_own_is_stray(request_id: str) -> None:
    shown = Shown()
    shown.watchers[0].change = lambda output: output.failed_recving.add(request_id)
    assert shown.show() == NOTHING
    assert shown.unexpected == [UnexpectedReport(0, "failure", request_id)]
    assert shown.output.failed_recving == set()
    assert shown.ledger.take_failures() == ()


def test_a_synchronous_load_is_over_and_shown_to_nobody() -> None:
    shown = Shown()
    shown.ledger.propose("sync", (0, False))
    shown.ledger.admit("sync", 16, 1)
    shown.ledger.record(report(0, ReportKind.SYNC_DONE, "sync"))
    assert shown.show()[0] == ["sync"]
    assert [watcher.seen[0]["received"] for watcher in shown.watchers] == [set()] * 3


def test_hidden_requests_are_not_shown_and_end_all_the_same() -> None:
    shown = Shown()
    shown.all_in()
    shown.visibility[2].hidden |= {"own", "saved"}
    assert shown.show() == ALL
    assert shown.watchers[2].seen[0]["received"] == {"other"}
    assert shown.watchers[2].seen[0]["sent"] == set()


def stats_of(output: KVConnectorOutput) -> Any:
    """Return the connectors' own stats in the output, by name."""
    stats = output.kv_connector_stats
    return stats and {name: own.data for name, own in stats.data.items() if name != "kvobs"}


@pytest.mark.parametrize("raises", [False, True])
def test_each_connector_sees_its_parts_and_the_output_keeps_all(raises: bool) -> None:
    shown, mine, others = Shown(), Stats(data={"n": 1}), Stats(data={"n": 2})
    meta = MultiKVConnectorWorkerMetadata(metadata=(Tally(1), None, Tally(3)))
    of_first: Any = Events("x")
    shown.output.kv_cache_events = events = MultiKVEvents({0: of_first})
    stats = MultiKVConnectorStats(data={"0": mine, "1": others, "kvobs": Classes.of({})})
    shown.output.kv_connector_stats = stats
    shown.watchers[2].change = raising if raises else shown.watchers[2].change
    with pytest.raises(OSError, match="no") if raises else contextlib.nullcontext():
        shown.show(meta)
    seen = [watcher.seen[0] for watcher in shown.watchers]
    assert [each["meta"] for each in seen] == list(meta.metadata)
    assert [each["events"] for each in seen] == [of_first, None, None]
    assert [each["stats"] for each in seen] == [mine, others, None]
    output = shown.output
    assert (output.kv_connector_worker_meta, output.kv_cache_events, output.kv_connector_stats) == (meta, events, stats)
    assert list(stats.data) == ["0", "1", "kvobs"]


def test_stats_count_as_their_connector_changes_them() -> None:
    shown = Shown()
    shown.output.kv_connector_stats = MultiKVConnectorStats(data={n: Stats(data={"n": 1}) for n in ("0", "1", "2")})
    shown.watchers[0].change = lambda output: output.kv_connector_stats.data.update(n=5)
    shown.watchers[1].change = assign(kv_connector_stats=Stats(data={"n": 6}))
    shown.watchers[2].change = assign(kv_connector_stats=None)
    shown.show()
    assert stats_of(shown.output) == {"0": {"n": 5}, "1": {"n": 6}}
    stats: Any = shown.output.kv_connector_stats
    assert shown.parts.replaced(stats, 2, None) is stats


def test_stats_added_to_an_output_without_any_can_be_rebuilt() -> None:
    shown = Shown()
    shown.watchers[1].change = assign(kv_connector_stats=Stats(data={"n": 6}))
    shown.show()
    assert [watcher.seen[0]["stats"] for watcher in shown.watchers] == [None] * 3
    assert stats_of(shown.output) == {"1": {"n": 6}}
    assert shown.output.kv_connector_stats is not None
    assert shown.output.kv_connector_stats.data["kvobs"].data["1"].endswith(":Watcher")
    shown.watchers[1].change = lambda output: None
    shown.output.kv_connector_stats = None
    shown.show()
    assert shown.output.kv_connector_stats is None


@pytest.mark.parametrize("raw", [{"n": 3}, RawStats(data={"n": 3})], ids=["dict", "RawStats"])
def test_raw_stats_are_shown_as_the_connectors_class_if_at_all(raw: Any, a: Script, b: Script) -> None:
    """An object of another class would end a connector that insists on its own."""
    rig = Rig("kvobs", connectors=[entry_for(a, "SummedConnector"), entry_for(b)])
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


# --- under vLLM's scheduler


def test_the_promise_at_an_abort_in_mid_load_ends_with_the_load(a: Script, b: Script) -> None:
    """FlexKV promises, and then reports the load only."""
    a.offers["r"] = KV
    a.promises.add("r")
    rig = started("kvobs", connectors=[entry_for(a, "FlexKVConnectorV1"), entry_for(b)])
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


def test_an_early_save_releases_nothing_that_another_holds(a: Script, b: Script) -> None:
    a.promises.add("r")
    b.promises.add("r")
    rig = started("kvobs", a, b, max_tokens=3)
    b.say(0, saved="r")
    rig.run(4)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    assert_gone_after(rig, a, 2, saved="r")
    assert_nothing_is_left(rig)


def test_the_workers_forget_a_promise_that_ended_with_its_load(a: Script, b: Script) -> None:
    """Also where both become known to them in the same step."""
    rig = Rig("kvobs", connectors=[entry_for(a, "FlexKVConnectorV1"), entry_for(b)], ranks=2)
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
    output = rig.step()
    assert (output.finished_recving, output.failed_recving) == (None, set())
    assert b.called("update_connector_output")[-1]["failed"] == set(), "vLLM has read the failures before"
    a.on_output = None
    rig.step()
    assert request.num_computed_tokens == 0
    rig.run(4)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
    assert_nothing_is_left(rig)


def test_the_greatest_loss_of_the_ranks_counts_in_any_order(a: Script) -> None:
    a.offers["r"] = KV
    rig = started("kvobs", a, ranks=2)
    first, second = a.called("update_state_after_alloc")[0][2][0][:2]
    for rank, block in ((0, first), (1, second)):
        a.bad_blocks[rank] = {block}
        rig.step()
    for rank in (0, 1):
        a.say(rank, received="r")
    rig.run(5)
    assert counted(rig, "kvobs_recomputed_tokens_total", 0) == 2 * BLOCK
