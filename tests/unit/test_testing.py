"""What ``kvobs.testing`` gives to authors of connectors; the example of its page runs as it stands there."""

import threading
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvobs import testing
from kvobs.testing import (
    BLOCK,
    ROUTERS,
    Loaded,
    Rig,
    Script,
    ScriptedConnector,
    cache_config,
    engine_config,
    entry_of,
)
from kvobs.testing import transfer_config as config_of
from tests.support.example import PAGE, TESTS, imported


@pytest.mark.parametrize("name", TESTS)
def test_the_example_of_the_page_runs(name: str, tmp_path: Path) -> None:
    with imported(tmp_path) as example:
        getattr(example, name)()


def test_the_page_names_all_that_is_public() -> None:
    assert not {name for name in testing.__all__ if f"`{name}`" not in PAGE}


@pytest.mark.parametrize("router", ROUTERS)
def test_an_example_that_loses_a_report_is_found(router: str) -> None:
    """The rig shows what a connector does wrong: here it never says that its save is done."""
    forgetful = Script("forgetful", promises={"r"})
    rig = Rig(router, forgetful)
    rig.add("r", max_tokens=1)
    rig.run(5)
    assert rig.status("r") == "FINISHED_LENGTH_CAPPED"
    assert rig.held_blocks == 5, "of 65 tokens"
    forgetful.say(0, saved="r")
    rig.run(2)
    assert (rig.status("r"), rig.held_blocks, rig.free_blocks) == ("gone", 0, 63)


def test_without_the_hybrid_manager_connectors_may_lack_support() -> None:
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with pytest.raises(ValueError, match="don't support the hybrid KV cache manager"):
        Rig("kvobs", connectors=[example])
    assert len(Rig("kvobs", connectors=[example], hybrid=False).workers) == 1


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_connector_is_built_without_a_rig(role: KVConnectorRole) -> None:
    script = Script("alone")
    config = engine_config(config_of("kvobs", [entry_of(script, kv_role="kv_consumer")]), ranks=2, rank=1)
    assert config.parallel_config.world_size == 2
    (built,) = KVConnectorFactory.create_connector(config, role, cache_config(blocks=8, groups=2))._connectors
    assert isinstance(built, ScriptedConnector)
    assert built.script is script
    assert script.called("__init__") == [role]
    assert built._kv_transfer_config.kv_role == "kv_consumer"


def test_a_connector_of_no_script_is_an_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        Rig("stock", connectors=[{**entry_of(Script("a")), "kv_connector_extra_config": {"tag": "nobody"}}])


def test_prompts_differ_unless_one_begins_as_another() -> None:
    rig = Rig("kvobs", Script("a"))
    r, s, t = rig.add("r"), rig.add("s"), rig.add("t", tokens=2 * BLOCK, prompt_of="r")
    assert r.prompt_token_ids != s.prompt_token_ids
    assert r.prompt_token_ids[: 2 * BLOCK] == t.prompt_token_ids


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("loads", "writers"), [("", []), ("chosen", ["a"]), ("found", ["a", "b"])])
def test_a_connector_loads_what_was_chosen_or_what_it_found(router: str, loads: str, writers: list[str]) -> None:
    written: list[tuple[str, Loaded]] = []
    a, b = (Script(tag, loads=loads, offers={"r": (2 * BLOCK, False)}) for tag in "ab")
    a.on_load, b.on_load = (lambda _, load: written.append(("a", load))), (lambda _, load: written.append(("b", load)))
    b.breaks.add("r")
    rig = Rig(router, a, b)
    rig.add("r")
    bad = rig.step().invalid_block_ids
    assert [tag for tag, _ in written] == writers
    assert [load.is_broken for _, load in written] == [tag == "b" for tag in writers]
    assert bad == ({1, 2} if "b" in writers else set())
    assert all(load[:4] == ("r", 0, ((1, 2),), False) for _, load in written)


@pytest.mark.parametrize("takes", [0, 2])
def test_a_load_between_steps_ends_by_itself(takes: int) -> None:
    rig = Rig("kvobs", Script("a", loads="chosen", takes=takes, offers={"r": (2 * BLOCK, True)}))
    rig.add("r")
    assert [rig.step().finished_recving for _ in range(takes + 1)] == [None] * takes + [{"r"}]


@pytest.mark.parametrize("router", ROUTERS)
def test_methods_wrappers_and_threads_are_a_scripts(router: str) -> None:
    threads = set()

    def start(self: Any, forward_context: Any, *, is_eager: bool = True, **kwargs: Any) -> None:
        self.script.calls.append(("start_load_kv", is_eager))

    script = Script("a", hooks={"start_load_kv": start, "own": lambda self: 3}, wrapped={"wait_for_save"})
    script.has_thread = True
    script.on_call = lambda hook, _: threads.add(threading.current_thread())
    rig = Rig(router, script, Script("b"))
    rig.add("r")
    rig.step()
    assert script.called("start_load_kv") == [True]
    assert len(script.called("wrapped wait_for_save")) == len(script.called("wait_for_save")) == 1
    (connector, other) = rig.workers[0]._connectors
    assert (connector.own(), hasattr(other, "own")) == (3, False)
    assert len(threads) == 2, "the scheduler's side and the worker's"
    assert threading.current_thread() not in threads
