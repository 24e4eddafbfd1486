"""The steered child's own logic, without a server: how orders are read, and what each side makes of them."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tests.engine.children import CountingChild, SteeredChild, SteeredMetadata, calls_counted
from tests.engine.serving import eventually
from tests.engine.steering import Agenda, Due, Plan, SteeringError, at_rank, block_keys, parse, plan_for

BLOCK = 4
BLOCKS = 10
PROMPT = list(range(14))  # three full blocks and two tokens


class TestOrders:
    def test_every_key_has_its_default(self) -> None:
        assert parse({}) == Plan()
        assert parse({"async": True, "offer": "stored"}) == Plan(is_async=True, offer="stored")

    @pytest.mark.parametrize(
        ("orders", "message"),
        [
            ({"ofer": 3}, r"unknown steering keys \['ofer'\]; allowed: .*'offer'"),
            ({"is_async": True}, r"unknown steering keys \['is_async'\]"),
            ({"fail": "hard"}, r"fail is 'hard'; allowed: \(None, 'recv', 'blocks'\)"),
            ({"stray": "recv"}, r"stray is 'recv'; allowed: .*'failure'"),
            ({"offer": "all"}, r"offer is 'all'; allowed: a number of tokens, or \"stored\""),
        ],
    )
    def test_a_mistake_is_named_with_what_is_allowed(self, orders: dict[str, Any], message: str) -> None:
        with pytest.raises(SteeringError, match=message):
            parse(orders)

    def test_a_request_overrides_the_childs_own_orders_and_only_its_own(self) -> None:
        params = {"steer": {"a": {"offer": 8}, "b": {"promise": True}}}
        assert plan_for("a", {"offer": 4, "async": True}, params) == Plan(offer=8, is_async=True)
        assert plan_for("c", {"offer": 4}, params) == plan_for("c", {"offer": 4}, None) == Plan(offer=4)

    def test_a_delay_holds_for_all_ranks_or_for_those_it_names(self) -> None:
        assert at_rank(250, 3) == 0.25
        assert at_rank({"0": 5}, 0) == 0.005
        assert at_rank({"0": 5}, 1) is None

    def test_a_block_key_stands_for_all_tokens_before_it(self) -> None:
        keys = block_keys(PROMPT, BLOCK)
        assert len(keys) == len(set(keys)) == 3
        assert block_keys(PROMPT[:9], BLOCK) == keys[:2]
        assert not set(block_keys([99, *PROMPT[1:]], BLOCK)) & set(keys)

    def test_reports_come_when_due_earliest_first_and_once(self) -> None:
        agenda = Agenda()
        agenda.add(2.0, Due("load", "late"))
        agenda.add(1.0, Due("save", "early"))
        agenda.add(9.0, Due("load", "later"))
        assert agenda.take(0.5) == []
        assert [due.request for due in agenda.take(2.0)] == ["early", "late"]
        assert agenda.take(2.0) == []


def child(role: KVConnectorRole, rank: int = 0, **options: Any) -> SteeredChild:
    transfer = SimpleNamespace(get_from_extra_config=options.get)
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=BLOCK),
        parallel_config=SimpleNamespace(rank=rank),
    )
    return SteeredChild(config, role, SimpleNamespace(num_blocks=BLOCKS))


def scheduler(**options: Any) -> SteeredChild:
    return child(KVConnectorRole.SCHEDULER, **options)


def worker(rank: int = 0) -> tuple[SteeredChild, torch.Tensor]:
    """Return a worker's child and the one cache it knows: every block holds its own number."""
    made = child(KVConnectorRole.WORKER, rank)
    cache = torch.arange(float(BLOCKS)).repeat(2, 1).T.clone()
    made.register_kv_caches({"layer.0": cache})
    return made, cache


def request(name: str = "r", prompt: list[int] = PROMPT, **orders: Any) -> Any:
    params = {"steer": {"steered": orders}}
    return SimpleNamespace(request_id=name, kv_transfer_params=params, prompt_token_ids=prompt, num_tokens=len(prompt))


def admit(on: SteeredChild, of: Any, block_ids: list[int], tokens: int) -> None:
    on.update_state_after_alloc(of, SimpleNamespace(get_block_ids=lambda: (block_ids,)), tokens)


def scheduled(of: Any = None, block_ids: list[int] | None = None, computed: int = 0, tokens: int = 0) -> Any:
    """Return what the scheduler decided: nothing, or one new request with these blocks."""
    new = SimpleNamespace(req_id=of and of.request_id, block_ids=(block_ids,), num_computed_tokens=computed)
    none = SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=[new] if of else [],
        scheduled_cached_reqs=none,
        num_scheduled_tokens={of.request_id: tokens} if of else {},
    )


def step(on: SteeredChild, meta: SteeredMetadata) -> Any:
    """Run one step of a worker; return what it reports."""
    on.bind_connector_metadata(meta)
    on.start_load_kv(None)
    on.wait_for_save()
    results = on.get_transfer_results(set())
    bad = on.get_block_ids_with_load_errors()
    on.clear_connector_metadata()
    return results.finished_sending, results.finished_recving, results.failed_recving, bad


def saved(on: SteeredChild) -> SteeredMetadata:
    """Let a request run through its prompt in blocks 1 to 4; return the metadata that saves them."""
    first = request("first")
    admit(on, first, [1, 2, 3, 4], 0)
    meta = on.build_connector_meta(scheduled(first, [1, 2, 3, 4], tokens=len(PROMPT)))
    on.request_finished(first, [1, 2, 3, 4])
    return meta


class TestLookup:
    def test_nothing_is_offered_without_orders(self) -> None:
        assert scheduler().get_num_new_matched_tokens(request(), 0) == (0, False)

    def test_a_number_is_offered_and_one_token_at_least_left_to_compute(self) -> None:
        on = scheduler()
        assert on.get_num_new_matched_tokens(request("a", offer=8), 0) == (8, False)
        assert on.get_num_new_matched_tokens(request("b", offer=99), 4) == (8, False)
        assert on.get_num_new_matched_tokens(request("c", prompt=PROMPT[:8], offer=8), 0) == (4, False)

    def test_stored_is_what_was_saved_of_the_prompt_until_the_cache_is_reset(self) -> None:
        on = scheduler(plan={"offer": "stored", "async": True})
        assert on.get_num_new_matched_tokens(request("a"), 0) == (0, False)
        saved(on)
        assert on.get_num_new_matched_tokens(request("b"), 4) == (8, True)
        assert on.get_num_new_matched_tokens(request("c", prompt=[*PROMPT[:5], 99, 99, 99, 99]), 0) == (4, True)
        assert on.reset_cache() is True
        assert on.get_num_new_matched_tokens(request("d"), 0) == (0, False)

    def test_not_yet_is_answered_as_often_as_ordered(self) -> None:
        on, asked = scheduler(), request(offer=4, not_yet=2)
        answers = [on.get_num_new_matched_tokens(asked, 0)[0] for _ in range(3)]
        assert answers == [None, None, 4]

    def test_not_yet_is_answered_as_long_as_ordered(self) -> None:
        on, asked = scheduler(), request(offer=4, not_yet_ms=40)
        assert on.get_num_new_matched_tokens(asked, 0)[0] is None
        time.sleep(0.05)
        assert on.get_num_new_matched_tokens(asked, 0)[0] == 4

    def test_a_request_is_offered_one_load_unless_ordered_otherwise(self) -> None:
        on = scheduler()
        for asked, after in ((request("a", offer=4), 0), (request("b", offer=4, offers=2), 4)):
            on.get_num_new_matched_tokens(asked, 0)
            admit(on, asked, [1], 4)
            assert on.get_num_new_matched_tokens(asked, 0)[0] == after


class TestLoad:
    def order(self, **orders: Any) -> tuple[SteeredMetadata, SteeredMetadata]:
        """Return metadata that saves a prompt, and metadata that loads it into blocks 5 to 7."""
        on, asked = scheduler(), request(offer="stored", **orders)
        save = saved(on)
        tokens, _ = on.get_num_new_matched_tokens(asked, 0)
        assert tokens
        admit(on, asked, [5, 6, 7, 8], tokens)
        return save, on.build_connector_meta(scheduled())

    def test_it_restores_what_was_saved_and_touches_nothing_else(self) -> None:
        save, load = self.order()
        on, cache = worker()
        step(on, save)
        cache[1:4] = -1
        assert step(on, load) == (set(), set(), set(), set())
        assert cache[:, 0].tolist() == [0, -1, -1, -1, 4, 1, 2, 3, 8, 9]

    def test_an_async_one_is_reported_once_after_its_delay_on_the_ranks_named(self) -> None:
        _, load = self.order(**{"async": True, "load_ms": {"1": 30}})
        reports = {}
        for rank in (0, 1):
            on, _ = worker(rank)
            assert step(on, load)[1] == set()
            time.sleep(0.04)
            reports[rank] = [step(on, SteeredMetadata())[1] for _ in range(2)]
        assert reports == {0: [set(), set()], 1: [{"r"}, set()]}

    @pytest.mark.parametrize(
        ("orders", "reported"),
        [
            ({"async": True, "fail": "recv"}, (set(), {"r"}, {"r"}, set())),
            ({"async": True, "fail": "blocks"}, (set(), {"r"}, set(), {5, 6, 7})),
            ({"fail": "blocks"}, (set(), set(), set(), {5, 6, 7})),
            ({"async": True, "fail": "recv", "fail_ranks": [1]}, (set(), {"r"}, set(), set())),
        ],
    )
    def test_a_failure_is_reported_in_the_form_ordered(self, orders: dict[str, Any], reported: Any) -> None:
        save, load = self.order(**orders)
        on, cache = worker()
        step(on, save)
        assert step(on, load) == reported
        loaded = cache[5:8, 0].tolist()
        assert loaded == ([1, 2, 3] if "fail_ranks" in orders else [5, 6, 7])


class TestTheRest:
    def test_a_promise_is_kept_with_its_params(self) -> None:
        on, ends = scheduler(), request(promise=True, params={"hello": 1})
        assert on.request_finished(ends, []) == (True, {"hello": 1})
        noted, _ = worker()
        assert step(noted, on.build_connector_meta(scheduled()))[0] == {"r"}
        assert on.build_connector_meta(scheduled()).promises == []

    def test_a_promise_without_a_report_is_one_that_no_rank_reports(self) -> None:
        on = scheduler()
        on.request_finished(request(promise=True, save_ms={}), [])
        noted, _ = worker()
        assert step(noted, on.build_connector_meta(scheduled()))[0] == set()

    @pytest.mark.parametrize(
        ("kind", "reported"),
        [
            ("load", (set(), {"r"}, set(), set())),
            ("save", ({"r"}, set(), set(), set())),
            ("failure", (set(), {"r"}, {"r"}, set())),
        ],
    )
    def test_a_stray_report_is_made_once_for_a_request_that_loads_nothing_here(self, kind: str, reported: Any) -> None:
        on, other = scheduler(), request(stray=kind)
        noted, _ = worker()
        nothing: Any = (set(), set(), set(), set())
        for expected in (reported, nothing):
            admit(on, other, [1], 0)
            assert step(noted, on.build_connector_meta(scheduled())) == expected

    @pytest.mark.parametrize("hook", ["get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"])
    def test_a_scheduler_hook_raises_for_the_request_that_orders_it(self, hook: str) -> None:
        on = scheduler()
        calls: dict[str, Any] = {
            "get_num_new_matched_tokens": lambda r: on.get_num_new_matched_tokens(r, 0),
            "update_state_after_alloc": lambda r: admit(on, r, [1], 0),
            "request_finished": lambda r: on.request_finished(r, []),
        }
        calls[hook](request("quiet"))
        with pytest.raises(RuntimeError, match=f"steered to raise in {hook}"):
            calls[hook](request("loud", raise_in=hook))

    @pytest.mark.parametrize("hook", ["start_load_kv", "wait_for_save", "get_transfer_results"])
    def test_a_worker_hook_raises_in_the_requests_step_on_the_ranks_named(self, hook: str) -> None:
        on, loud = scheduler(), request(raise_in=hook, raise_ranks=[1])
        admit(on, loud, [1, 2, 3, 4], 0)
        meta = on.build_connector_meta(scheduled(loud, [1, 2, 3, 4], tokens=8))
        step(worker(0)[0], meta)
        with pytest.raises(RuntimeError, match=f"steered to raise in {hook}"):
            step(worker(1)[0], meta)

    def test_a_hook_takes_its_time_once_on_the_rank_of_the_order(self) -> None:
        on, slow = scheduler(), request(sleep_in="wait_for_save", sleep_ms={"1": 50})
        admit(on, slow, [1, 2, 3, 4], 0)
        first = on.build_connector_meta(scheduled(slow, [1, 2, 3, 4], tokens=8))
        again = on.build_connector_meta(scheduled(slow, [1, 2, 3, 4], tokens=1))
        assert [plan.sleep_in for plan in first.sleeping] == ["wait_for_save"]
        assert again.sleeping == []
        begin = time.monotonic()
        step(worker(1)[0], first)
        assert time.monotonic() - begin >= 0.05

    def test_nothing_is_kept_of_a_request_that_has_ended(self) -> None:
        on = scheduler()
        saved(on)
        assert on._requests == {}


class TestCounting:
    def test_calls_of_others_are_counted_and_written_and_its_own_are_not(self, tmp_path: Path) -> None:
        options = {"counts": str(tmp_path)}
        transfer = SimpleNamespace(get_from_extra_config=options.get, engine_id="e_dp1")
        config = SimpleNamespace(
            kv_transfer_config=transfer,
            cache_config=SimpleNamespace(block_size=BLOCK),
            parallel_config=SimpleNamespace(rank=0),
        )
        counting = CountingChild(config, KVConnectorRole.SCHEDULER, SimpleNamespace(num_blocks=BLOCKS))
        for name in ("r", "s"):
            counting.request_finished_all_groups(request(name), ([],))  # calls its own request_finished
        counting.take_events()
        expected = {("scheduler", "request_finished_all_groups"): 2, ("scheduler", "take_events"): 1}
        assert eventually(lambda: calls_counted(tmp_path, "1") == expected)
        assert calls_counted(tmp_path, "0") == {}
        stats = counting.get_kv_connector_stats()
        assert stats is not None
        assert stats.data["calls"]["scheduler.request_finished_all_groups"] == 2
