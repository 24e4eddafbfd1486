"""What kvobs once did to real connectors, and vLLM's own MultiConnector does not: both must pass, or a test says why.

The connectors here break where a router does to them what vLLM would not have done.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.schema.config import ConfigError
from kvobs.testing import BLOCK, ROUTERS, Rig, Script, ScriptedConnector
from kvobs.testing.scripted import TransferResults
from tests.support.rig import assert_gone_after, assert_nothing_is_left, counted, entry_for, started
from tests.support.scripted import Stats
from tests.support.stock import wrong_in_stock

KV = (2 * BLOCK, True)
NOT_YET, MISS = (None, False), (0, False)

both = pytest.mark.parametrize("router", list(ROUTERS))


def here(script: Script, cls: str) -> dict[str, Any]:
    return entry_for(script, cls, kv_connector_module_path=__name__)


class TableConnector(ScriptedConnector):
    """Keeps block tables as LMCache MP does: appended to in each step, and dropped in the lookup only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables: dict[str, list[int]] = {}
        self.stored: list[tuple[str, int, int]] = []  # request, block of it, id of the block that is read

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.tables.pop(request.request_id, None)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        ids, table = blocks.get_block_ids()[0], self.tables.setdefault(request.request_id, [])
        table += ids[len(table) :]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request, new, before in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            computed[request] = before
            if request in cached.resumed_req_ids:
                self.tables[request] = []
            self.tables[request] += new[0] if new is not None else []
        for request, before in computed.items():
            end = before + scheduler_output.num_scheduled_tokens[request]
            self.stored += [(request, n, self.tables[request][n]) for n in range(before // BLOCK, end // BLOCK)]
        return super().build_connector_meta(scheduler_output)


@both
@pytest.mark.parametrize("is_sync", [False, True])
def test_after_a_failed_load_it_stores_the_right_blocks(router: str, is_sync: bool, a: Script, b: Script) -> None:
    """The banned connector is asked again, and drops its table there; with chunked prefill it goes on storing."""
    a.offers["r"] = [(2 * BLOCK, not is_sync), MISS]
    rig = Rig(router, connectors=[here(a, "TableConnector"), entry_for(b)])
    rig.scheduler.max_num_scheduled_tokens = 2 * BLOCK
    rig.add("other", tokens=3 * BLOCK, max_tokens=40)
    rig.run(3)
    rig.add("r", tokens=8 * BLOCK + 1, max_tokens=40)
    rig.step()
    held = rig.scheduler.kv_cache_manager.get_block_ids("r")[0]
    if is_sync:
        a.bad_blocks[0] = {held[0]}
    else:
        a.say(0, failed="r")
    (connector,) = (each for each in rig.connector._connectors if isinstance(each, TableConnector))
    rig.step()
    connector.stored.clear()
    checked = 0
    for _ in range(12):
        rig.step()
        for request, n, block in connector.stored:
            assert block == rig.scheduler.kv_cache_manager.get_block_ids(request)[0][n], (request, n)
            checked += request == "r"
        connector.stored.clear()
    assert checked >= 4


@both
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize(("is_sync", "lag"), [(False, 0), (False, 1), (True, 0)])  # (True, 1) ends vLLM's engines: W23
def test_bad_blocks_in_the_load_of_another_count(
    router: str, is_sync: bool, lag: int, policy: str, *, a: Script, b: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """UCM and Tair load what their last lookup found, whoever was chosen, and report what breaks."""
    a.offers["r"] = [(2 * BLOCK, not is_sync), MISS]

    def break_it(hook: str, detail: Any) -> None:
        if hook == "update_state_after_alloc" and not b.called(hook)[1:]:
            b.bad_blocks[0] = {detail[2][0][1]}

    b.on_call = break_it
    rig = Rig(router, a, b, policy=policy, lag=lag, kvobs={"names": ["store", "eager"]})
    request = rig.add("r", max_tokens=4)
    rig.step()
    if not is_sync:
        a.say(0, received="r")
    scheduled = []
    for _ in range(8):
        rig.step()
        scheduled.append(rig.scheduled.num_scheduled_tokens.get("r", 0))
    assert rig.status("r") == "gone"
    if policy == "fail":
        assert request.status.name == "FINISHED_ERROR"
    else:
        assert 3 * BLOCK + 1 in scheduled, "all behind the block before the bad one is computed"
    if router == "kvobs":
        assert counted(rig, "kvobs_loads_total", 0, "sync" if is_sync else "async", "failed") == 1
        assert counted(rig, "kvobs_unexpected_reports_total", 1, "blocks") == 1
        assert "connector 'eager' reported bad blocks in a load of request r" in caplog.text
        blamed = "load of connector 'store' failed: connector 'eager' reported the failure" in caplog.text
        assert blamed is is_sync
        assert_nothing_is_left(rig)


@both
@pytest.mark.parametrize("is_sync", [False, True])
def test_a_failed_load_is_repeated_after_the_request_has_run(router: str, is_sync: bool, a: Script, b: Script) -> None:
    """LMCache V1 asserts that what it offers a resumed request is taken; an asynchronous load waits, and could loop."""
    kind = (2 * BLOCK, not is_sync)
    a.offers["r"] = kind if is_sync else [kind, MISS if router == "stock" else kind, kind]
    rig = Rig(router, a, b)
    request = rig.add("r", max_tokens=40)
    if is_sync:
        a.bad_blocks[0] = {1}
        rig.step()
    else:
        rig.step()
        a.say(0, failed="r")
        rig.run(2)
    assert (request.status.name, request.num_computed_tokens < 2 * BLOCK) == ("RUNNING", is_sync)
    assert sum(tokens > 0 for _, tokens, _ in a.called("update_state_after_alloc")) == 1
    rig.run(2)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.step()
    assert a.called("update_state_after_alloc")[-1][1] == 2 * BLOCK
    assert request.num_preemptions == 1


@both
def test_the_only_worker_reports_for_all_that_a_connector_counts(router: str, a: Script) -> None:
    """As with an external launcher: vLLM has no aggregator then, and takes each report as it is."""
    a.finished_count = 2
    a.offers["r"] = KV
    a.promises.add("r")
    rig = Rig(router, a, ranks=2, external_rank=0)
    rig.aggregator = SimpleNamespace(aggregate=lambda outputs, rank: outputs[rank])
    rig.add("r")
    rig.step()
    a.say(0, received="r")
    rig.run(4)
    assert_gone_after(rig, a, 2, saved="r")


class LockingConnector(ScriptedConnector):
    """Locks in the lookup what it finds, and frees it when it is given an allocation after it has answered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.locks: set[str] = set()
        self.answered: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.locks.add(request.request_id)
        if answer[0] is not None:
            self.answered.add(request.request_id)
        return answer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self.answered:
            self.locks.discard(request.request_id)


@both
@pytest.mark.parametrize("options", [{}, {"wait_for": "earlier"}], ids=["default", "earlier"])
def test_no_lookup_is_left_locked(router: str, options: dict[str, str], a: Script, b: Script) -> None:
    a.offers["r"], b.offers["r"] = KV, [NOT_YET, NOT_YET, KV]
    connectors = [entry_for(a), here(b, "LockingConnector")]
    rig = started(router, connectors=connectors, kvobs=options, max_tokens=3, steps=3)
    assert_gone_after(rig, a, 6, received="r")
    (connector,) = (each for each in rig.connector._connectors if isinstance(each, LockingConnector))
    assert connector.answered == {"r"}
    assert connector.locks == set()


@both
def test_connectors_see_their_siblings_receipts_and_failures(router: str, a: Script, b: Script) -> None:
    """HiSparse beside NIXL imports what NIXL has received, and invalidates what has failed."""
    a.offers["in"], a.offers["out"] = [KV, MISS], [KV, MISS]
    rig = Rig(router, a, b)
    for request in ("in", "out"):
        rig.add(request)
    rig.step()
    a.say(0, received="in", failed="out")
    rig.run(2)
    shown = b.called("update_connector_output")
    assert set().union(*(each["received"] for each in shown)) == {"in", "out"}
    assert set().union(*(each["failed"] for each in shown)) == {"out"}


def assigns(**fields: Any) -> Callable[[Any], None]:
    def change(output: Any) -> None:
        for name, value in fields.items():
            setattr(output, name, value)

    return change


@both
def test_receipts_on_the_schedulers_side_complete_loads(router: str, a: Script, b: Script) -> None:
    """As FlexKV, and any router within the router."""
    a.offers["r"] = KV
    rig = started(router, a, b, ranks=2)
    a.on_output = assigns(finished_recving={"r"})
    rig.step()
    a.on_output = None
    rig.run(3)
    assert rig.status("r") == "gone"


@wrong_in_stock(AssertionError, "takes the assignment for all there is: the siblings' requests hang")
def test_receipts_that_a_sibling_wipes_arrive(router: str, a: Script, b: Script) -> None:
    a.offers["r"] = KV
    rig = started(router, a, b)
    a.say(0, received="r")
    b.on_output = assigns(finished_recving=set(), finished_sending=None)
    rig.run(4)
    assert rig.status("r") == "gone"


@both
@pytest.mark.parametrize("bad", [0, 1])
def test_context_parallel_bad_blocks_are_computed_again(router: str, bad: int, a: Script, b: Script) -> None:
    """A block id stands for the tokens of as many blocks as there are ranks: both are ranks of one request."""
    block = 2 * BLOCK
    a.offers["r"] = [(2 * block, True), MISS]
    rig = Rig(router, a, b, context_parallel=2)
    rig.add("first", tokens=2 * block + 1, max_tokens=1)
    rig.run(3)
    second = rig.add("r", tokens=4 * block + 1, max_tokens=2, prompt_of="first")
    rig.step()
    ids = a.called("update_state_after_alloc")[-1][2][0]
    assert rig.status("r") == "WAITING_FOR_REMOTE_KVS"
    a.bad_blocks[0] = {ids[2 + bad]}
    a.say(0, received="r")
    rig.step()
    assert second.num_computed_tokens == (2 + bad) * block
    if router == "kvobs":
        assert counted(rig, "kvobs_loads_total", 0, "async", "failed") == 1
        assert counted(rig, "kvobs_recomputed_tokens_total", 0) == (2 - bad) * block
    rig.run(5)
    assert rig.status("r") == "gone"


@both
@pytest.mark.parametrize("rank", [0, 1])
def test_under_an_external_launcher_saves_and_loads_end(router: str, rank: int, a: Script, b: Script) -> None:
    """Each rank has an engine of its own, which gets the reports of one worker."""
    a.offers["r"] = KV
    b.promises.add("r")
    rig = started(router, a, b, ranks=2, external_rank=rank)
    a.say(rank, received="r")
    rig.run(3)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    assert_gone_after(rig, b, 2, rank=rank, saved="r")
    if router == "kvobs":
        assert_nothing_is_left(rig)


def test_a_report_from_before_a_takeover_is_not_about_the_tail(a: Script, b: Script) -> None:
    """Its blocks would be freed while they are read. Stock does not count tails at all."""
    rig = Rig("kvobs", a, b)
    request = rig.add("r", max_tokens=5)
    rig.step()
    a.say(0, saved="r")
    rig.step()
    a.tails.add("r")
    assert rig.connector.register_finished_partial_tail(request, ([1],), [(0, 1, 2)]) is True
    rig.abort("r")
    rig.run(2)
    assert rig.status("r") == "FINISHED_ABORTED"
    assert_gone_after(rig, a, 2, saved="r")
    assert_nothing_is_left(rig)


@both
def test_output_keeps_what_a_connector_writes_for_its_reader(router: str, a: Script, b: Script) -> None:
    rig = Rig(router, a, b)
    rig.add("r")
    a.on_output = assigns(invalid_block_ids={7}, expected_finished_count=3)
    seen: list[tuple[set[int], int]] = []
    b.on_output = lambda output: seen.append((output.invalid_block_ids, output.expected_finished_count))
    output = rig.step()
    assert seen == [({7}, 3)]
    assert (output.invalid_block_ids, output.expected_finished_count) == ({7}, 3)


@both
def test_nothing_is_reset_but_what_vllm_resets(router: str, a: Script, b: Script) -> None:
    """MooncakeStore empties the master, LMCache the server: for every engine that uses it."""
    a.offers["sync"], a.offers["whole"] = [(2 * BLOCK, False), MISS], [KV, MISS]
    rig = Rig(router, a, b)
    for request in ("sync", "whole"):
        rig.add(request)
    a.bad_blocks[0] = {1, 2, 3}
    a.say(0, failed="whole")
    rig.run(8)
    assert (rig.status("sync"), rig.status("whole")) == ("gone", "gone")
    assert a.called("reset_cache") == b.called("reset_cache") == []
    rig.connector.reset_cache()
    assert len(a.called("reset_cache")) == len(b.called("reset_cache")) == 1


# --- a router within the router


def nested(path: str, *scripts: Script) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*map(entry_for, scripts)]},
    }


def test_a_nested_multi_connector_loads_and_saves(a: Script, b: Script) -> None:
    rig = Rig("kvobs", connectors=[nested(ROUTERS["stock"], a, b), entry_for(Script("outer"))], ranks=2)
    b.offers["r"] = KV
    a.promises.add("r")
    rig.add("r")
    rig.step()
    assert [tokens for _, tokens, _ in b.called("update_state_after_alloc")] == [2 * BLOCK]
    assert [tokens for _, tokens, _ in a.called("update_state_after_alloc")] == [0]
    for rank in (0, 1):
        b.say(rank, received="r")
    rig.run(3)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    for rank in (0, 1):
        a.say(rank, saved="r")
    rig.run(2)
    assert rig.status("r") == "gone"
    assert counted(rig, "kvobs_loads_total", 0, "async", "ok") == 1
    assert counted(rig, "kvobs_saves_total", 0, "ok") == 1
    assert_nothing_is_left(rig)


def test_a_nested_multi_connectors_stats_pass_through(a: Script, b: Script) -> None:
    rig = Rig("kvobs", connectors=[nested(ROUTERS["stock"], a), entry_for(b)])
    a.stats.append(Stats(data={"n": 3}))
    rig.run(2)
    assert str([payload for payload in rig.stats if "MultiConnector" in payload]).count("'n': 3") >= 1


def test_kvobs_within_kvobs_is_refused(a: Script, b: Script) -> None:
    inner = nested("kvobs", a)
    with pytest.raises(ConfigError, match=r"connectors\[0\].*nested in kvobs. Fix: move its connectors to this list"):
        Rig("kvobs", connectors=[inner, entry_for(b)])
    assert a.calls == b.calls == []


ITERABLES: list[Callable[[Iterable[str]], Any]] = [set, frozenset, list, tuple, dict.fromkeys, iter]
as_any = pytest.mark.parametrize("made", ITERABLES, ids=["set", "frozenset", "list", "tuple", "dict", "iterator"])


@both
@as_any
def test_transfer_results_may_be_any_iterables(router: str, made: Any, a: Script, b: Script) -> None:
    """vLLM's router unites and iterates them."""
    a.offers["r"], a.promises = [KV, MISS], {"saved", "r"}
    rig = Rig(router, a, b)
    rig.add("saved", max_tokens=1)
    rig.add("r", max_tokens=1)
    rig.run(3)

    def say(received: str = "", failed: str = "", saved: str = "") -> None:
        said = TransferResults()
        said.finished_recving, said.failed_recving = made((received + failed).split()), made(failed.split())
        said.finished_sending = made(saved.split())
        a.reports[0] = said

    say(failed="r", saved="saved")
    rig.run(4)
    assert rig.status("saved") == "gone"
    say(saved="r")
    rig.run(3)
    assert rig.status("r") == "gone"
    assert_all_is_free(rig)


@both
@as_any
def test_a_connector_may_put_any_iterables_into_the_output(router: str, made: Any, a: Script, b: Script) -> None:
    a.offers["r"], a.promises = KV, {"saved"}
    rig = Rig(router, a, b)

    def put(output: Any) -> None:
        output.finished_recving = made(list(output.finished_recving or ()))
        output.finished_sending = made(list(output.finished_sending or ()))

    b.on_output = put  # the last one: the others read what it leaves
    rig.add("saved", max_tokens=1)
    rig.add("r", max_tokens=1)
    rig.run(3)
    a.say(0, received="r", saved="saved")
    rig.run(4)
    assert (rig.status("r"), rig.status("saved")) == ("gone", "gone")
    assert_all_is_free(rig)


def assert_all_is_free(rig: Rig) -> None:
    rig.run(2)
    assert rig.scheduler.requests == {}
    assert rig.held_blocks == 0
