"""In every vLLM version of the contract, kvobs's public surface is that of vLLM's own classes.

Each version is asked once, in a process of its own (see ``surface``); the tests read what differed.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from . import hosts
from .test_hosts import probe

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

MORE = {
    "MultiConnector": {"aggregation"},  # what kvobs's aggregator asks of the connector
    "KVOutputAggregator": {"ft_defer_kv_connector_outputs"},  # vLLM's since 0.33
    "TransferTopology": {"dcp_size", "dcp_rank", "dcp_source_ranks", "dcp_consumer_count"}  # vLLM's since 0.32
    | {"cross_layers_blocks", "virtually_split_kv_in_blocks"},  # vLLM's until 0.30
}
"""What kvobs's classes have and some version's have not."""

Report = dict[str, Any]


@pytest.fixture(scope="module")
def surfaces() -> Iterator[dict[str, Future[Report]]]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {version: pool.submit(probe, version, module="surface") for version in hosts.VERSIONS}


@pytest.fixture(params=hosts.VERSIONS)
def surface(request: pytest.FixtureRequest, surfaces: dict[str, Future[Report]]) -> Report:
    """What one version's comparison found."""
    found = surfaces[request.param].result()
    assert found["vllm"] == request.param
    return found


def test_every_class_is_a_subclass_of_vllms(surface: Report) -> None:
    assert surface["not subclasses"] == []


def test_the_classes_have_the_same_public_members(surface: Report) -> None:
    for name, found in surface["members"].items():
        assert found["missing"] == [], name
        assert set(found["more"]) <= MORE.get(name, set()), name


def test_children_of_every_kind_give_the_same_answers_through_both_routers(surface: Report) -> None:
    assert surface["children"]["compared"] > 1000
    assert surface["children"]["differ"] == []


def test_topologies_give_the_same_answers(surface: Report) -> None:
    assert surface["topology"]["compared"] > 5000
    assert surface["topology"]["differ"] == []


def test_vllms_aggregator_has_nothing_that_kvobss_would_inherit(surface: Report) -> None:
    assert surface["aggregator"] is None
