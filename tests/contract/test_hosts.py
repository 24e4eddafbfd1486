"""Every vLLM version in the contract: its hooks are known, kvobs's MultiConnector builds and routes in both roles, its
public surface is that of vLLM's own classes, and ``kvobs.testing`` runs.

Each version is probed once, in a process of its own (see ``probe``); the tests read what it reported.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvobs.vllm_api.hooks import HOOKS, INHERITED, Side
from tests.support.example import TESTS

from . import hosts

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]

LOADER_ONLY = {"get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"}
"""Hooks about one request's load: only the connector that loads it is asked."""

NOT_ON_CALL = {
    "has_connector_metadata": "the wrapper answers for itself",
    "get_finished_count": "the connectors are asked when a load or a promise opens, not when vLLM asks",
    "get_finished": "connectors with get_transfer_results get that one instead",
    "request_finished": "connectors with request_finished_all_groups get that one instead",
}
"""Hooks whose call on the wrapper does not become the same call on the connectors, and why."""

MORE = {
    "MultiConnector": {"aggregation"},  # what kvobs's aggregator asks of the connector
    "KVOutputAggregator": {"ft_defer_kv_connector_outputs"},  # vLLM's since 0.33
}
"""What kvobs's classes have and some version's have not."""

Report = dict[str, Any]


def probe(version: str, *arguments: str) -> Report:
    """Run the probe under ``version``, fetching it first where it is not there."""
    env = hosts.environment(hosts.prepare([version])[version], REPOSITORY)
    command = [sys.executable, "-m", "tests.contract.probe", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise AssertionError(f"the probe failed under vLLM {version}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def probes() -> Iterator[dict[str, Future[Report]]]:
    """Start all probes at once, as many at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {version: pool.submit(probe, version) for version in hosts.VERSIONS}
        started["tomorrow"] = pool.submit(probe, hosts.INSTALLED, "--tomorrow")
        yield started


@pytest.fixture(params=hosts.VERSIONS)
def report(request: pytest.FixtureRequest, probes: dict[str, Future[Report]]) -> Report:
    """What one version's probe found."""
    found = probes[request.param].result()
    assert found["vllm"] == request.param
    return found


@pytest.fixture
def routed(report: Report) -> Report:
    """What became of a pair of recording connectors: the first loads, the second saves."""
    return part(report, "recording")


@pytest.fixture
def surface(report: Report) -> Report:
    return part(report, "surface")


def part(report: Report, name: str) -> Report:
    """Return a part of a report; a part that raised is a failure."""
    assert "error" not in report[name], report[name]["error"]
    return report[name]


def test_every_public_hook_is_in_the_table_or_inherited(report: Report) -> None:
    unknown = set(report["hooks"]) - set(HOOKS) - set(INHERITED)
    assert not unknown, f"vLLM {report['vllm']} has hooks that kvobs/vllm_api/hooks.py does not name: {sorted(unknown)}"


def test_the_table_knows_properties_and_methods_of_the_class(report: Report) -> None:
    for name, hook in report["hooks"].items():
        if name in HOOKS:
            row = HOOKS[name]
            assert row.is_property == (hook["kind"] == "property"), name
            assert (row.side is Side.CONFIG) == (hook["kind"] == "classmethod"), name


NOT_RELEASED = {"can_load_prefix_replay_checkpoint", "consume_prefix_replay_checkpoint"}
"""Hooks of vLLM's main branch, which no version on the package index has."""


def test_every_row_of_the_table_exists_in_some_version(probes: dict[str, Future[Report]]) -> None:
    somewhere = set().union(*(probes[version].result()["hooks"] for version in hosts.VERSIONS))
    assert (set(HOOKS) | set(INHERITED)) - somewhere == NOT_RELEASED
    assert not set(INHERITED) & set(HOOKS)
    assert all(reason.strip() for reason in INHERITED.values())


def test_every_hook_takes_the_arguments_that_the_host_passes(report: Report, routed: Report) -> None:
    for name, hook in report["hooks"].items():
        if hook["kind"] == "property" or name not in HOOKS:
            continue
        passed = hook["parameters"]
        positional = [each for each, kind, _ in passed if kind == "POSITIONAL_OR_KEYWORD"]
        required = [each for each, kind, has_default in passed if kind == "POSITIONAL_OR_KEYWORD" and not has_default]
        extra = {"extra": None} if any(kind == "VAR_KEYWORD" for _, kind, _ in passed) else {}
        side = HOOKS[name].side
        for role in [side.value] if side in (Side.SCHEDULER, Side.WORKER) else ["scheduler", "worker"]:
            ours = signature(routed["seen"]["signatures"][role][name])
            try:
                ours.bind(*positional, **extra)
                ours.bind(*required)
                ours.bind(**dict.fromkeys(positional), **extra)
            except TypeError as error:
                pytest.fail(f"{name} on the {role} takes {ours}, vLLM {report['vllm']} passes {positional}: {error}")


def signature(parameters: list[list[Any]]) -> inspect.Signature:
    """Make a signature again of what the probe wrote down."""
    defaults, kind = {True: None, False: inspect.Parameter.empty}, inspect._ParameterKind
    return inspect.Signature([inspect.Parameter(n, kind[k], default=defaults[d]) for n, k, d in parameters])


def test_every_hook_reaches_both_connectors(report: Report, routed: Report) -> None:
    called: dict[str, list[list[str]]] = {call["hook"]: call["recorded"] for call in routed["calls"]}
    callable_hooks = {n for n, h in report["hooks"].items() if h["kind"] == "method" and n in HOOKS}
    assert not callable_hooks - set(called), "the probe drives every hook of the table"
    for hook in callable_hooks - set(NOT_ON_CALL):
        loader, saver = called[hook]
        assert hook in loader, f"{hook} did not reach the loading connector"
        assert (hook in saver) != (hook in LOADER_ONLY), f"{hook} on the other connector: recorded {saver}"


def test_a_load_and_a_promised_save_are_reported_once_each(routed: Report) -> None:
    """Only the connector that offered is given tokens. Metadata is bound in a step, not after it."""
    seen = routed["seen"]
    assert (seen["allocated"], seen["received"], seen["sent"]) == ([64, 0], ["r1"], ["r1"])
    promised, params = seen["finished"]
    assert promised
    assert params.pop("kvobs").keys() == {"traceparent"}
    assert params == {"saver": "was here"}
    assert not seen["still bound"]


def test_each_connector_gets_its_own_handshake_back(routed: Report) -> None:
    assert routed["seen"]["set_xfer_handshake_metadata"] == [["Loader"], ["Saver"]]
    assert routed["seen"]["set_xfer_handshake_metadata_pp_aware"] == [["Loader"], ["Saver"]]


def test_pages_have_numbers_and_stats_come_as_vllm_sends_them(
    routed: Report,
) -> None:
    assert routed["seen"]["aggregator"] == "kvobs.aggregation.aggregator"
    noted = routed["seen"]["noted"]
    assert noted["hits"] == {"Loader": 1, "Saver": 1}
    assert noted["loaded"] == {"Loader": 64}
    assert noted["calls"]["Loader"] == noted["calls"]["Saver"] == noted["steps"] > 2
    assert noted["spans"] == ["kv.load Loader", "kv.lookup", "kv.save Saver"]
    assert noted["log"] == {"Loader": {"n": 2 + 3}}


def test_the_class_answers_for_its_connectors(report: Report, routed: Report) -> None:
    """No connector needs piecewise graphs or a layout, and all can sleep."""
    answers = routed["seen"]["class"]
    assert set(answers) == {name for name, hook in report["hooks"].items() if hook["kind"] == "classmethod"}
    assert answers["requires_piecewise_for_cudagraph"] is False
    assert answers["get_required_kvcache_layout"] is None
    assert answers.get("supports_sleep_mode", True) is True
    assert answers["build_kv_connector_stats"] == "MultiKVConnectorStats"
    assert answers["build_prom_metrics"] == "MultiKVConnectorPromMetrics"


def test_two_example_connectors_build_and_run_in_both_roles(report: Report) -> None:
    answers = part(report, "example")
    assert answers["get_num_new_matched_tokens"] == [0, False]
    assert answers["request_finished_all_groups"] == [False, None]
    assert answers["build_connector_meta"] == "MultiKVConnectorMetadata"
    assert answers["reset_cache"] is True


def test_classes_extend_vllms_and_have_the_same_public_members(surface: Report) -> None:
    assert surface["not subclasses"] == []
    for name, found in surface["members"].items():
        assert found["missing"] == [], name
        assert set(found["more"]) <= MORE.get(name, set()), name


def test_connectors_of_every_kind_answer_alike_in_both_routers(surface: Report) -> None:
    assert surface["connectors"]["compared"] > 1000
    assert surface["connectors"]["differ"] == []


def test_vllms_aggregator_has_nothing_that_kvobss_would_inherit(surface: Report) -> None:
    assert surface["aggregator"] is None


def test_the_testing_pages_example_and_a_load_on_two_ranks_run(report: Report) -> None:
    waits = "WAITING_FOR_REMOTE_KVS"
    assert part(report, "testing") == {"passed": TESTS, "statuses": [waits, waits, "FINISHED_LENGTH_CAPPED", "gone"]}


def test_an_unknown_hook_reaches_connectors_and_is_logged_once(probes: dict[str, Future[Report]]) -> None:
    """A newer vLLM has a hook more, which its own MultiConnector broadcasts: the routing of it is inherited."""
    found = probes["tomorrow"].result()
    assert found["inherited"]
    assert found["recorded"] == [[["hello"]], [["hello"]]]
    assert len(found["logged"]) == 1
