"""Sets are made as pickle and vLLM's aggregator make them; they have the same order then."""

from __future__ import annotations

import pickle

import hypothesis.strategies as st
from hypothesis import given
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvobs.state.release_order import released_set

requests = st.lists(st.sampled_from([f"r{i}" for i in range(30)]), unique=True)


def output(saved: list[str]) -> ModelRunnerOutput:
    made_by_worker: set[str] = set()
    for request in saved:
        made_by_worker.add(request)
    sent: KVConnectorOutput = pickle.loads(pickle.dumps(KVConnectorOutput(finished_sending=made_by_worker)))
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=sent)


@given(st.lists(requests, min_size=1, max_size=3))
def test_the_order_is_that_of_vllms_aggregator(by_rank: list[list[str]]) -> None:
    combined = KVOutputAggregator(len(by_rank)).aggregate([output(saved) for saved in by_rank])
    assert combined is not None
    assert combined.kv_connector_output is not None
    expected = list(combined.kv_connector_output.finished_sending or ())
    ended = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    assert list(released_set(ended, by_rank, is_aggregated=True)) == expected


@given(requests)
def test_without_an_aggregator_it_is_the_workers(saved: list[str]) -> None:
    made_by_worker: set[str] = set()
    for request in saved:
        made_by_worker.add(request)
    assert list(released_set(saved, [saved], is_aggregated=False)) == list(made_by_worker)


@given(requests, requests)
def test_what_no_rank_has_reported_is_there_too(ended: list[str], reported: list[str]) -> None:
    """A connector may be given up, or has reported before its promise."""
    assert released_set(ended, [reported], is_aggregated=True) == set(ended)
