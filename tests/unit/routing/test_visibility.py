"""What a connector is shown of a step holds exactly the requests that it may see, field by field; vLLM keeps all."""

import copy
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, SchedulerOutput

from kvobs.routing.visibility import _FILTERED, Visibility, write_back

NAMES = tuple("abcdefgh")
names = st.sampled_from(NAMES)
some = st.frozensets(names)

OF_NO_REQUEST = {
    *("free_encoder_mm_hashes", "scheduled_encoder_input_stats", "has_structured_output_requests"),
    *("pending_structured_output_tokens", "kv_connector_metadata", "has_sync_kv_loads", "num_common_prefix_blocks"),
    *("ec_connector_metadata", "ec_manager_metadata", "new_block_ids_to_zero", "kv_cache_block_copies"),
    *("num_spec_tokens_to_schedule", "aux_output_connector_metadata"),
}


@dataclass
class Step:
    """A scheduler's output, and what it was made of."""

    new: list[str]
    cached: list[str]
    output: SchedulerOutput

    @property
    def scheduled(self) -> list[str]:
        return [*self.new, *self.cached]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    order = draw(st.permutations(NAMES))
    first = draw(st.integers(0, 4))
    second = draw(st.integers(first, len(order)))
    new, cached = order[:first], order[first:second]
    scheduled = [*new, *cached]
    within = st.frozensets(st.sampled_from(scheduled)) if scheduled else st.just(frozenset[str]())
    tokens = {request: 1 + NAMES.index(request) for request in scheduled}
    resumed = set(draw(within)) & set(cached)
    handed_off = draw(some)
    output = SchedulerOutput(
        scheduled_new_reqs=[SimpleNamespace(req_id=request) for request in new],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(cached),
            resumed_req_ids=resumed,
            new_token_ids=[[NAMES.index(r)] for r in cached] if draw(st.booleans()) else [],
            all_token_ids={request: [1, 2] for request in resumed},
            new_block_ids=[([NAMES.index(r)],) if NAMES.index(r) % 2 else None for r in cached],
            num_computed_tokens=[10 * NAMES.index(r) for r in cached],
            num_output_tokens=[100 * NAMES.index(r) for r in cached],
        ),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={request: [7] for request in draw(within)},
        scheduled_encoder_inputs={request: [0] for request in draw(within)},
        finished_req_ids=set(draw(some)) - set(scheduled),
        free_encoder_mm_hashes=["h"],
        preempted_req_ids=draw(st.none() | some.map(set)),
        num_invalid_spec_tokens=draw(st.none() | within.map(lambda found: dict.fromkeys(found, 1))),
        new_block_ids_to_zero=[3],
        kv_connector_block_state=draw(
            st.none()
            | st.just(
                KVConnectorBlockState(
                    {*draw(within), *handed_off},  # which of those scheduled, depends on vLLM
                    lambda request: ([NAMES.index(request)],),
                    {r: [(0, 1, 2)] for r in handed_off},
                )
            )
        ),
    )
    return Step(new, cached, output)


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    made = Visibility()
    made.hidden.update(draw(some))
    for request in sorted(draw(some) - made.hidden):
        made.withhold(request, taints=draw(st.booleans()))
    for request in sorted(draw(some) - made.hidden):
        made.drop(request, taints=draw(st.booleans()))
    return made


def by_request(step: Any) -> dict[str, Any]:
    """Return all that an output says of each request that it schedules, whatever the field."""
    cached = step.scheduled_cached_reqs
    said: dict[str, Any] = {new.req_id: ["new"] for new in step.scheduled_new_reqs}
    for i, request in enumerate(cached.req_ids):
        said[request] = [
            request in cached.resumed_req_ids,
            cached.new_token_ids[i] if cached.new_token_ids else None,
            cached.all_token_ids.get(request),
            cached.new_block_ids[i],
            cached.num_computed_tokens[i],
            cached.num_output_tokens[i],
        ]
    state = step.kv_connector_block_state
    for request, rest in said.items():
        rest += [
            step.num_scheduled_tokens[request],
            step.scheduled_spec_decode_tokens.get(request),
            step.scheduled_encoder_inputs.get(request),
            (step.num_invalid_spec_tokens or {}).get(request),
            None if state is None else state.get_block_ids(request),
            None if state is None else state.boundary_state_offloads.get(request),
        ]
    return said


@given(steps(), visibilities())
def test_a_view_holds_exactly_the_requests_not_kept_back(step: Step, visibility: Visibility) -> None:
    kept = visibility.hidden | visibility.dropped | visibility.withheld
    output, before = step.output, copy.deepcopy(step.output)
    view = visibility.shown(output)

    for request in NAMES:
        assert visibility.allocates(request) is (request not in visibility.hidden | visibility.dropped)
        assert visibility.saves(request) is (request not in kept)
    expected = [request for request in step.scheduled if request not in kept]
    whole = by_request(output)
    assert by_request(view) == {request: whole[request] for request in expected}
    assert [new.req_id for new in view.scheduled_new_reqs] == [r for r in step.new if r not in kept]
    assert view.scheduled_cached_reqs.req_ids == [r for r in step.cached if r not in kept]
    cached = view.scheduled_cached_reqs
    lists = [getattr(cached, f.name) for f in fields(cached) if isinstance(getattr(cached, f.name), list)]
    assert {len(values) for values in lists} <= {0, len(cached.req_ids)}, "parallel, or empty"
    assert cached.resumed_req_ids | set(cached.all_token_ids) <= set(cached.req_ids)
    for values in (view.num_scheduled_tokens, view.scheduled_spec_decode_tokens, view.scheduled_encoder_inputs):
        assert set(values) <= set(expected)
    assert set(view.num_invalid_spec_tokens or ()) <= set(expected)
    assert list(view.num_scheduled_tokens) == expected, "in vLLM's order"
    assert view.total_num_scheduled_tokens == sum(view.num_scheduled_tokens.values())
    state = view.kv_connector_block_state
    if state is not None:
        assert not (state.req_ids | set(state.boundary_state_offloads)) & kept
        assert state.req_ids == output.kv_connector_block_state.req_ids - kept
        assert all(state.get_block_ids(request) is None for request in kept)

    assert view.finished_req_ids == output.finished_req_ids - visibility.hidden - visibility.tainted
    preempted = output.preempted_req_ids
    assert view.preempted_req_ids == (None if preempted is None else preempted - visibility.hidden)
    for name in OF_NO_REQUEST:
        assert getattr(view, name) is getattr(output, name), name
    for field in fields(output):
        if field.name not in ("scheduled_new_reqs", "kv_connector_block_state"):
            assert getattr(output, field.name) == getattr(before, field.name), f"{field.name} is vLLM's own"
    assert by_request(output) == by_request(before)


@given(steps(), visibilities())
def test_nothing_is_copied_where_nothing_is_kept(step: Step, visibility: Visibility) -> None:
    everything = {*step.scheduled, *step.output.finished_req_ids, *(step.output.preempted_req_ids or ())}
    state = step.output.kv_connector_block_state
    everything |= state.req_ids if state is not None else set()
    kept = visibility.hidden | visibility.dropped | visibility.withheld | visibility.tainted
    if not kept & everything:
        assert visibility.shown(step.output) is step.output


def test_each_field_of_vllms_output_is_filtered_or_of_no_request() -> None:
    assert {field.name for field in fields(SchedulerOutput)} == _FILTERED | OF_NO_REQUEST


@given(steps(), st.sampled_from(sorted(OF_NO_REQUEST)))
def test_fields_that_a_connector_sets_on_its_view_reach_vllm(step: Step, name: str) -> None:
    """HiSparse sets ``has_sync_kv_loads``, MoRIIO replaces ``new_block_ids_to_zero``."""
    view, mine = copy.copy(step.output), object()
    view.num_scheduled_tokens, view.finished_req_ids = {}, set()
    setattr(view, name, mine)
    before = {field.name: getattr(step.output, field.name) for field in fields(step.output)}
    write_back(view, step.output)
    assert getattr(step.output, name) is mine
    del before[name]
    assert all(getattr(step.output, other) is value for other, value in before.items()), "what was left out stays"


def test_a_request_that_is_hidden_is_neither_withheld_nor_saved() -> None:
    visibility = Visibility()
    visibility.hidden.add("r")
    visibility.withhold("r", taints=True)
    assert (visibility.withheld, visibility.tainted) == (set(), set())
    assert not visibility.allocates("r")
    assert not visibility.saves("r")


@pytest.mark.parametrize("drops_first", [True, False])
def test_a_request_that_is_dropped_stays_so(drops_first: bool) -> None:
    visibility = Visibility()
    for drops in (drops_first, not drops_first):
        if drops:
            visibility.drop("r", taints=False)
        else:
            visibility.withhold("r", taints=False)
    assert (visibility.dropped, visibility.withheld) == ({"r"}, set())
    assert not visibility.allocates("r")


def output_with(finished: set[str]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = finished
    return output


@pytest.mark.parametrize("is_held", [False, True])
def test_a_hidden_request_stays_so_to_its_end_and_is_forgotten(is_held: bool) -> None:
    """Also where a sibling's save holds its blocks, and its release is shown to the connectors."""
    visibility, live = Visibility(), {"r"}
    visibility.hidden.add("r")
    visibility.forget(set(), live)
    visibility.end("r")
    if not is_held:
        live.clear()
    assert visibility.shown(output_with({"r"})).finished_req_ids == set()
    assert visibility.ends_hidden({"r", "s"}) == {"r"}
    visibility.forget({"r"}, live)
    assert ("r" in visibility.hidden) is is_held
    live.clear()
    visibility.forget(set(), live)
    assert not visibility
    assert visibility._over == set()


@pytest.mark.parametrize("taints", [True, False])
def test_a_requests_end_is_shown_unless_it_may_be_saved_there(taints: bool) -> None:
    visibility = Visibility()
    visibility.withhold("r", taints=taints)
    visibility.end("r")
    assert visibility.shown(output_with({"r"})).finished_req_ids == (set() if taints else {"r"})
    assert visibility.ends_hidden({"r"}) == frozenset(), "the workers' side is shown it all the same"
    visibility.forget({"r"}, set())
    assert not visibility
    assert visibility._over == set()
