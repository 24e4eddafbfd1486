"""What differs between versions of vLLM, for the installed one and for others that are imitated."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig, get_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1 import outputs

from kvobs.vllm_api import versions


@pytest.mark.parametrize(
    ("backend", "node", "is_here"),
    [("mp", 0, True), ("mp", 1, False), ("uni", 0, True), ("ray", 0, None), (object, 0, None)],
)
def test_a_worker_knows_whether_the_scheduler_is_on_its_host(backend: Any, node: int, is_here: bool | None) -> None:
    parallel = SimpleNamespace(distributed_executor_backend=backend, node_rank_within_dp=node)
    assert versions.has_core(SimpleNamespace(parallel_config=parallel)) is is_here


def test_this_vllm_has_what_the_tables_say() -> None:
    assert versions.transfer_results() is KVConnectorTransferResults
    assert {field.name for field in dataclasses.fields(KVConnectorTransferResults)} == versions.READ_RESULTS
    assert versions.OUTPUT_FIELDS - versions.output_fields() == {"prefix_replay_checkpoints"}
    assert versions.further_results() == ()
    assert versions.unknown_output_fields() == []


def test_before_030_there_are_no_transfer_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.transfer_results() is KVConnectorTransferResults
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    assert versions.transfer_results() is None
    assert versions.further_results() == ()


def test_a_new_field_of_the_results_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = dataclasses.make_dataclass("Newer", ["parked"], bases=(KVConnectorTransferResults,), kw_only=True)
    monkeypatch.setattr(base, "KVConnectorTransferResults", newer)
    assert versions.further_results() == ("parked",)


def test_failed_loads_are_read_where_an_output_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    output = outputs.KVConnectorOutput(failed_recving={"r"})
    assert versions.failed_loads()(output) == {"r"}
    older = dataclasses.make_dataclass("KVConnectorOutput", sorted(versions.OUTPUT_FIELDS - {"failed_recving"}))
    monkeypatch.setattr(outputs, "KVConnectorOutput", older)
    assert versions.unknown_output_fields() == []
    assert set(versions.failed_loads()(output)) == set()


def test_a_new_hook_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.unknown_hooks() == []
    assert "new_hook" not in versions.hooks()
    monkeypatch.setattr(base.KVConnectorBase_V1, "new_hook", lambda self: None, raising=False)
    assert versions.unknown_hooks() == ["new_hook"]
    assert "new_hook" in versions.hooks()
    assert "request_finished_all_groups" in versions.hooks(), "of SupportsHMA"


class Older(KVConnectorStats):
    to_dict: Any = None  # as before 0.30


@pytest.mark.parametrize(
    ("stats", "plain"),
    [
        (KVConnectorStats(data={"n": 1}), {"n": 1}),
        (Older(data={"n": 1}), {"n": 1}),
        ({"data": {"n": 1}}, {"n": 1}),
        ({"data": 1}, {"data": 1}),
        ({"data": {}, "n": 1}, {"data": {}, "n": 1}),
        (7, {"value": 7}),
    ],
)
def test_stats_become_a_dict_in_whatever_form_they_are_sent(stats: Any, plain: dict[str, Any]) -> None:
    assert versions.stats_reader()(stats) == plain


def test_a_blocks_shape_is_the_first_backends_or_the_only_one() -> None:
    backend = SimpleNamespace(get_kv_cache_shape=lambda **sizes: (2, *sizes.values()))
    for backends in (backend, [backend, None]):
        assert versions.cache_shape(backends, is_mla=False) == (2, 1, 16, 1, 1)
    for stating_none in (None, (), [object()]):
        assert versions.cache_shape(stating_none, is_mla=False) == versions.CACHE_SHAPE
        assert versions.cache_shape(stating_none, is_mla=True) == versions.MLA_CACHE_SHAPE


def test_fields_that_older_versions_lack_have_their_old_meaning() -> None:
    assert versions.block_state(SimpleNamespace()) is None
    assert versions.block_state(SimpleNamespace(kv_connector_block_state=3)) == 3
    assert versions.chunks_of(SimpleNamespace(num_blocks=3)) == 3
    assert versions.chunks_of(SimpleNamespace(num_chunks=4, num_blocks=3)) == 4


def test_before_030_the_current_configuration_has_the_layout() -> None:
    config = VllmConfig()
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    older = {True: "HND", False: "NHD"}
    assert versions.required_cache_layout(lambda: older[get_current_vllm_config() is config], config) == "HND"
    assert versions.required_cache_layout(utils.get_kv_connector_cache_layout, config) is None
    assert versions.required_cache_layout(lambda: "NHD", None) == "NHD"


@pytest.mark.parametrize(
    ("value", "is_on"), [(None, False), ("0", False), ("1", True), ("2", True), ("true", False), ("", False)]
)
def test_the_rust_front_end_is_seen_as_by_vllm(value: str | None, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.RUST_FRONTEND, raising=False)
    if value is not None:
        monkeypatch.setenv(versions.RUST_FRONTEND, value)
    assert versions.has_rust_frontend() is is_on
    try:
        of_vllm = envs.environment_variables[versions.RUST_FRONTEND]()
    except ValueError:
        of_vllm = False
    assert of_vllm is is_on


SHELL = ["sh", "-c", '"$@"; exit', ""]


@pytest.mark.parametrize(
    ("name", "between", "is_rust"), [("vllm-rs", [], True), ("vllm-rs", SHELL, True), ("vllm", [], False)]
)
def test_the_rust_front_end_is_seen_above_the_engine(name: str, between: list[str], is_rust: bool) -> None:
    question = f"""if True:
        import sys
        sys.path[:0] = {sys.path!r}
        from kvobs.vllm_api import versions
        print(versions.has_rust_frontend())
    """
    front_end = f"""if True:
        import ctypes, subprocess, sys
        ctypes.CDLL(None).prctl(15, {name.encode()!r})
        print(subprocess.check_output([*{between!r}, sys.executable, "-c", {question!r}], text=True))
    """
    assert subprocess.check_output([sys.executable, "-c", front_end], text=True).split() == [str(is_rust)]


@pytest.mark.parametrize(("served", "name"), [("a", "a"), (["a", "b"], "a"), (("a", "b"), "a")])
def test_a_model_has_the_first_name_under_which_it_is_served(served: Any, name: str) -> None:
    assert versions.model_name(SimpleNamespace(model_config=SimpleNamespace(served_model_name=served))) == name


@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        ({"data_parallel_index": 3, "data_parallel_rank_local": 1}, (3, 1)),
        ({"data_parallel_index": 3}, (3, 3)),
        ({"data_parallel_index": None}, (2, 2)),
        ({}, (2, 2)),
        ({"data_parallel_index": 3, "distributed_executor_backend": "external_launcher"}, (3, 5)),
    ],
)
def test_an_engine_has_a_number_in_its_group_and_on_its_machine(parallel: Any, place: tuple[int, int]) -> None:
    parallel = {"data_parallel_rank_local": None, "distributed_executor_backend": "mp", **parallel}
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=2, rank=5, **parallel))
    assert versions.engine_position(config) == place
